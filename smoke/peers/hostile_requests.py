"""Random requests, hostile values in every field, to a real engine; it must stay alive and be idle.

A request that was sent may end in any way, but it must end; afterwards the engine answers a plain
request as before, and its prefix cache can be reset, which it cannot while a request holds blocks. What
the client refuses is not sent and does not count.
"""

import collections
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import trio

from harness import free_port, headless_engine, owner
from provision import Peers
from trio_vllm import (
    GenerateRequest,
    Llm,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    open_llm,
)
from trio_vllm.errors import InvalidFieldError
from trio_vllm.protocol import (
    KvHintAction,
    KvHintsEnvelope,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    RepetitionDetectionParams,
)

COUNT = 200
"""Requests to send, unless the command line says how many."""

VOCABULARY = 32000
CONTEXT = 512
AT_ONCE = 16
ANSWER_TIMEOUT = 400.0
EOS = 31992

HOSTILE_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, 1e-9, -0.0, 1e308, 5e-324, math.nan, math.inf, -math.inf, 2**31, 2**32, 2**63,
    -(2**63), 2**64, True, "1", None, np.float32(0.5), np.int64(3),
)  # fmt: skip

Draw = Callable[[random.Random], Any]


def number(*good: Any) -> Draw:
    """Mostly a value that is meant, sometimes any."""
    return lambda rng: rng.choice(good if rng.random() < 0.8 else HOSTILE_NUMBERS)


def ids(least: int = 0, most: int = 6) -> Draw:
    """Token ids, some at and beyond the ends of the vocabulary."""

    def draw(rng: random.Random) -> Any:
        edges = (0, 1, 255, 256, EOS, VOCABULARY - 1)
        beyond = (VOCABULARY, 2**31 - 1, 2**32 - 1, -1)
        pool = edges if rng.random() < 0.9 else edges + beyond
        picked = [
            rng.choice(pool) if rng.random() < 0.5 else rng.randrange(VOCABULARY)
            for _ in range(rng.randint(least, most))
        ]
        forms: list[Callable[[list[int]], Any]] = [list, list, list, tuple, np.array, iter]
        return rng.choice(forms)(picked)

    return draw


def one_of(*values: Any) -> Draw:
    """Any of these."""
    return lambda rng: rng.choice(values)


SCHEMAS: tuple[Any, ...] = (
    {}, {"type": "object"}, {"type": "integer", "multipleOf": 1000}, {"type": "nonsense"}, "{", "true",
    {"type": "string", "pattern": "(" * 50}, {"type": "string", "pattern": "(a{1,200}){1,200}"},
    {"type": "array", "minItems": 10**6}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"enum": []},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {str(i): {"type": "string"} for i in range(60)}},
    {"type": "string", "minLength": 100_000}, {"enum": ["x" * 10_000]}, "[" * 70 + "]" * 70,
    {"type": "integer", "minimum": 10**30}, {"type": "number", "maximum": -1e300}, {"not": {}},
    {"type": "object", "required": ["a"], "additionalProperties": False}, {"type": []},
)  # fmt: skip

REGEXES = (
    "", "a", "(", ")", "[", "a{", "(a+)+b", "(a|a)*b", "[a-z]{1,50}", "a{100000}", "\\p{L}+", "(?=a)b",
    "\\1", "^a$", "$a", "a^", "(?i)a", ".*", "\\", "[]a]", "[^]", "(a{0,50}){0,50}", "a**", "\u00e9+",
    "\\d{3}-\\d{4}", "(?:(?:(?:(?:a)*)*)*)*", "\0",
)  # fmt: skip

GRAMMARS = (
    'root ::= "a" | "b"', "root ::= root", 'root ::= "a" root | ""', 'a ::= "b"', "root ::= b", "root ::=",
    'root ::= "', 'start: "a"', "start: start", "hello", " ", "start: /(/", "root ::= [a-z]*",
    'root ::= (("a"?)*)*',
)  # fmt: skip

TAGS = (
    "{}", "[", '{"type":"structural_tag","format":{"type":"any_text"}}',
    '{"type":"structural_tag","format":{"type":"nonsense"}}',
    '{"structures":[{"begin":"<a>","schema":{"type":"object"},"end":"</a>"}],"triggers":["<a"]}',
    '{"structures":[],"triggers":[]}', '{"structures":[{"begin":"<a>","schema":{},"end":""}],"triggers":["<b"]}',
)  # fmt: skip


