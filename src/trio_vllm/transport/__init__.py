"""Trio channels over ZeroMQ: the only package that imports zmq. Internal."""

from trio_vllm.transport.channels import FrameReceiver as FrameReceiver
from trio_vllm.transport.channels import FrameSender as FrameSender
from trio_vllm.transport.engine import CoordinatorChannels as CoordinatorChannels
from trio_vllm.transport.engine import FrontendChannels as FrontendChannels
from trio_vllm.transport.engine import FrontendLoss as FrontendLoss
from trio_vllm.transport.engine import join_frontend as join_frontend
from trio_vllm.transport.frontend import Bootstrapped as Bootstrapped
from trio_vllm.transport.frontend import EngineChannels as EngineChannels
from trio_vllm.transport.frontend import FollowerChannels as FollowerChannels
from trio_vllm.transport.frontend import HandshakeOwner as HandshakeOwner
from trio_vllm.transport.frontend import LeaderChannels as LeaderChannels
from trio_vllm.transport.frontend import open_frontend as open_frontend
