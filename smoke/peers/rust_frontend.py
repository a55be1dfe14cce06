"""vLLM's Rust frontend with one mock engine, and with four."""

from frontend_checks import PACE, check_frontend
from harness import PARSERS, free_port, mock_engine, ok, rust_frontend
from provision import Peers


def main(peers: Peers) -> None:
    """Start each frontend in turn, with its engines."""
    for engine_count in (1, 4):
        count = str(engine_count)
        handshake, http = free_port(), free_port()
        options = (*PARSERS, "--data-parallel-size", count)
        with (
            rust_frontend(peers, handshake, http, *options) as frontend,
            mock_engine(handshake, "--engine-count", count, *PACE) as mock,
        ):
            frontend.wait_for_http(f"http://127.0.0.1:{http}/health")
            check_frontend(http, mock, engine_count)
        ok(f"{engine_count} engines")
