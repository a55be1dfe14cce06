"""Benchmarks of the client by itself, on messages made in advance."""

from bench.engines import python
from bench.figures import Figure, Target
from bench.turns import Effort, ask_in_turns
from bench.workers import working

VLLM, MOCK = "vLLM", "the mock"
DISPATCHES = ((1, VLLM), (64, VLLM), (256, VLLM), (256, MOCK), (1024, VLLM))
"""Requests in flight, and whose rows they get: the mock leaves out what is nil."""


def measure_dispatch(effort: Effort) -> list[Figure]:
    """What decoding outputs and handing them out costs."""
    figures: list[Figure] = []
    with working("the client", python("bench.work_client")) as worker:
        for concurrency, writer in DISPATCHES:
            target = Target(1e6) if concurrency >= 256 else None
            steps = effort.part(50_000 if concurrency == 1 else 500_000 / concurrency)
            figure = ask_in_turns(
                effort,
                worker,
                f"dispatch to {concurrency}, final only, rows of {writer}",
                "outputs/CPU-s",
                "more",
                "unpackb alone",
                target,
                task="dispatch",
                concurrency=concurrency,
                steps=steps,
                short=writer == MOCK,
            )
            figures.append(figure)
        figure = ask_in_turns(
            effort,
            worker,
            "dispatch to 256, final only, with metrics",
            "outputs/CPU-s",
            "more",
            "without observers",
            task="observed",
            concurrency=256,
            steps=effort.part(1000),
        )
        figures.append(figure)
        for concurrency in (64, 256):
            figure = ask_in_turns(
                effort,
                worker,
                f"dispatch to {concurrency} streams",
                "wake-ups/CPU-s",
                "more",
                "bare trio tasks",
                Target(80_000),
                task="wake_ups",
                concurrency=concurrency,
                steps=effort.part(100_000 / concurrency),
            )
            figures.append(figure)
    return figures


def measure_submission(effort: Effort) -> list[Figure]:
    """What starting a request costs, its task included."""
    with working("the client", python("bench.work_client")) as worker:
        return [
            ask_in_turns(
                effort,
                worker,
                f"submission of {length} tokens: CPU",
                "µs/request",
                "less",
                "packb alone",
                task="submissions",
                count=effort.part(2000),
                prompt_length=length,
            )
            for length in (32, 1024)
        ]


def measure_client_memory(_effort: Effort) -> list[Figure]:
    """What a request in flight needs besides a task that sleeps."""
    with working("the client", python("bench.work_client")) as worker:
        answer = worker.ask(task="memory", count=100_000)
    return [
        Figure(
            "Llm, 100,000 requests: memory",
            "B/request",
            "less",
            [answer["value"] - answer["yardstick"]],
            target=Target(2048),
            note=f"besides its sleeping task, {answer['yardstick']:.0f} B",
        )
    ]


def measure_pauses(effort: Effort) -> list[Figure]:
    """How long huge messages keep all other tasks from running."""
    rows, requests = effort.part(1_000_000), effort.part(50_000)
    limit = Target(20.0)
    pauses: list[tuple[str, str, str, Target | None, dict[str, int]]] = [
        ("by a prompt of 100,000 tokens", "pause_by_prompt", "packb alone", None, {}),
        ("by logprobs of the vocabulary", "pause_by_logprobs", "copying them", None, {}),
        ("by 1,024 outputs with logprobs", "pause_by_outputs", "unpackb alone", limit, {}),
        ("by rows of nobody", "pause_by_strangers", "unpackb alone", limit, {"rows": rows}),
        ("by requests at once", "pause_by_requests", "tasks", limit, {"requests": requests}),
        ("by a tensor of 200 MB, sent", "pause_by_sent_tensor", "copying it", limit, {}),
        ("by a tensor of 200 MB, received", "pause_by_received_tensor", "copying it", limit, {}),
        ("of the mock by 1,000,000 tokens", "pause_of_the_mock", "unpackb alone", None, {}),
    ]
    with working("the client", python("bench.work_pauses")) as worker:
        return [
            ask_in_turns(
                effort, worker, f"pause {name}", "ms", "less", yardstick, target, task=task, **size
            )
            for name, task, yardstick, target, size in pauses
        ]
