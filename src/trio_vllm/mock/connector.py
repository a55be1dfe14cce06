"""`Connector`: how KV blocks of a prompt get from the engine that computed them to the one that decodes.

A router sends a request to a prefill engine with ``do_remote_decode`` in its ``kv_transfer_params``. The
last output of that says where the blocks are, and the engine keeps them. The router hands this on to a
decode engine, which fetches the blocks in place of computing the prompt, and tells the prefill
engine so. If nobody fetches them, they are free after a time.

Here nothing is copied: what is fetched takes time and blocks, and that is all.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` of 0.33.0, ``base_scheduler.py`` and
``pull_scheduler.py``, without transfers from the decode engine back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trio_vllm.mock.config import NEWEST_RELEASE, MockEngineConfig
from trio_vllm.protocol import EngineCoreRequest
from trio_vllm.values import define, frozen

REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""What a decode engine has to be told besides ``remote_block_ids``."""

WAITING_TO_START = "waiting_to_start"
IN_PROGRESS = "in_progress"
COMPLETED_WAITING = "completed_waiting"
STAGES = (WAITING_TO_START, IN_PROGRESS, COMPLETED_WAITING)
"""Of a request that fetches blocks, under the names of ``num_kv_fetch_reqs_by_stage``."""


BYTES_PER_TOKEN, DESCRIPTORS_PER_BLOCK = 131_072, 64
"""Of the KV values of a model with 32 layers of 8 heads of 128 numbers in 16 bits, keys and values apart."""
LEAST_DURATION = 1e-6
"""NIXL counts microseconds."""


@define
class ConnectorStats:
    """What an engine has transferred: ``kv_connector_stats`` as NIXL's connector fills it.

    Each list has an item per event; nothing fails in a mock.
    """

    transfer_duration: list[float] = attrs.field(factory=list)
    post_duration: list[float] = attrs.field(factory=list)
    bytes_transferred: list[int] = attrs.field(factory=list)
    num_descriptors: list[int] = attrs.field(factory=list)
    num_failed_transfers: list[int] = attrs.field(factory=list)
    num_failed_notifications: list[int] = attrs.field(factory=list)
    num_failed_handshakes: list[int] = attrs.field(factory=list)
    num_kv_expired_reqs: list[int] = attrs.field(factory=list)
    num_notifications_after_expiry: list[int] = attrs.field(factory=list)

    def add_transfer(self, duration: float, num_blocks: int, block_size: int) -> None:
        """Count the blocks of one request; to ask for them takes no time."""
        self.transfer_duration.append(max(duration, LEAST_DURATION))
        self.post_duration.append(0.0)
        self.bytes_transferred.append(num_blocks * block_size * BYTES_PER_TOKEN)
        self.num_descriptors.append(num_blocks * DESCRIPTORS_PER_BLOCK)


@frozen
class Fetched:
    """Blocks of a request have been fetched, or never will be: who keeps them may free them."""

    host: str
    port: int
    request_id: str


@define(eq=False)
class KvTransfer:
    """The part that one request has in a transfer."""

    params: Mapping[str, Any]
    sends: bool
    """Whether another engine will fetch its blocks."""
    fetches: bool
    """Whether it is still to fetch blocks of another engine; a preempted request does so no more."""
    answer: dict[str, Any] | None = attrs.field(default=None, init=False)
    """The ``kv_transfer_params`` of its last output."""


@define(eq=False)
class Connector:
    """The ``kv_transfer_params`` of one engine."""

    engine_id: str
    host: str
    port: int
    block_size: int
    lease: float
    """Seconds that blocks are kept for another engine."""
    sends: bool
    fetches: bool
    vllm_release: tuple[int, int] = NEWEST_RELEASE
    reports: bool = False
    """Whether frontends are told the statistics."""
    _stats: ConnectorStats = attrs.field(factory=ConnectorStats, init=False)
    _fetched: list[Fetched] = attrs.field(factory=list, init=False)

    @classmethod
    def of(cls, config: MockEngineConfig, engine_index: int) -> Connector | None:
        """The connector of an engine, if it has one."""
        if config.pd_role is None:
            return None
        return cls(
            engine_id=f"{config.instance_id}_dp{engine_index}",
            host=config.kv_side_channel_host,
            port=config.kv_side_channel_port + engine_index,
            block_size=config.block_size,
            lease=config.kv_lease_duration * config.time_scale,
            sends=config.pd_role != "decode",
            fetches=config.pd_role != "prefill",
            vllm_release=config.vllm_release,
            reports=config.kv_connector_stats,
        )

    def transfer_of(self, wire: EngineCoreRequest) -> KvTransfer | None:
        """The part of a request, if it has any."""
        params = transfer_params(wire)
        sends = self.sends and bool(params.get("do_remote_decode"))
        fetches = self.fetches and bool(params.get("do_remote_prefill"))
        return KvTransfer(params, sends, fetches) if sends or fetches else None

    def fault_of(self, transfer: KvTransfer) -> str | None:
        """What is missing in the parameters of a request that is to fetch blocks.

        Upstream an assertion fails if there are no blocks, and the request waits for ever if it is not
        said where they are.
        """
        needed = ("remote_block_ids", *REMOTE_FIELDS) if transfer.fetches else ()
        missing = [name for name in needed if not transfer.params.get(name)]
        return f"kv_transfer_params lack {', '.join(missing)}" if missing else None

    def describe(
        self,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        cached_tokens: int | None = None,
    ) -> dict[str, Any]:
        """What a decode engine is to be told of blocks that are kept for it.

        Args:
          request_id: Whose they are.
          blocks: Their numbers.
          num_tokens: How many tokens are in them.
          cached_tokens: How many the prefill found cached, if it is told in the same output.
        """
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if self.vllm_release >= (0, 33):
            params["remote_registration_generation"] = 1
        if cached_tokens is not None:
            params["remote_prefill_cached_tokens"] = cached_tokens
        return params

    def note_transfer(self, num_tokens: int, duration: float) -> None:
        """Blocks of so many tokens have come."""
        num_blocks = -(-num_tokens // self.block_size)
        self._stats.add_transfer(duration, num_blocks, self.block_size)

    def note_expired(self) -> None:
        """Nobody has fetched the blocks of a request in time."""
        self._stats.num_kv_expired_reqs.append(1)

    def note_late_notification(self) -> None:
        """Blocks have been fetched that are not kept any more."""
        self._stats.num_notifications_after_expiry.append(1)

    def take_stats(self) -> dict[str, list[float]] | None:
        """What happened since this was last called, if it did and is to be told."""
        stats, self._stats = self._stats, ConnectorStats()
        told = attrs.asdict(stats)
        return told if self.reports and any(told.values()) else None

    def note_fetched(self, transfer: KvTransfer) -> None:
        """The blocks of a request are here, or are not needed."""
        transfer.fetches = False
        params = transfer.params
        where = str(params["remote_host"]), int(params["remote_port"])
        self._fetched.append(Fetched(*where, str(params["remote_request_id"])))

    def pop_fetched(self) -> list[Fetched]:
        """What other engines are to be told."""
        fetched, self._fetched = self._fetched, []
        return fetched


def transfer_params(wire: EngineCoreRequest) -> Mapping[str, Any]:
    """The ``kv_transfer_params`` of a request; none if they are no map."""
    params = wire.sampling_params
    return {} if params is None else params.kv_transfer_params or {}
