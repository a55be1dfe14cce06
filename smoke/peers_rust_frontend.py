"""vLLM's Rust frontend with one mock engine, and with four."""

from frontend_checks import PACE, PARSERS, check_frontend, mock_engine
from peers import free_port, rust_frontend

for engine_count in (1, 4):
    count = str(engine_count)
    handshake, http = free_port(), free_port()
    with (
        rust_frontend(handshake, http, *PARSERS, "--data-parallel-size", count) as frontend,
        mock_engine(handshake, "--engine-count", count, *PACE) as mock,
    ):
        frontend.wait_for_http(f"http://127.0.0.1:{http}/health")
        check_frontend(http, mock, engine_count)
    print(f"ok {engine_count} engines", flush=True)
