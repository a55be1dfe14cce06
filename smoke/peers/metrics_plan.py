"""Requests of all kinds, as JSON, for two frontends that are to count the same.

A step is a group of requests at once: ``paused`` before and resumed after it (a mode of pausing), ``leave``
by their callers or ``abort`` by the engine before they ran, ``refused``. The parameters are those of vLLM's
``SamplingParams``, besides ``ends`` (heed the end of text) and ``choice`` (structured outputs).
"""

import random
from typing import Any

Step = dict[str, Any]

PARENTHESIS = 7
"""The id of the token ``(``."""

END_OF_TEXT = 31992

ALWAYS: dict[str, Any] = {"temperature": 0.0, "logit_bias": {str(PARENTHESIS): 100.0}}

COUNT = 200


def generation_plan() -> list[Step]:
    """`COUNT` requests; those that their callers leave come last."""
    pick = random.Random(15)

    def prompt(length: int) -> list[int]:
        return [pick.randrange(300, 30_000) for _ in range(length)]

    def group(count: int, params: dict[str, Any], **circumstances: Any) -> Step:
        requests: list[Any] = [
            {"prompt": prompt(pick.randrange(1, 60)), "params": {"max_tokens": 6, **params}}
            for _ in range(count)
        ]
        return {"requests": requests, **circumstances}

    shared = prompt(100)
    again = [
        {"requests": [{"prompt": shared + prompt(length), "params": {"max_tokens": 3}}]}
        for length in range(20)
    ]
    long = {"prompt": prompt(600), "params": {}}
    return [
        *(group(10, {"max_tokens": length}) for length in (1, 2, 5, 9, 40)),
        *again,
        group(10, {"n": 2, "seed": 3}),
        group(5, {"n": 3, "seed": 4, "max_tokens": 9}),
        group(10, {"logprobs": 4}),
        group(10, {"prompt_logprobs": 2, "logprobs": 0}),
        group(5, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
        group(5, {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "bad_words": []}),
        group(15, {**ALWAYS, "stop_token_ids": [PARENTHESIS], "min_tokens": 2}),
        group(10, {"temperature": 0.0, "logit_bias": {str(END_OF_TEXT): 100.0}, "ends": True}),
        *(group(1, {**ALWAYS, "stop": ["((("], "max_tokens": 60}) for _ in range(15)),
        # One token and the end: of two choices each engine would draw its own.
        group(10, {"choice": ["("], "ends": True}),
        group(10, {"max_tokens": 30}, paused="keep", abort=True),
        group(5, {}, paused="abort", refused=True),
        {"requests": [long] * 5, "refused": True},
        group(5, {"temperature": -1.0}, refused=True),
        group(10, {"max_tokens": 30}, paused="keep", leave=True),
    ]


def pooling_plan() -> list[Step]:
    """Prompts to embed."""
    pick = random.Random(15)
    requests = [
        {"prompt": [pick.randrange(300, 30_000) for _ in range(length)], "params": {}, "pool": True}
        for length in range(1, 40, 2)
    ]
    for request in requests:
        request["params"] = {"task": "embed"}
    return [{"requests": requests}]
