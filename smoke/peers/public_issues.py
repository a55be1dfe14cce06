"""What public reports say ends, hangs or fools an engine of vLLM, tried through our client.

Each case has the number of the issue or pull request of vllm-project/vllm that tells of it. Whatever a
case sends must be refused, or end, in time; after each a plain request must be answered as before. The
engine's KV cache holds little more than one request of full length, and it schedules by priority.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio

from harness import CONTEXT, expect, free_port, headless_engine, ok, owner
from provision import Peers
from trio_vllm import (
    EngineCoreRequest,
    GenerateRequest,
    Llm,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.errors import DecodeError, DuplicateRequestIdError
from trio_vllm.protocol import Tensor

HIDDEN_SIZE = 64
VOCAB_SIZE = 32_000
EOS = 31_992
ANSWER_TIMEOUT = 300.0
"""Seconds. With the first log probabilities an engine on a CPU compiles code, for a minute if it is busy."""

BLOCKS = 8
"""Of 128 tokens on a CPU; one is never used."""

Run = Callable[[Llm], Awaitable[list[str]]]
"""Sends something, and gives how each request ended."""

Schema = dict[str, Any]
NESTED: Schema = {"type": "object"}
for _ in range(80):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


def ask(prompt: list[int] | None = None, **params: Any) -> GenerateRequest:
    values = {"max_tokens": 8, "temperature": 0.0, **params}
    return GenerateRequest(prompt or [1, 2, 3], sampling_params=SamplingParams(**values))


async def end_of(llm: Llm, request: GenerateRequest) -> str:
    """How a request ends, which it must within some time."""
    with trio.fail_after(ANSWER_TIMEOUT):
        try:
            output = await llm.generate(request)
        except RequestError as error:
            return f"refused ({error.reason})" if hasattr(error, "reason") else "refused"
        except DecodeError as error:
            return f"told apart ({error.reason})"
    return "/".join(str(completion.finish_reason) for completion in output.completions)


def together(make: Callable[[], list[GenerateRequest]]) -> Run:
    """Send requests at once."""

    async def run(llm: Llm) -> list[str]:
        ends: list[str] = []

        async def one(request: GenerateRequest) -> None:
            ends.append(await end_of(llm, request))

        async with trio.open_nursery() as nursery:
            for request in make():
                nursery.start_soon(one, request)
        return ends

    return run


def one(**params: Any) -> Run:
    """Send one request; what its parameters' constructor does not take is refused as well."""

    def make() -> list[GenerateRequest]:
        return [ask(**params)]

    run = together(make)

    async def guarded(llm: Llm) -> list[str]:
        try:
            return await run(llm)
        except TypeError as error:
            return [f"refused ({error})"]

    return guarded


def constrained(**constraint: Any) -> Run:
    structured = StructuredOutputsParams(**constraint)
    return one(structured_outputs=structured, eos_token_id=EOS)


def in_turn(*runs: Run) -> Run:
    """Send one after the other."""

    async def run(llm: Llm) -> list[str]:
        return [end for each in runs for end in await each(llm)]

    return run


# More than one request's parameters ------------------------------------------------------------------


async def penalized_embeddings(llm: Llm) -> list[str]:
    """Penalties look at prompt tokens, which embeddings have not; of two lengths, beside one that has."""
    rng = np.random.default_rng(0)
    ends: list[str] = []

    async def one_of(length: int, number: int, penalty: float) -> None:
        embeds = rng.normal(size=(length, HIDDEN_SIZE)).astype(np.float32)
        params = SamplingParams(max_tokens=4, repetition_penalty=penalty)
        request = EngineCoreRequest(
            request_id=f"embeds-{length}-{number}-{penalty}",
            prompt_token_ids=None,
            prompt_embeds=Tensor.from_numpy(embeds),
            sampling_params=params,
        )
        with trio.fail_after(ANSWER_TIMEOUT):
            try:
                async with llm.client.call(request) as outputs:
                    ends.extend(
                        [str(o.output.finish_reason) async for o in outputs if o.output.finished]
                    )
            except RequestError as error:
                ends.append(f"refused ({error})")

    async with trio.open_nursery() as nursery:
        for number in range(3):
            for length in (90, 30):
                nursery.start_soon(one_of, length, number, 1.2)
                nursery.start_soon(one_of, length, number, 1.0)
        nursery.start_soon(end_of, llm, ask([5] * 60, repetition_penalty=1.1))
    return ends


async def same_id(llm: Llm) -> list[str]:
    """An engine dies of an id that it has already."""
    params = SamplingParams(max_tokens=20, temperature=0.0)
    request = EngineCoreRequest(request_id="same", prompt_token_ids=[1], sampling_params=params)
    async with llm.client.call(request) as outputs:
        try:
            async with llm.client.call(request):
                pass
        except DuplicateRequestIdError:
            count = sum([len(item.output.new_token_ids) async for item in outputs])
            return ["refused", f"{count} tokens"]
    return ["sent twice"]


