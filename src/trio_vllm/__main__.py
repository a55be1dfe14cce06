"""``python -m trio_vllm llm-smoke …`` and ``python -m trio_vllm mock-engine …``."""

import sys

from trio_vllm.cli import run_llm_smoke, run_mock_engine

COMMANDS = {"llm-smoke": run_llm_smoke, "mock-engine": run_mock_engine}

if __name__ == "__main__":
    command = COMMANDS.get(sys.argv.pop(1)) if len(sys.argv) > 1 else None
    if command is None:
        print(f"usage: python -m trio_vllm {{{','.join(COMMANDS)}}} …", file=sys.stderr)
        sys.exit(2)
    command()