def structured_outputs(rng: random.Random) -> Any:
    """A constraint, of which some can be done."""
    kinds: dict[str, tuple[Any, ...]] = {
        "json": SCHEMAS,
        "regex": REGEXES,
        "grammar": GRAMMARS,
        "structural_tag": TAGS,
        "choice": (
            ["yes", "no"],
            [""],
            ['"', "\\", "\n", "\x00"],
            ["\u20ac"] * 3,
            [],
            "ab",
            ["x" * 5000],
        ),
        "json_object": (True, False),
    }
    kind = rng.choice(list(kinds))
    chosen = {kind: rng.choice(kinds[kind])}
    if rng.random() < 0.05:
        chosen["json_object"] = True
    if rng.random() < 0.1:
        chosen["backend"] = rng.choice(["guidance", "outlines", "xgrammar", "nobody"])
    return StructuredOutputsParams(**chosen)


def prompt_logprob_ids(rng: random.Random) -> Any:
    rows, width = rng.choice([(1, 1), (3, 2), (9, 1)])
    return np.full((rows, width), rng.choice([-1, 0, 5, VOCABULARY - 1, VOCABULARY]), np.int32)


SAMPLING: dict[str, Draw] = {
    "n": number(1, 2, 3),
    "presence_penalty": number(-2.0, 2.0, 0.3),
    "frequency_penalty": number(-2.0, 2.0, 0.3),
    "repetition_penalty": number(1e-300, 1e-9, 1e300, 2.0, 1.1),
    "temperature": number(0, 0.0, 1e-6, 0.001, 2.0, 0.7),
    "watermarking": one_of(True, False, None, 1),
    "top_p": number(1e-300, 0.5, 1.0),
    "top_k": number(-1, 0, 1, 5, VOCABULARY, VOCABULARY + 1, 2**31 - 1),
    "min_p": number(0.0, 1.0, 0.5),
    "seed": number(-1, 0, 2**63 - 1, -(2**63), 7),
    "stop_token_ids": ids(),
    "max_tokens": number(1, 2, 5, 9, 40),
    "min_tokens": number(0, 1, 3, 5),
    "logprobs": number(0, 1, 5, -1, VOCABULARY),
    "prompt_logprobs": number(0, 1, 5, -1),
    "prompt_logprob_token_ids": prompt_logprob_ids,
    "prompt_logprob_start": number(0, 1, 8),
    "logprob_token_ids": ids(),
    "stream_interval": number(1, 3, 100),
    "eos_token_id": number(EOS, 0, VOCABULARY - 1, VOCABULARY),
    "all_stop_token_ids": ids(),
    "structured_outputs": structured_outputs,
    "logit_bias": lambda rng: {
        rng.choice((0, 5, EOS, VOCABULARY - 1, VOCABULARY)): rng.choice((100.0, -100.0, 1e300, 0.5, math.nan))
        for _ in range(rng.randint(0, 3))
    },
    "allowed_token_ids": ids(),
    "extra_args": one_of(
        {}, {"kv_transfer_params": {"do_remote_prefill": True}}, {"kv_transfer_params": 5}, {"a": {"b": [1, None]}},
        {"ec_transfer_params": "x"}, {"kv_cache_report_mode": 7}, {"a": 2**64}, {"kv_transfer_params": []},
    ),
    "bad_words_token_ids": lambda rng: [ids(0, 3)(rng) for _ in range(rng.randint(0, 3))],
    "skip_reading_prefix_cache": one_of(True, False, None, 0),
    "thinking_token_budget": number(-1, 0, 1, 100),
    "repetition_detection": lambda rng: RepetitionDetectionParams(
        max_pattern_size=rng.choice((0, 1, 5, 2**32 - 1)),
        min_pattern_size=rng.choice((0, 1, 2)),
        min_count=rng.choice((0, 1, 2, 3, 2**31)),
    ),
    "routed_experts_prompt_start": number(0, 1, 4),
    "trace_decode_token_ids": ids(),
}  # fmt: skip

REQUEST: dict[str, Draw] = {
    "arrival_time": number(0.0, 1e18, -1.0),
    "lora_request": lambda rng: LoRARequest(
        lora_name="a", lora_int_id=rng.choice((0, 1)), lora_path="/nowhere"
    ),
    "cache_salt": one_of("", "salt", "\ud800", "x" * 1000),
    "trace_headers": one_of({}, {"traceparent": "nonsense"}, {"a": 1}),
    "priority": number(0, -5, 2**31 - 1, -(2**31)),
    "data_parallel_rank": number(0, 1, 7),
    "session_id": one_of("", "s", "\0"),
    "kv_hints": lambda rng: KvHintsEnvelope(
        protocol_version=rng.choice(("1", "x", "")),
        message_id="m",
        actions=[
            KvHintAction(
                action_id="a",
                action_type=rng.choice(("pin", "")),
                action_version="1",
                payload={"b": [1]},
            )
        ],
    ),
    "mm_features": lambda rng: [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier="x",
            mm_position=PlaceholderRange(offset=0, length=2),
        )
    ],
    "reasoning_parser_kwargs": one_of({}, {"chat_template_kwargs": {"a": 1}}, {"a": object}),
    "reasoning_ended": one_of(True, False),
}


