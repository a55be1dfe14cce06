"""Log lines for operators."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

from trio_vllm.protocol import FinishReason

from ._engine import (
    JournalEntry,
    MessageIgnored,
    RequestFinished,
    RequestRefused,
    RequestStarted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger("trio_vllm.mock")


def log_entries(engine_index: int, entries: Iterable[JournalEntry]) -> None:
    """A line for each: requests that come and go at info level, faults as warnings."""
    for entry in entries:
        match entry:
            case RequestStarted():
                log.info(
                    "engine %d: request started request_id=%s prompt_len=%d max_tokens=%d"
                    " chunk_size=%d",
                    engine_index,
                    shown(entry.request_id),
                    entry.prompt_len,
                    entry.max_tokens,
                    entry.chunk_size,
                )
            case RequestFinished():
                aborted = entry.finish_reason is FinishReason.ABORT
                log.info(
                    "engine %d: request %s request_id=%s prompt_len=%d output_tokens=%d"
                    " finish_reason=%s",
                    engine_index,
                    "aborted" if aborted else "finished",
                    shown(entry.request_id),
                    entry.prompt_len,
                    entry.output_tokens,
                    entry.finish_reason,
                )
            case RequestRefused():
                log.warning(
                    "engine %d: request refused request_id=%s answered=%s: %s",
                    engine_index,
                    shown(entry.request_id),
                    "yes" if entry.answered else "no",
                    entry.reason,
                )
            case MessageIgnored():
                log.warning("engine %d: message ignored: %s", engine_index, entry.reason)
            case _:
                assert_never(entry)


def shown(request_id: str) -> str:
    """A request id that keeps to its place in a line, whatever a frontend made of it."""
    text = request_id if len(request_id) <= 200 else f"{request_id[:200]}..."
    return text if text.isprintable() and " " not in text and text else repr(text)
