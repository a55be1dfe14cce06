"""Large arrays of a request are copied in a thread, and then lent to ØMQ."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from tests.client.world import make_request
from tests.llm.world import make_prompt, open_llm_world

from trio_vllm.client.large_arrays import LARGE, with_own_arrays
from trio_vllm.protocol import EngineCoreRequest, Tensor
from trio_vllm.protocol.multimodal import (
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
)


def feature(data: Any) -> MultiModalFeatureSpec:
    """A feature with one value."""
    return MultiModalFeatureSpec(
        data={"pixels": MultiModalFieldElem(data, MultiModalField("batched"))},
        modality="image",
        identifier="a",
        mm_position=PlaceholderRange(offset=0, length=1),
    )


def request_with(data: Any) -> EngineCoreRequest:
    """A request with one feature."""
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1], mm_features=[feature(data)])


def value_of(request: EngineCoreRequest) -> Any:
    """The value of its only feature."""
    assert request.mm_features is not None
    (only,) = request.mm_features
    assert only.data is not None
    return only.data["pixels"].data


def some_array() -> np.ndarray[Any, Any]:
    """One that is large."""
    return np.ones(LARGE // 4, np.float32)


async def test_an_array_that_may_change_is_copied_once_for_all_requests() -> None:
    array = some_array()
    given = request_with(array)

    first, second = await with_own_arrays([given, given])

    array[:] = 2
    assert value_of(first)[0] == 1
    assert not value_of(first).flags.writeable
    assert value_of(second) is value_of(first)
    assert value_of(given) is array


async def test_tensors_and_what_is_in_lists() -> None:
    data = bytearray(LARGE)
    given = request_with([Tensor("uint8", (LARGE,), memoryview(data)), 1, np.ones(3)])

    (got,) = await with_own_arrays([given])

    tensor, number, small = value_of(got)
    data[0] = 1
    assert tensor.data[0] == 0
    assert tensor.data.readonly
    assert number == 1
    assert small is value_of(given)[2]


async def test_embeddings() -> None:
    given = EngineCoreRequest(
        request_id="r", prompt_embeds=Tensor.from_numpy(some_array().reshape(2, -1))
    )

    (got,) = await with_own_arrays([given])

    assert got.prompt_embeds is not None
    assert memoryview(got.prompt_embeds.data).readonly
    assert got.prompt_embeds.shape == (2, LARGE // 8)
    assert got.mm_features is None


async def test_an_array_that_is_not_contiguous_is_copied_even_if_it_cannot_change() -> None:
    array = some_array().reshape(2, -1).T
    array.flags.writeable = False

    (got,) = await with_own_arrays([request_with(array)])

    assert value_of(got).flags.c_contiguous


def read_only() -> np.ndarray[Any, Any]:
    """A large array that is lent as it is."""
    array = some_array()
    array.flags.writeable = False
    return array


class Deep(list[Any]):
    """A list without end."""

    def __iter__(self) -> Any:
        yield self


@pytest.mark.parametrize(
    "given",
    [
        EngineCoreRequest(request_id="r", prompt_token_ids=[1]),
        request_with(read_only()),
        request_with(np.ones(3)),
        request_with(Tensor("uint8", (LARGE,), bytes(LARGE))),
        request_with(Deep()),
        EngineCoreRequest(request_id="r", mm_features="no features"),  # type: ignore[arg-type]
        EngineCoreRequest(request_id="r", mm_features=[1, feature(1)]),  # type: ignore[list-item]
        EngineCoreRequest(request_id="r", prompt_embeds=1),  # type: ignore[arg-type]
    ],
    ids=["no arrays", "read-only", "small", "bytes", "deep", "text", "numbers", "a number"],
)
async def test_the_others_stay_as_they_are(given: EngineCoreRequest) -> None:
    requests = [given]

    assert await with_own_arrays(requests) is requests


async def test_only_features_with_large_arrays_are_copied() -> None:
    small = feature(1)
    absent = feature(2)
    absent.data = None
    given = EngineCoreRequest(request_id="r", mm_features=[small, feature(some_array()), absent])

    (got,) = await with_own_arrays([given])

    assert got.mm_features is not None
    assert got.mm_features[0] is small
    assert got.mm_features[2] is absent


@pytest.mark.parametrize("is_raw", [False, True])
async def test_what_is_sent_is_the_copy(is_raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def copied(requests: Sequence[EngineCoreRequest]) -> list[EngineCoreRequest]:
        return [attrs.evolve(request, priority=7) for request in requests]

    monkeypatch.setattr("trio_vllm.client.driver.with_own_arrays", copied)
    features = [feature(some_array())]
    async with open_llm_world(client_options={"is_multimodal": True}) as world:

        async def call() -> None:
            async with world.llm.client.call(make_request(mm_features=features)):
                await trio.sleep_forever()

        async def generate() -> None:
            await world.llm.generate(make_prompt(request_mm_features=features))

        await world.start(call if is_raw else generate)

        added, *_ = world.engine.received()
        assert isinstance(added, EngineCoreRequest)
        assert added.priority == 7
        world.llm.client.abort_all()
        world.nursery.cancel_scope.cancel()
