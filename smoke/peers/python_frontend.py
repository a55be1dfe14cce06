"""vLLM's Python frontend with mock engines: one, four, and four behind two API servers."""

from frontend_checks import PACE, check_frontend
from harness import free_port, mock_engine, ok, python_frontend
from provision import Peers


def main(peers: Peers) -> None:
    """Start each frontend in turn, with its engines."""
    for engine_count, api_servers in ((1, None), (4, None), (4, 2)):
        count = str(engine_count)
        servers = () if api_servers is None else ("--api-server-count", str(api_servers))
        handshake, http = free_port(), free_port()
        options = ("--data-parallel-size", count, *servers)
        with (
            mock_engine(handshake, "--engine-count", count, *PACE) as mock,
            python_frontend(peers, handshake, http, *options) as frontend,
        ):
            frontend.wait_for_http(f"http://127.0.0.1:{http}/health", 180)
            check_frontend(http, mock, engine_count, api_servers or engine_count)
        ok(f"{engine_count} engines, {api_servers or 'default'} API servers")
