"""Trio channels over ZeroMQ. Nothing above this package imports zmq."""

from trio_vllm.transport.channels import (
    CoordinatorChannels,
    Disconnect,
    EngineChannels,
    EngineSource,
    FollowerChannels,
    FrameReceiver,
    FrameSender,
    FrontendChannels,
    FrontendDisconnect,
    LeaderChannels,
    Received,
)
from trio_vllm.transport.descriptors import require_descriptors
from trio_vllm.transport.engine import DESCRIPTORS_PER_ENGINE, join_frontend
from trio_vllm.transport.frontend import Bootstrapped, HandshakeOwner
from trio_vllm.transport.memory import InMemory

__all__ = [
    "DESCRIPTORS_PER_ENGINE",
    "Bootstrapped",
    "CoordinatorChannels",
    "Disconnect",
    "EngineChannels",
    "EngineSource",
    "FollowerChannels",
    "FrameReceiver",
    "FrameSender",
    "FrontendChannels",
    "FrontendDisconnect",
    "HandshakeOwner",
    "InMemory",
    "LeaderChannels",
    "Received",
    "join_frontend",
    "require_descriptors",
]
