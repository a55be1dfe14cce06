"""A frontend is killed and started again on the same port: the mock engines serve the next one."""

import signal
import time

import trio

from frontend_checks import PARSERS, check_stream, mock_engine
from peers import free_port, rust_frontend

LIMIT = 5.0
"""Seconds from the start of the next frontend to its first answer, of which it needs one itself."""

handshake, http = free_port(), free_port()
with mock_engine(handshake, "--engine-count", "2") as mock:
    for life in range(3):
        begin = time.monotonic()
        with rust_frontend(handshake, http, *PARSERS, "--data-parallel-size", "2") as frontend:
            frontend.wait_for_http(f"http://127.0.0.1:{http}/health", LIMIT)
            trio.run(check_stream, http, mock, 2, 1)
            seconds = time.monotonic() - begin
            if seconds > LIMIT:
                raise SystemExit(f"life {life} took {seconds:.1f} s to begin")
            frontend.send_signal(signal.SIGKILL)
            frontend.wait_for_exit()
        print(f"ok life {life} {seconds:.1f} s", flush=True)