def prompt(rng: random.Random) -> Any:
    """Mostly short; some that fill the context, or more."""
    length = (
        rng.choice((1, 2, 3, 4, 9, 10, 17, 64))
        if rng.random() < 0.9
        else rng.choice((0, CONTEXT - 1, CONTEXT))
    )
    return (
        ids(length, length)(rng)
        if rng.random() < 0.2
        else [rng.randrange(VOCABULARY) for _ in range(length)]
    )


def few(rng: random.Random, fields: dict[str, Draw], most: int) -> dict[str, Any]:
    return {name: fields[name](rng) for name in rng.sample(sorted(fields), rng.randint(0, most))}


def draw(rng: random.Random) -> GenerateRequest:
    """A request of some fields, each with a value that may be hostile."""
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 9), **few(rng, SAMPLING, 7)}
    fields = few(rng, REQUEST, 2)
    return GenerateRequest(
        prompt_token_ids=prompt(rng), sampling_params=SamplingParams(**params), **fields
    )


# Running -----------------------------------------------------------------------------------------

PLAIN = GenerateRequest(
    prompt_token_ids=[5, 6, 7], sampling_params=SamplingParams(temperature=0, max_tokens=8)
)


async def plain_answer(llm: Llm) -> list[int]:
    with trio.fail_after(ANSWER_TIMEOUT):
        return list((await llm.generate(PLAIN)).token_ids)


class Run:
    """One engine and the requests it gets."""

    def __init__(self, llm: Llm, rng: random.Random, count: int) -> None:
        self.llm = llm
        self.rng = rng
        self.left = count
        self.ends: collections.Counter[str] = collections.Counter()

    async def worker(self) -> None:
        while self.left > 0:
            await self.send_one()

    async def send_one(self) -> None:
        try:
            request = draw(self.rng)
        except (TypeError, InvalidFieldError) as error:
            self.ends[f"refused: {type(error).__name__}"] += 1
            return
        begin = time.monotonic()
        try:
            with trio.fail_after(ANSWER_TIMEOUT):
                output = await self.llm.generate(request)
            self.left -= 1
            for completion in output.completions:
                self.ends[f"ended: {completion.finish_reason}"] += 1
        except RequestError as error:
            self.ends[f"refused: {type(error).__name__}"] += 1
            await trio.lowlevel.checkpoint()
        except trio.TooSlowError:
            raise SystemExit(f"no answer in {ANSWER_TIMEOUT:g} s to {request}") from None
        except Exception as error:
            self.left -= 1
            kind = f"failed: {type(error).__name__}"
            self.ends[kind] += 1
            if self.ends[kind] == 1:
                print(f"the first {kind}: {error}\n  of {request}", flush=True)
            if not self.llm.client.is_healthy:
                raise SystemExit(f"the engine is gone: {error}") from None
        if time.monotonic() - begin > 60:
            print(f"{time.monotonic() - begin:.0f} s for {request}", flush=True)


async def check(port: int, count: int, seed: int) -> None:
    """Send so many requests, some at a time, between two that are plain."""
    async with open_llm(owner(port), vocab_size=VOCABULARY) as llm:
        before = await plain_answer(llm)
        run = Run(llm, random.Random(seed), count)
        begin = time.monotonic()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(run.worker)
        seconds = time.monotonic() - begin
        print(f"{count} requests in {seconds:.0f} s: {dict(sorted(run.ends.items()))}", flush=True)
        after = await plain_answer(llm)
        if after != before:
            raise SystemExit(f"the plain request gave {before} before and {after} after")
        if not await llm.client.reset_prefix_cache():
            raise SystemExit("the engine is not idle: its prefix cache cannot be reset")
        print("the engine is alive and idle", flush=True)


def main(peers: Peers, count: int = COUNT, seed: int = 0) -> None:
    """Run one engine and send everything."""
    port = free_port()
    with headless_engine(peers, port):
        trio.run(check, port, count, seed)
