"""A frontend is killed and started again on the same port: the mock engines serve the next one."""

import signal
import time

import trio

from frontend_checks import check_stream
from harness import PARSERS, CheckError, free_port, mock_engine, ok, rust_frontend
from provision import Peers

LIMIT = 5.0
"""Seconds from the start of the next frontend to its first answer, of which it needs one itself."""


def main(peers: Peers) -> None:
    """Kill it twice."""
    handshake, http = free_port(), free_port()
    options = (*PARSERS, "--data-parallel-size", "2")
    with mock_engine(handshake, "--engine-count", "2") as mock:
        for life in range(3):
            begin = time.monotonic()
            with rust_frontend(peers, handshake, http, *options) as frontend:
                frontend.wait_for_http(f"http://127.0.0.1:{http}/health", LIMIT)
                trio.run(check_stream, http, mock, 2, 1)
                seconds = time.monotonic() - begin
                if seconds > LIMIT:
                    raise CheckError(f"life {life} took {seconds:.1f} s to begin")
                frontend.send_signal(signal.SIGKILL)
                frontend.wait_for_exit()
            ok(f"life {life}", seconds)
