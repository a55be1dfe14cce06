"""Trio channels over ZeroMQ. Nothing above this package imports zmq."""

from trio_vllm.transport._channels import FrameReceiver, FrameSender
from trio_vllm.transport._engine import (
    CoordinatorLinks,
    FrontendLinks,
    FrontendLoss,
    join_frontend,
)
from trio_vllm.transport._frontend import (
    EngineLinks,
    FollowerLinks,
    LeaderLinks,
    open_frontend,
)
from trio_vllm.transport._modes import Bootstrapped, HandshakeOwner

__all__ = [
    "Bootstrapped",
    "CoordinatorLinks",
    "EngineLinks",
    "FollowerLinks",
    "FrameReceiver",
    "FrameSender",
    "FrontendLinks",
    "FrontendLoss",
    "HandshakeOwner",
    "LeaderLinks",
    "join_frontend",
    "open_frontend",
]
