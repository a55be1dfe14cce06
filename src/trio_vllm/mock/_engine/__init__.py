"""The mock engine core, sans IO."""

from ._config import MockEngineConfig
from ._core import MockEngine
from ._journal import (
    Journal,
    JournalEntry,
    MessageIgnored,
    RequestFinished,
    RequestRefused,
    RequestStarted,
    Summary,
)
from ._messages import COORDINATOR, Outgoing

__all__ = [
    "COORDINATOR",
    "Journal",
    "JournalEntry",
    "MessageIgnored",
    "MockEngine",
    "MockEngineConfig",
    "Outgoing",
    "RequestFinished",
    "RequestRefused",
    "RequestStarted",
    "Summary",
]
