"""`Logprobs` and `SamplingMask`: the arrays that outputs carry for sampled and prompt tokens.

Sample logprobs travel as numpy arrays (``LogprobsLists``), prompt logprobs as torch tensors
(``LogprobsTensors``); see upstream ``vllm/v1/outputs.py`` and
``engine-core-client/src/protocol/logprobs.rs``. Both decode to `Logprobs`, which keeps the arrays
without a copy and makes records of them on request.

Column 0 of a row is the token that was sampled (or stands in the prompt), with its own rank; the
others are the most probable tokens in falling order, so the token of column 0 often comes twice.
If a request asked for certain ids (``logprob_token_ids``), the others are these, in its order, and
their ranks are but column numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from trio_vllm.protocol.arrays import NUMPY_ARRAY, TENSOR_AS_NUMPY, Array
from trio_vllm.protocol.codec import (
    AuxFrames,
    Buffer,
    Codec,
    CodecError,
    Frames,
    map_with_path,
    optional,
    wrong_type,
)
from trio_vllm.protocol.msgpack import pack, raw_view, unpack
from trio_vllm.protocol.structs import set_codec
from trio_vllm.values import define, frozen


@frozen
class TokenLogprob:
    """One candidate token of a position.

    ``rank`` counts from 1, the most probable token; 0 means that ``logprob`` is not a number.
    """

    token_id: int
    logprob: float
    rank: int


@frozen
class PositionLogprobs:
    """The candidates of one position: first the token itself, then the most probable ones."""

    entries: tuple[TokenLogprob, ...]

    @property
    def token(self) -> TokenLogprob:
        """The token that was sampled, or stands in the prompt, at this position."""
        return self.entries[0]


_ARRAY: Any = attrs.field(eq=attrs.cmp_using(eq=np.array_equal))


@define
class Logprobs:
    """Log probabilities of ``R`` positions with ``C`` candidates each; may alias the message.

    NaN and infinities are kept as the engine sent them.
    """

    token_ids: Array = _ARRAY
    """int32 or int64 ``[R, C]``."""
    logprobs: Array = _ARRAY
    """float32 ``[R, C]``."""
    ranks: Array = _ARRAY
    """int32 or int64 ``[R]``: the rank of column 0."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[PositionLogprobs]:
        """One record per position."""
        rows = zip(
            self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True
        )
        for ids, values, rank in rows:
            ranks = [rank, *range(1, len(ids))]
            yield PositionLogprobs(tuple(map(TokenLogprob, ids, values, ranks)))

    @property
    def positions(self) -> tuple[PositionLogprobs, ...]:
        """All records; made anew at each access."""
        return tuple(self)

    def cut(self, columns: int) -> Logprobs:
        """At most this many columns: an engine pads all rows of a step to the widest request."""
        if self.token_ids.shape[1] <= columns:
            return self
        return Logprobs(self.token_ids[:, :columns], self.logprobs[:, :columns], self.ranks)

    @staticmethod
    def concatenate(parts: list[Logprobs]) -> Logprobs:
        """The rows of all parts; narrower ones are padded with token 0 and minus infinity."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.token_ids.shape[1] for part in parts)
        return Logprobs(
            np.concatenate([_widened(part.token_ids, width, 0) for part in parts]),
            np.concatenate([_widened(part.logprobs, width, -np.inf) for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


def _widened(array: Array, width: int, fill: float) -> Array:
    missing = width - array.shape[1]
    if not missing:
        return array
    return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)


def _check(logprobs: Logprobs) -> Logprobs:
    ids, values, ranks = logprobs.token_ids, logprobs.logprobs, logprobs.ranks
    for name, array, kinds, dimensions in (
        ("token_ids", ids, ("i4", "i8"), 2),
        ("logprobs", values, ("f4",), 2),
        ("ranks", ranks, ("i4", "i8"), 1),
    ):
        if array.dtype.str[1:] not in kinds or array.ndim != dimensions:
            wanted = f"{dimensions}-dimensional {' or '.join(kinds)}"
            raise CodecError(
                f"must be {wanted}, not {array.ndim}-dimensional {array.dtype}"
            ).add_path(f".{name}")
        if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
            raise CodecError("must not be negative").add_path(f".{name}")
    if ids.shape != values.shape or len(ids) != len(ranks):
        raise CodecError(f"shapes {ids.shape}, {values.shape} and {ranks.shape} do not match")
    if len(ids) and not ids.shape[1]:
        raise CodecError("rows have no column")
    return logprobs


_PARTS = ("token_ids", "logprobs", "ranks")


def _logprobs_codec(array: Codec[Array], length: int) -> Codec[Logprobs]:
    """Make a codec that writes ``length`` elements, of which the first three are the arrays."""

    def decode(raw: Any, frames: Frames) -> Logprobs:
        if type(raw) is not list or len(raw) < 3:
            raise wrong_type("an array of 3 or more", raw)
        if any(item is not None for item in raw[3:length]):
            raise CodecError("must not carry cumulative token counts")
        return _check(Logprobs(*map_with_path(array.decode, raw[:3], frames, _PARTS)))

    def encode(value: Logprobs, aux: AuxFrames) -> Any:
        if not isinstance(value, Logprobs):
            raise wrong_type("Logprobs", value)
        parts = (value.token_ids, value.logprobs, value.ranks)
        raw = map_with_path(array.encode, parts, aux, _PARTS)
        _check(value)
        return [*raw, *[None] * (length - 3)]

    return Codec("logprobs", decode, encode)


SAMPLE_LOGPROBS = _logprobs_codec(NUMPY_ARRAY, 4)
PROMPT_LOGPROBS = _logprobs_codec(TENSOR_AS_NUMPY, 5)


# Collecting --------------------------------------------------------------------------------------


_VALUES = np.dtype("<f4")
_INTEGERS: dict[str, np.dtype[Any]] = {"<i4": np.dtype("<i4"), "<i8": np.dtype("<i8")}
_END = b"\xc0"


@frozen
class PackedLayout:
    """Where the arrays are in the packed sample logprobs of one token, if they travel inline."""

    columns: int
    heads: tuple[bytes, bytes, bytes]
    """What stands before the bytes of the token ids, of the logprobs, and of the rank."""
    dtype: np.dtype[Any]
    """Of all of it; the fields ``ids``, ``values`` and ``ranks`` are the arrays."""

    @property
    def sizes(self) -> list[int]:
        """The bytes of each array."""
        return [self.dtype[name].itemsize for name in _FIELDS]

    def join(self, *arrays: Buffer) -> bytes:
        """Pack the bytes of the arrays."""
        ids, values, ranks = arrays
        before_ids, before_values, before_ranks = self.heads
        return b"".join((before_ids, ids, before_values, values, before_ranks, ranks, _END))


_FIELDS = ("ids", "values", "ranks")


@functools.lru_cache(maxsize=64)
def packed_layout(columns: int, id_type: str, rank_type: str) -> PackedLayout:
    """The layout of so many columns of ids and values, and a rank, of certain types."""
    ids, rank = _INTEGERS[id_type], _INTEGERS[rank_type]
    arrays: Any = [np.dtype((ids, (columns,))), np.dtype((_VALUES, (columns,))), rank]
    before_ids, before_values, before_ranks = map(_head, arrays)
    heads = (b"\x94" + before_ids, before_values, before_ranks)
    offsets, end = [], 0
    for head, array in zip(heads, arrays, strict=True):
        offsets.append(end + len(head))
        end = offsets[-1] + array.itemsize
    dtype: Any = {"names": _FIELDS, "formats": arrays, "offsets": offsets}
    return PackedLayout(columns, heads, np.dtype(dtype | {"itemsize": end + len(_END)}))


def _head(array: np.dtype[Any]) -> bytes:
    """What stands before the bytes of an array, of one row, that travels inline."""
    packed = pack([array.base.str, [1, *array.shape], raw_view(bytes(array.itemsize))])
    return packed[: -array.itemsize]


def layout_of_packed(packed: bytes) -> PackedLayout:
    """The layout of what a `LogprobsPattern` has found."""
    (id_type, (_, columns), _), _, (rank_type, *_), _ = unpack(packed)
    return packed_layout(columns, id_type, rank_type)


@define
class _Rows:
    """Packed rows of one layout, one behind the other, to be made into arrays at once."""

    layout: PackedLayout
    lead: bytes
    size: int
    data: bytearray = attrs.field(factory=bytearray)

    @classmethod
    def of(cls, layout: PackedLayout) -> _Rows:
        return cls(layout, layout.heads[0], layout.dtype.itemsize)

    def take(self, columns: int | None) -> Logprobs:
        """Give, and forget, at most so many columns of what is here."""
        rows = np.frombuffer(self.data, self.layout.dtype)
        self.data = bytearray()
        ids, values = rows["ids"][:, :columns], rows["values"][:, :columns]
        return Logprobs(ids.copy(), values.copy(), rows["ranks"].copy())


class LogprobsCollector:
    """Collects the sample logprobs of a request row by row; makes arrays of them at the end.

    To decode the arrays of each row costs ten times what its token costs, and most rows are alike:
    one token, with bytes of the same layout as those before. Of these only the bytes are kept.
    """

    __slots__ = ("_columns", "_parts", "_room", "_rows", "_unchecked")

    def __init__(self, columns: int | None, *, room: int = 64 * 1024) -> None:
        """Keep this many columns of each row: the engine sends those of the widest request.

        With None all are kept. Narrower rows are left to be decoded. When there are ``room`` bytes of
        rows, arrays are made of them, which are smaller.
        """
        self._columns = columns
        self._room = room
        self._parts: list[Logprobs] = []
        self._unchecked: list[Logprobs] = []  # those of the parts that no decoder has checked
        self._rows: _Rows | None = None

    def add_packed(self, packed: bytes) -> bool:
        """Add the logprobs of one token as a `LogprobsPattern` found them; False as `add_raw`."""
        rows = self._rows
        # The beginning and the length tell the layout.
        if rows is None or len(packed) != rows.size or not packed.startswith(rows.lead):
            layout = layout_of_packed(packed)
            if self._columns is not None and layout.columns < self._columns:
                return False
            rows = self._rows_of(layout)
        rows.data += packed
        if len(rows.data) >= self._room:
            self._close_rows()
        return True

    def add_raw(self, raw: Any, frames: Frames) -> bool:
        """Add the logprobs of one token as they were unpacked; False if they are to be decoded."""
        try:
            (id_type, shape, ids), (type_, shape_, values), (rank_type, rank_shape, ranks), _ = raw
            one, columns = shape
            id_size, rank_size = _INTEGERS[id_type].itemsize, _INTEGERS[rank_type].itemsize
        except (KeyError, TypeError, ValueError):
            return False
        ids, values, ranks = (_bytes_of(data, frames) for data in (ids, values, ranks))
        if not (
            type_ == "<f4"
            and one == 1
            and type(columns) is int
            and shape_ == shape
            and rank_shape == [1]
            and _ is None
            and len(ids) == columns * id_size > 0
            and len(values) == columns * 4
            and len(ranks) == rank_size
            and (self._columns is None or columns >= self._columns)
        ):
            return False
        layout = packed_layout(columns, id_type, rank_type)
        rows = self._rows_of(layout)
        rows.data += layout.join(ids, values, ranks)
        if len(rows.data) >= self._room:
            self._close_rows()
        return True

    def _rows_of(self, layout: PackedLayout) -> _Rows:
        if self._rows is None or self._rows.layout is not layout:
            self._close_rows()
            self._rows = _Rows.of(layout)
        return self._rows

    def _close_rows(self) -> None:
        if self._rows is not None and self._rows.data:
            part = self._rows.take(self._columns)
            self._parts.append(part)
            self._unchecked.append(part)

    def add(self, logprobs: Logprobs) -> None:
        """Add decoded logprobs, which may be of several tokens."""
        if self._columns is not None and logprobs.token_ids.shape[1] > self._columns:
            narrow = logprobs.cut(self._columns)
            # A view would keep the rest alive, which may be as wide as the vocabulary.
            logprobs = Logprobs(narrow.token_ids.copy(), narrow.logprobs.copy(), narrow.ranks)
        self._close_rows()
        self._parts.append(logprobs)

    def take(self) -> Logprobs | None:
        """Give, and forget, what was collected; `CodecError` if there is a negative id or rank."""
        self._close_rows()
        parts, self._parts = self._parts, []
        unchecked, self._unchecked = self._unchecked, []
        for part in unchecked:
            _check(part)
        return Logprobs.concatenate(parts) if parts else None


def _bytes_of(data: Any, frames: Frames) -> Buffer:
    """The bytes of an array; none if they are not where they should be."""
    if type(data) is memoryview:
        return data
    return frames[data] if type(data) is int and 0 < data < len(frames) else b""


@define
class SamplingMask:
    """The token ids that sampling could choose from, one row per new token.

    Without ``offsets`` there is one row; with them row ``i`` is
    ``token_ids[offsets[i]:offsets[i + 1]]``.
    """

    token_ids: Array = _ARRAY
    offsets: Array | None = attrs.field(default=None, eq=attrs.cmp_using(eq=np.array_equal))

    @property
    def rows(self) -> list[Array]:
        """The ids of each row, as views."""
        if self.offsets is None:
            return [self.token_ids]
        bounds = self.offsets.tolist()
        return [self.token_ids[a:b] for a, b in itertools.pairwise(bounds)]


def _check_mask(mask: SamplingMask) -> SamplingMask:
    ids, offsets = mask.token_ids, mask.offsets
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CodecError("must be 1-dimensional integers").add_path(".token_ids")
    if offsets is not None:
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
            raise CodecError("must be 1-dimensional integers, at least one").add_path(".offsets")
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != len(ids) or bounds != sorted(bounds):
            raise CodecError("must rise from 0 to the number of token ids").add_path(".offsets")
    return mask


_MASK_PARTS = {"token_ids": NUMPY_ARRAY, "offsets": optional(NUMPY_ARRAY)}


def _decode_mask(raw: Any, frames: Frames) -> SamplingMask:
    if type(raw) is not list or not raw:
        raise wrong_type("an array [token_ids, offsets, nil]", raw)
    *arrays, counts = [*raw, None, None][:3]
    if counts is not None:
        raise CodecError("must not carry cumulative token counts")
    pairs = zip(_MASK_PARTS.values(), arrays, strict=True)
    parts = map_with_path(
        lambda pair, _: pair[0].decode(pair[1], frames), pairs, None, list(_MASK_PARTS)
    )
    return _check_mask(SamplingMask(*parts))


def _encode_mask(value: SamplingMask, aux: AuxFrames) -> Any:
    if not isinstance(value, SamplingMask):
        raise wrong_type("a SamplingMask", value)
    pairs = zip(_MASK_PARTS.values(), (value.token_ids, value.offsets), strict=True)
    raw = map_with_path(
        lambda pair, _: pair[0].encode(pair[1], aux), pairs, None, list(_MASK_PARTS)
    )
    _check_mask(value)
    return [*raw, None]


set_codec(SamplingMask, Codec("a sampling mask", _decode_mask, _encode_mask))
