"""Trio channels over ZeroMQ. Nothing above this package imports zmq."""

from trio_vllm.transport.channels import FrameReceiver, FrameSender
from trio_vllm.transport.engine import (
    CoordinatorChannels,
    FrontendChannels,
    FrontendLoss,
    join_frontend,
)
from trio_vllm.transport.frontend import (
    Bootstrapped,
    EngineChannels,
    FollowerChannels,
    HandshakeOwner,
    LeaderChannels,
    open_frontend,
)

__all__ = [
    "Bootstrapped",
    "CoordinatorChannels",
    "EngineChannels",
    "FollowerChannels",
    "FrameReceiver",
    "FrameSender",
    "FrontendChannels",
    "FrontendLoss",
    "HandshakeOwner",
    "LeaderChannels",
    "join_frontend",
    "open_frontend",
]
