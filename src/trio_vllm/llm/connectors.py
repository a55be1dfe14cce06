"""`read_connector_stats` reads the statistics of KV connectors (NIXL, Mooncake) out of an untyped map.

Mirrors the ``*KVConnectorStats`` of ``vllm/distributed/kv_transfer/kv_connector/v1``, ``nixl/stats.py``,
``mooncake/stats.py`` and ``mooncake/store/metrics.py``. A `MultiConnector` sends a map of such maps by
the class name of each connector. The contents are an engine's and may be anything: what is no
sensible number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trio_vllm.values import frozen

NIXL = "nixl"
MOONCAKE = "mooncake"

SAMPLES: dict[str, dict[str, str]] = {
    NIXL: {
        "transfer_duration": "nixl_xfer_time_seconds",
        "post_duration": "nixl_post_time_seconds",
        "bytes_transferred": "nixl_bytes_transferred",
        "num_descriptors": "nixl_num_descriptors",
    },
    MOONCAKE: {
        "transfer_duration": "mooncake_xfer_time_seconds",
        "bytes_transferred": "mooncake_bytes_transferred",
        "num_descriptors": "mooncake_num_descriptors",
    },
}
"""By connector and field, the histogram that its numbers are samples of."""

COUNTS: dict[str, dict[str, tuple[str, ...]]] = {
    NIXL: {
        # Upstream counts failed handshakes and notifications as failed transfers, too.
        "nixl_num_failed_transfers": (
            "num_failed_transfers",
            "num_failed_handshakes",
            "num_failed_notifications",
        ),
        "nixl_num_failed_notifications": ("num_failed_notifications",),
        "nixl_num_kv_expired_reqs": ("num_kv_expired_reqs",),
        "nixl_num_notifications_after_expiry": ("num_notifications_after_expiry",),
    },
    MOONCAKE: {
        "mooncake_num_failed_transfers": ("num_failed_transfers",),
        "mooncake_num_failed_recvs": ("num_failed_recvs",),
        "mooncake_num_kv_expired_reqs": ("num_kv_expired_reqs",),
    },
}
"""By connector and counter, the fields whose numbers it sums."""


@frozen
class Transfers:
    """Transfers between engines since the last statistics, by metric."""

    connector: str
    samples: dict[str, list[float]]
    counts: dict[str, float]


@frozen
class StoreOperation:
    """One operation on a Mooncake store."""

    operation: str
    status: str
    seconds: float
    keys: float
    bytes: float
    failed_keys: float


def read_connector_stats(stats: Mapping[str, Any]) -> Iterator[Transfers | StoreOperation]:
    """Read the statistics of one connector, or of each one that a `MultiConnector` has."""
    if "post_duration" in stats:
        yield _read_transfers(NIXL, stats)
    elif "num_failed_recvs" in stats:
        yield _read_transfers(MOONCAKE, stats)
    else:
        for name, part in stats.items():
            if isinstance(part, Mapping):
                yield from read_connector_stats(part)
            elif isinstance(part, list):
                yield from _read_operations(name, part)


def _read_transfers(connector: str, stats: Mapping[str, Any]) -> Transfers:
    return Transfers(
        connector,
        {metric: _numbers(stats.get(field)) for field, metric in SAMPLES[connector].items()},
        {
            metric: sum(sum(_numbers(stats.get(field))) for field in fields)
            for metric, fields in COUNTS[connector].items()
        },
    )


def _read_operations(operation: str, records: list[Any]) -> Iterator[StoreOperation]:
    for record in records:
        if isinstance(record, Mapping) and "duration_seconds" in record:
            keys = ("duration_seconds", "num_keys", "num_bytes", "num_failed_keys")
            numbers = [sum(_numbers([record.get(key)])) for key in keys]
            yield StoreOperation(operation, str(record.get("status", "ok")), *numbers)


def _numbers(values: object) -> list[float]:
    """The finite numbers from 0 in a list."""
    if not isinstance(values, list):
        return []
    return [v for v in values if type(v) in (int, float) and 0 <= v < math.inf]