async def aborted_anywhere(llm: Llm) -> list[str]:
    """Requests are left before, while and after they are scheduled."""

    async def leave(number: int) -> None:
        with trio.move_on_after(0.002 * number):
            await llm.generate(ask([number] * 100, max_tokens=50, logprobs=2))

    async with trio.open_nursery() as nursery:
        for number in range(1, 60):
            nursery.start_soon(leave, number)
    return ["left"]


def long_prompts() -> list[GenerateRequest]:
    return [ask([number + 1] * (CONTEXT - 60), max_tokens=50) for number in range(6)]


# The cases -------------------------------------------------------------------------------------------

CASES: dict[int, Run] = {
    641: one(temperature=1e-4, top_p=1e-4, top_k=1),
    1623: one(temperature=0.0001, top_p=0.0001),
    5822: one(temperature=-1.0),
    5890: one(logprobs=1, prompt_logprobs=1, max_tokens=1),
    5963: one(logit_bias={"AI": -100}),
    6521: one(max_tokens=0, prompt_logprobs=1),
    6707: one(max_tokens=None),
    10648: together(lambda: [GenerateRequest([])]),
    11248: constrained(regex="[a-z]{3}", backend="lm-format-enforcer"),
    13067: together(lambda: [ask([1] * CONTEXT), ask([1] * (CONTEXT + 1))]),
    15041: same_id,
    15949: constrained(json=NESTED),
    16445: together(lambda: [ask([1] * CONTEXT, max_tokens=1)]),
    16529: one(logit_bias={191222: -100, 99999: 5}),
    16836: together(lambda: [ask([7] * 400, prompt_logprobs=10, max_tokens=1)]),
    16911: constrained(grammar="?start: select_statement\n?select_statement: \"SELECT \" column"),
    17623: in_turn(constrained(regex="[a"), constrained(grammar="root ::= "), constrained(json="{")),
    18783: together(
        lambda: [
            ask(
                structured_outputs=StructuredOutputsParams(choice=["ab", "ac"]),
                eos_token_id=EOS,
                allowed_token_ids=[5, 6, 7],
            )
        ]
    ),
    17670: constrained(choice=[f" {number} " for number in range(11)]),
    21204: constrained(json_object=True, backend="guidance"),
    21519: together(lambda: [ask(n=4, temperature=1.0, max_tokens=20) for _ in range(6)]),
    25482: together(lambda: [ask([n] * n, seed=n, max_tokens=n % 7 + 1) for n in range(1, 60)]),
    28307: together(lambda: [ask([3] * n, repetition_penalty=1.2) for n in (1, 50, 200)]),
    30346: constrained(json={"type": "array", "items": [{"type": "string"}, {"type": "number"}]}),
    35541: in_turn(together(lambda: [ask() for _ in range(10)]), together(long_prompts)),
    37642: in_turn(constrained(regex="^(.*)$"), constrained(regex="^(|.*)$")),
    42157: aborted_anywhere,
    43920: in_turn(
        constrained(grammar='root ::= "a" | "b"'),
        constrained(grammar='root ::= "a"\nroot ::= "b"'),
        constrained(grammar='root ::= missing'),
    ),
    45689: together(
        lambda: [ask(logprobs=n, max_tokens=9) for n in (0, 1, 5, 20)] + [ask(max_tokens=9)]
    ),
    53665: together(
        lambda: [
            ask(
                structured_outputs=StructuredOutputsParams(json={"enum": ["x", "y"]}),
                eos_token_id=EOS,
                min_tokens=20,
                max_tokens=40,
            )
        ]
    ),
    54195: one(stop_token_ids=[151645], max_tokens=300, min_tokens=1),
    55164: in_turn(
        one(allowed_token_ids=list(range(2000))),
        one(logit_bias=dict.fromkeys(range(2000), 1.0)),
        one(stop_token_ids=list(range(200)), min_tokens=1),
        one(bad_words_token_ids=[[1]] * 200),
    ),
    57719: penalized_embeddings,
}  # fmt: skip


async def check(port: int) -> None:
    """Try all of them, with a plain request after each."""
    mode = owner(port)
    async with open_llm(mode, hidden_size=HIDDEN_SIZE, accepts_prompt_embeds=True) as llm:
        plain = (await llm.generate(ask())).token_ids
        for number, run in CASES.items():
            with trio.fail_after(2 * ANSWER_TIMEOUT):
                ends = await run(llm)
                after = (await llm.generate(ask())).token_ids
            expect(f"a plain request after {number}", after, plain)
            ok(f"{number}: {', '.join(dict.fromkeys(ends))}"[:200])
        with trio.fail_after(ANSWER_TIMEOUT):
            expect("idle", await llm.client.reset_prefix_cache(), True)
        expect("health", llm.client.is_healthy, True)
        ok(f"{len(CASES)} public reports")


def main(peers: Peers) -> None:
    """Run one engine and send everything."""
    port = free_port()
    options = ["--enable-prompt-embeds", "--scheduling-policy", "priority"]
    options += ["--num-gpu-blocks-override", str(BLOCKS)]
    with headless_engine(peers, port, *options):
        trio.run(check, port)
