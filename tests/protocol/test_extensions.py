"""Extension types other than the raw view: never loaded, and fatal only to what needs the value."""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import ormsgpack
import pytest
from tests.protocol.comparing import same
from tests.protocol.packing import pack

from trio_vllm.errors import DecodeError
from trio_vllm.protocol import (
    EngineCoreOutput,
    SchedulerStats,
    UndecodedBatch,
    UtilityCallOutput,
    bare_token_ids,
    decode_engine_message,
    decode_outputs,
    decode_outputs_lazily,
    index_of,
)

LOADED: list[str] = []


class Payload:
    """Says when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LOADED.append, ("loaded",)


@pytest.fixture(params=[0, 1, 2, 4, 127])
def code(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def ext(code: int) -> ormsgpack.Ext:
    return ormsgpack.Ext(code, pickle.dumps(Payload()))


@pytest.fixture(autouse=True)
def nothing_is_loaded() -> Any:
    yield
    assert LOADED == []


def batch_of(*fields: Any) -> UndecodedBatch:
    batch = decode_outputs_lazily([pack(list(fields))])
    assert isinstance(batch, UndecodedBatch)
    return batch


NANS = "num_nans_in_logits"
"""A field of a row that is no optional one."""


def row(**fields: Any) -> list[Any]:
    raw: list[Any] = [None] * len(attrs.fields(EngineCoreOutput))
    for name, value in {"request_id": "r", "new_token_ids": [1], NANS: 0, **fields}.items():
        raw[index_of(EngineCoreOutput, name)] = value
    return raw


def test_in_an_unknown_field_of_a_row(ext: ormsgpack.Ext) -> None:
    """The field is skipped."""
    batch = batch_of(0, [[*row(), ext], [*row(), None, [{"a": ext}]]])

    for raw in batch.rows:
        assert bare_token_ids(raw) is None
        assert same(batch.decode_row(raw), EngineCoreOutput("r", [1]))


def test_in_an_unknown_field_of_a_message(ext: ormsgpack.Ext) -> None:
    """The field is skipped."""
    batch = batch_of(0, [row()], {}, 1.0, None, None, None, None, "v", ext)

    assert batch.weight_version == "v"


@pytest.mark.parametrize(
    "wrap", [lambda e: e, lambda e: [e], lambda e: {"a": [{"b": e}]}], ids=["bare", "once", "deep"]
)
def test_in_free_values_of_a_row(ext: ormsgpack.Ext, wrap: Any) -> None:
    """That request's output cannot be decoded, the others can."""
    batch = batch_of(3, [row(kv_transfer_params={"key": wrap(ext)}), row()])

    with pytest.raises(DecodeError, match="which is never loaded") as caught:
        batch.decode_row(batch.rows[0])
    assert caught.value.where == "kv_transfer_params['key']"
    assert (caught.value.engine_index, caught.value.request_id) == (3, "r")
    assert batch.decode_row(batch.rows[1]).new_token_ids == [1]


@pytest.mark.parametrize("field", ["kv_transfer_params", "new_token_ids", "num_nans_in_logits"])
def test_in_a_known_field_of_a_row(ext: ormsgpack.Ext, code: int, field: str) -> None:
    """That request's output cannot be decoded."""
    batch = batch_of(0, [row(**{field: ext})])

    assert bare_token_ids(batch.rows[0]) is None
    with pytest.raises(DecodeError, match=rf"not an extension of type {code}") as caught:
        batch.decode_row(batch.rows[0])
    assert caught.value.where == field


def test_among_token_ids(ext: ormsgpack.Ext) -> None:
    """That request's output cannot be decoded."""
    batch = batch_of(0, [row(new_token_ids=[1, ext])])

    assert bare_token_ids(batch.rows[0]) is None
    with pytest.raises(DecodeError, match=r"new_token_ids\[1\]"):
        batch.decode_row(batch.rows[0])


