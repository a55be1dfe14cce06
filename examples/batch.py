"""Complete many prompts: JSON lines in, JSON lines out; a second run does what the first has left.

Each input line is an object with ``prompt_token_ids`` and, if wanted, ``max_tokens``; each output
line has the number of its input line, from 1, and the completion. They are in the order in which
completions end; sort by ``line`` to have that of the input. What fails is told on standard error,
and the exit code is 1 then.

    python examples/batch.py prompts.jsonl completions.jsonl [HANDSHAKE_ADDRESS]
    python examples/batch.py prompts.jsonl completions.jsonl vllm serve … {port} …

With an engine command, which names its port as ``{port}``, engines are started here, and again when
they die. With an address they are awaited there, and the next ones after these have died.
"""

import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from trio_vllm import (
    EngineCoreError,
    EngineDeadError,
    FinishReason,
    GenerateRequest,
    HandshakeOwner,
    Llm,
    SamplingParams,
    open_llm,
    spawn_engine,
)
from trio_vllm.client import EngineSource

STARTS = 3
"""How often engines are connected to; a prompt that kills them must not do so for ever."""


class Batch:
    """The prompts of one file, of which the completions go to another."""

    def __init__(self, prompts: str, completions: str) -> None:
        self._prompts = prompts
        self._completions = Path(completions)
        self._completions.touch()
        lines = self._completions.read_text("utf-8").splitlines()
        self._done = {str(json.loads(line)["line"]) for line in lines}
        self.failed_count = 0

    def requests(self) -> Iterator[GenerateRequest]:
        """What is to be done, each with the number of its line as its id."""
        with open(self._prompts, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if str(number) in self._done:
                    continue
                try:
                    request = to_request(str(number), line)
                except (TypeError, ValueError) as error:
                    self._fail(str(number), error)
                else:
                    yield request

    async def run(self, llm: Llm) -> bool:
        """Take requests as there is room, write as they end; False if the engine has left some.

        `EngineDeadError` also means that there are some left.
        """
        has_left = False
        async with (
            await trio.open_file(self._completions, "a", buffering=1) as out,  # line by line
            llm.map(self.requests(), limit=256, retries=2) as results,
        ):
            async for request, output in results:
                assert request.request_id is not None
                if isinstance(output, EngineCoreError):
                    self._fail(request.request_id, output)
                elif output.finish_reason is FinishReason.ERROR:
                    self._fail(request.request_id, output.completions[0].error)
                elif output.finish_reason is FinishReason.ABORT:  # it shuts down
                    has_left = True
                else:
                    self._done.add(request.request_id)
                    answer = {
                        "line": int(request.request_id),
                        "token_ids": output.token_ids,
                        "finish_reason": output.finish_reason.name.lower(),
                    }
                    await out.write(json.dumps(answer) + "\n")
        return not has_left

    def _fail(self, number: str, error: object) -> None:
        """Note that a prompt has failed for good; only another run of the program tries it again."""
        self._done.add(number)
        self.failed_count += 1
        print(f"line {number}: {error}", file=sys.stderr)


def to_request(number: str, line: str) -> GenerateRequest:
    """What a line asks for; its number is the id."""
    item = json.loads(line)
    if not isinstance(item, dict) or "prompt_token_ids" not in item:
        raise ValueError("there are no prompt_token_ids")
    return GenerateRequest(
        request_id=number,
        prompt_token_ids=item["prompt_token_ids"],
        sampling_params=SamplingParams(max_tokens=item.get("max_tokens", 64)),
    )


@asynccontextmanager
async def engines(arguments: Sequence[str]) -> AsyncIterator[EngineSource]:
    """The engines of a command, or those that come to an address."""
    if len(arguments) > 1:
        async with spawn_engine(arguments, restart=True) as mode:
            yield mode
    else:
        address = arguments[0] if arguments else "tcp://127.0.0.1:29550"
        yield HandshakeOwner(address, ready_timeout=30)


async def main(prompts: str, completions: str, *arguments: str) -> int:
    """Go on with other engines when they have died; gives the exit code."""
    batch = Batch(prompts, completions)
    async with engines(arguments) as mode:
        for start in range(1, STARTS + 1):
            try:
                async with open_llm(mode) as llm:
                    if await batch.run(llm):
                        return 1 if batch.failed_count else 0
            except EngineDeadError as error:
                print(f"start {start} of {STARTS}: {error}", file=sys.stderr)
    return 1


if len(sys.argv) < 3:
    sys.exit("usage: batch.py PROMPTS COMPLETIONS [HANDSHAKE_ADDRESS | ENGINE_COMMAND {port} …]")
sys.exit(trio.run(partial(main, *sys.argv[1:])))
