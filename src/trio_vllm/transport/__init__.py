"""Trio channels over ZeroMQ: the only package that imports zmq. Internal.

Each name is imported when it is first used: an engine needs nothing of a frontend's side.
"""

from __future__ import annotations

from trio_vllm._lazy import install_lazy_importer

TYPE_CHECKING = False  # type checkers know better; importing it from typing would take 10 ms

if TYPE_CHECKING or not install_lazy_importer(__name__):
    from trio_vllm.transport.channels import CoordinatorChannels as CoordinatorChannels
    from trio_vllm.transport.channels import Disconnect as Disconnect
    from trio_vllm.transport.channels import EngineChannels as EngineChannels
    from trio_vllm.transport.channels import EngineSource as EngineSource
    from trio_vllm.transport.channels import FollowerChannels as FollowerChannels
    from trio_vllm.transport.channels import FrameReceiver as FrameReceiver
    from trio_vllm.transport.channels import FrameSender as FrameSender
    from trio_vllm.transport.channels import FrontendChannels as FrontendChannels
    from trio_vllm.transport.channels import FrontendDisconnect as FrontendDisconnect
    from trio_vllm.transport.channels import LeaderChannels as LeaderChannels
    from trio_vllm.transport.channels import Link as Link
    from trio_vllm.transport.channels import Received as Received
    from trio_vllm.transport.descriptors import require_descriptors as require_descriptors
    from trio_vllm.transport.engine import DESCRIPTORS_PER_ENGINE as DESCRIPTORS_PER_ENGINE
    from trio_vllm.transport.engine import EngineLingers as EngineLingers
    from trio_vllm.transport.engine import descriptors_per_engine as descriptors_per_engine
    from trio_vllm.transport.engine import join_frontend as join_frontend
    from trio_vllm.transport.frontend import Bootstrapped as Bootstrapped
    from trio_vllm.transport.frontend import HandshakeOwner as HandshakeOwner
    from trio_vllm.transport.frontend_startup import SERVED_BEFORE as SERVED_BEFORE
    from trio_vllm.transport.kv_event_sockets import KvEventSockets as KvEventSockets
    from trio_vllm.transport.kv_event_sockets import open_kv_event_sockets as open_kv_event_sockets
    from trio_vllm.transport.memory import InMemory as InMemory
    from trio_vllm.transport.side_channel_sockets import SideChannelSockets as SideChannelSockets
    from trio_vllm.transport.side_channel_sockets import (
        open_side_channel_sockets as open_side_channel_sockets,
    )