@pytest.mark.parametrize(
    "name", ["num_running_reqs", "kv_connector_stats", "waiting_lora_adapters"]
)
def test_in_statistics(ext: ormsgpack.Ext, name: str) -> None:
    """The rows can be decoded, the statistics cannot."""
    for value in (ext, {"a": ext}) if name != "num_running_reqs" else (ext,):
        batch = batch_of(0, [row()], {name: value})

        assert batch.decode_row(batch.rows[0]).new_token_ids == [1]
        with pytest.raises(DecodeError, match="which is never loaded") as caught:
            batch.decode_stats()
        assert (caught.value.where or "").startswith(f"scheduler_stats.{name}")


def test_instead_of_statistics(ext: ormsgpack.Ext) -> None:
    """The rows can be decoded, the statistics cannot."""
    batch = batch_of(0, [row()], ext)

    with pytest.raises(DecodeError, match="not an extension of type"):
        batch.decode_stats()


def test_in_unknown_statistics(ext: ormsgpack.Ext) -> None:
    """They are skipped."""
    batch = batch_of(0, [], {"num_running_reqs": 2, "new": ext})

    assert batch.decode_stats() == SchedulerStats(num_running_reqs=2)


@pytest.mark.parametrize(
    "wrap",
    [lambda e: e, lambda e: [1, e], lambda e: {"a": {"b": [e]}}],
    ids=["bare", "once", "deep"],
)
def test_as_a_utility_result(ext: ormsgpack.Ext, code: int, wrap: Any) -> None:
    """That call has failed."""
    message = decode_outputs([pack([0, [], None, 0.0, [7, None, [None, wrap(ext)]]])])

    assert isinstance(message, UtilityCallOutput)
    assert (message.output.call_id, message.output.result) == (7, None)
    assert message.output.failure_message == (
        f"the result must not hold an extension of type {code}, which is never loaded"
    )


@pytest.mark.parametrize(
    "wrap", [lambda e: e, lambda e: [e], lambda e: ["module", e]], ids=["bare", "once", "deep"]
)
def test_as_the_type_of_a_utility_result(ext: ormsgpack.Ext, wrap: Any) -> None:
    """Results are taken as they are, their type is not read."""
    message = decode_outputs([pack([0, [], None, 0.0, [7, None, [wrap(ext), {"a": 1}]]])])

    assert isinstance(message, UtilityCallOutput)
    assert (message.output.failure_message, message.output.result) == (None, {"a": 1})


def test_in_an_argument_of_a_utility_call(ext: ormsgpack.Ext) -> None:
    """An engine refuses the call."""
    with pytest.raises(DecodeError, match=r"args\[1\]: must not hold an extension"):
        decode_engine_message([b"\x03", pack([0, 1, "m", [1, {"a": ext}]])])


def test_in_a_request(ext: ormsgpack.Ext) -> None:
    """An engine refuses the request, and knows its id."""
    for position in (3, 10, 18):
        raw: list[Any] = ["r", [1], None, None, None, 0.0, *[None] * 5, 0, 0, 0, None, False]
        raw += [None] * 6
        raw[position] = {"extra_args": {"a": ext}, "a": ext}
        with pytest.raises(DecodeError) as caught:
            decode_engine_message([b"\x00", pack(raw)])
        assert caught.value.request_id == "r"


def test_as_a_key_of_a_map(ext: ormsgpack.Ext) -> None:
    """Such a map cannot be decoded, or the key is none of ours."""
    batch: Any = None
    try:
        batch = decode_outputs_lazily([pack_with_key(ext)])
    except DecodeError:
        return
    with pytest.raises(DecodeError):
        batch.decode_row(batch.rows[0])


def pack_with_key(ext: ormsgpack.Ext) -> bytes:
    """A row whose ``kv_transfer_params`` have an extension for a key."""
    head = b"\x92\x00\x91" + b"\x99" + b"\xa1r" + b"\x91\x01" + b"\xc0" * 6
    return head + b"\x81" + pack(ext) + b"\x01"
