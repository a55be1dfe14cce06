"""Every kind of junk in every field a caller can set: a `RequestError`, or it can be sent."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from tests.protocol.comparing import same
from tests.protocol.strategies import (
    JUNK,
    chunks_request,
    embeds_request,
    full_request,
    mixed_request,
    pooling_request,
)
from tests.protocol.test_requests_arrive import LIMITS, arrived

from trio_vllm.client.input_processing import check_request, fill_defaults
from trio_vllm.errors import InvalidFieldError, RequestError
from trio_vllm.protocol import EngineCoreRequest, Tensor, encode_add


def parts(value: Any) -> Iterator[Any]:
    """A value and all attrs objects inside of it, but arrays."""
    match value:
        case Tensor():
            pass
        case dict():
            for item in value.values():
                yield from parts(item)
        case list():
            for item in value:
                yield from parts(item)
        case _ if attrs.has(type(value)):
            yield value
            for attribute in attrs.fields(type(value)):
                yield from parts(getattr(value, attribute.name))


REQUESTS = [full_request, pooling_request, chunks_request, embeds_request, mixed_request]

PROMPT = {"prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "mm_features"}
"""Fields that are checked by each other."""


def places() -> Iterator[tuple[Callable[[], EngineCoreRequest], int, str]]:
    """Every field of every class, in the first request that has the class; `PROMPT` in all."""
    seen: set[type[Any]] = set()
    for make in REQUESTS:
        in_request = list(parts(make()))
        for index, part in enumerate(in_request):
            for attribute in attrs.fields(type(part)):
                if type(part) not in seen or attribute.name in PROMPT:
                    yield make, index, attribute.name
        seen.update(map(type, in_request))


PLACES = list(places())


def spoiled(request: EngineCoreRequest, index: int, name: str) -> Iterator[EngineCoreRequest]:
    """The request with one kind of junk after the other in one place."""
    part = list(parts(request))[index]
    for junk in JUNK:
        setattr(part, name, junk)
        yield request


def refusal(request: EngineCoreRequest) -> RequestError | None:
    try:
        check_request(request, LIMITS)
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize(("make", "index", "name"), PLACES)
def test_junk_is_refused_or_arrives(
    make: Callable[[], EngineCoreRequest], index: int, name: str
) -> None:
    for request in spoiled(make(), index, name):
        resolved = fill_defaults(request)
        error = refusal(resolved)
        if error is None:
            arrived(resolved)
        else:
            assert len(str(error)) < 400 or name == "request_id"


@pytest.mark.parametrize(("make", "index", "name"), PLACES)
def test_writing_refuses_junk_without_a_check_before(
    make: Callable[[], EngineCoreRequest], index: int, name: str
) -> None:
    for request in spoiled(make(), index, name):
        with contextlib.suppress(InvalidFieldError):
            encode_add(request)


@pytest.mark.parametrize("make", REQUESTS)
def test_neither_check_nor_resolution_changes_the_request(
    make: Callable[[], EngineCoreRequest],
) -> None:
    request = make()
    before = copy.deepcopy(request)

    check_request(fill_defaults(request, 5, "guidance"), LIMITS)
    encode_add(request)

    assert same(before, request)
