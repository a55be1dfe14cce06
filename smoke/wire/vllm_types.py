"""Run by vLLM's Python: read messages with vLLM's own types, and write them again.

Usage: ``python -m wire.vllm_types CASES RESULTS``, both JSON files. A case has the name of a type and frames in
hexadecimal digits. Its result is the view of the value and the frames that vLLM writes of it, or the
error. See ``peers/wire_types.py``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest
from vllm.v1.engine.utils import EngineHandshakeMetadata
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, msgspec

from wire.plain_views import view

TYPES = {
    "request": EngineCoreRequest,
    "outputs": EngineCoreOutputs,
    "ready": EngineCoreReadyResponse,
    "init": EngineHandshakeMetadata,
    "any": None,
    "adapter": None,
}


def main(cases: Path, results: Path) -> None:
    """Work through all cases."""
    done = [answer(case) for case in json.loads(cases.read_text())]
    results.write_text(json.dumps(done))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What becomes of one case."""
    frames = [bytes.fromhex(frame) for frame in case["frames"]]
    kind = TYPES[case["type"]]
    try:
        value = MsgpackDecoder(kind).decode(frames)
        if case["type"] == "adapter":  # as the engine converts arguments of utility calls
            value = msgspec.convert(value, LoRARequest)
    except Exception as error:  # vLLM's business, and whatever it is, it is what we want to know
        return {"error": f"{type(error).__name__}: {error}"}
    written = MsgpackEncoder().encode(value)
    return {"view": view(value), "frames": [bytes(frame).hex() for frame in written]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
