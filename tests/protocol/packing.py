"""MessagePack without our checks."""

from __future__ import annotations

import ormsgpack


def pack(raw: object) -> bytes:
    """Any object as MessagePack, without our checks."""
    return ormsgpack.packb(raw, option=ormsgpack.OPT_NON_STR_KEYS)
