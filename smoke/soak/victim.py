"""A frontend that is killed while it has requests: ``python -m soak.victim PORT``."""

import sys

import trio

from soak.loads import read_for_ever
from trio_vllm import HandshakeOwner, open_llm

STREAMS = 50


async def main(port: int) -> None:
    """Have streams without end."""
    mode = HandshakeOwner(handshake_address=f"tcp://127.0.0.1:{port}", ready_timeout=60)
    async with open_llm(mode) as llm, trio.open_nursery() as nursery:
        events = [trio.Event() for _ in range(STREAMS)]
        for event in events:
            nursery.start_soon(read_for_ever, llm, 0, event)
        for event in events:
            await event.wait()
        print("all streams have begun", flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
