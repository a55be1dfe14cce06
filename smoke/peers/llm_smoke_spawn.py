"""``llm-smoke all --spawn`` with vLLM's own engine: a fresh one for each smoke."""

from harness import headless_command, timed
from llm_smoke_checks import ALL_PASS, expect_lines, llm_smoke
from provision import Peers


def main(peers: Peers) -> None:
    """Run it."""
    variables = [f"{name}={value}" for name, value in peers.environment.items()]
    command = ["env", *variables, *headless_command(peers, peers.model, "{port}")]
    with (
        timed("all, each with a fresh engine"),
        llm_smoke("all", "--spawn", "--", *command) as smoke,
    ):
        expect_lines(smoke, 0, *ALL_PASS, timeout=800)
