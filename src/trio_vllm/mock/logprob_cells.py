"""`LogprobCells` writes tokens with their log probabilities, for many requests and steps at once.

All rows of a step have the same number of columns, and their arrays travel inside the payload. So what
follows the request id in a row has one length, and of it only the token, the ids, the first value and
the rank change. `LogprobModel.sample` says the same of one request at a time, and is their measure.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from trio_vllm.mock.content import U64, LogprobModel, TokenSource
from trio_vllm.mock.encoding import TokenCells, pack_array_header, pack_str
from trio_vllm.protocol import EngineCoreOutput, Logprobs, encode_output_rows, index_of

AHEAD_BYTES = 2**18
"""Of cells that are drawn ahead for all rows of a block."""
MAX_COLUMNS = 63
"""Arrays of more would travel in frames of their own."""

_FIELDS = len(attrs.fields(EngineCoreOutput))
_FIELDS_BEHIND = _FIELDS - 1 - index_of(EngineCoreOutput, "new_logprobs")  # of a byte each
_BEFORE = pack_array_header(_FIELDS) + pack_str("") + pack_array_header(1) + b"\0"
_ID, _VALUE, _RANK = 0x5A5B5C5D, 0.123456789, 0x6A6B6C6D6E6F7071
"""Stand nowhere else in a row."""


class LogprobCells:
    """How one token and its log probabilities are written, in so many columns.

    ``num_candidates`` is from how many of the most probable tokens one is sampled, if not from all.
    """

    def __init__(
        self, source: TokenSource, model: LogprobModel, columns: int, num_candidates: int | None
    ) -> None:
        self._source = source
        self._model = model
        self._columns = columns
        self._num_candidates = num_candidates
        self._tokens = tokens = TokenCells.of(source.vocab_size)
        ids = np.full((1, columns), _ID, np.int32)
        values = np.full((1, columns), _VALUE, np.float32)
        values[0, 1:] = model.most_probable_values(columns - 1)
        ids[0, 1 + source.vocab_size :] = 0
        self._logprobs = packed = _pack(Logprobs(ids, values, np.array([_RANK])))
        start = tokens.width
        self.mark = b""
        self.width = start + len(packed)
        self.dtype = np.dtype(f"V{self.width}")
        self.ahead = AHEAD_BYTES // self.width
        self._template = np.frombuffer(self.blank(1)[1:], self.dtype)
        self._parts = np.dtype(
            {
                "names": ["token", "ids", "value", "rank"],
                "formats": [tokens.dtype, ("<i4", (columns,)), "<f4", "<i8"],
                "offsets": [
                    len(tokens.mark),
                    start + packed.index(ids.tobytes()),
                    start + packed.index(values[0, :1].tobytes()),
                    start + packed.index(np.int64(_RANK).tobytes()),
                ],
                "itemsize": self.width,
            }
        )

    def blank(self, count: int) -> bytes:
        """One token yet to be filled in, and its log probabilities."""
        return self._tokens.blank(count) + self._logprobs

    def fill(self, out: npt.NDArray[Any], keys: U64, firsts: U64) -> None:
        """Fill the rows of ``out`` from the positions ``firsts`` of the requests with ``keys`` on."""
        tokens: npt.NDArray[np.int64] = np.empty(out.shape, np.int64)
        self._source.fill(tokens, keys, firsts)
        model = self._model
        ranks = model.draw_ranks_of_many(keys, firsts, out.shape[1], self._num_candidates)
        out[...] = self._template
        parts = out.view(self._parts)
        parts["token"] = tokens
        ids = parts["ids"]
        ids[..., 0] = tokens
        model.fill_most_probable_ids(ids[..., 1:], tokens, ranks)
        parts["value"] = model.common_values[ranks]
        ranks += 1
        parts["rank"] = ranks

    def pack(self, key: int, position: int, token: int) -> bytes:
        """The last token of a request, which may be one that the vocabulary does not have."""
        made = self._model.sample(
            key, position, [token], self._columns, num_candidates=self._num_candidates
        )
        return self._tokens.pack([token]) + _pack(made)


def _pack(logprobs: Logprobs) -> bytes:
    """Log probabilities as they stand in a row."""
    row = encode_output_rows([EngineCoreOutput("", [0], new_logprobs=logprobs)], [])
    return row[len(_BEFORE) : len(row) - _FIELDS_BEHIND]
