"""What several of the transport's tests need: addresses, waits, and peers that can be killed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio
from trio.testing import wait_all_tasks_blocked

from trio_vllm.protocol import Frames
from trio_vllm.transport.channels import FrameReceiver
from trio_vllm.transport.zmq_socket import ZmqSocket

ANY_PORT = "tcp://127.0.0.1:0"

LIMIT = 30.0
"""Seconds after which what happens at once counts as not happening; a busy machine takes some."""

Pair: TypeAlias = tuple[ZmqSocket, ZmqSocket]

ZMQ_PEER = """
import sys, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.identity = sys.argv[2].encode()
dealer.connect(sys.argv[1])
dealer.send(b"hello")
dealer.recv()
"""
"""A DEALER that says hello and then waits, for ever or to be killed."""

BARE_PEER = r"""
import socket, sys
host, port = sys.argv[1].removeprefix("tcp://").split(":")
identity = sys.argv[2].encode()
greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
def prop(name, value):
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
ready = b"\x05READY" + prop(b"Socket-Type", b"DEALER") + prop(b"Identity", identity)
connection = socket.create_connection((host, int(port)))
connection.sendall(greeting + bytes([4, len(ready)]) + ready)
received = b""
while b"READY" not in received:
    received += connection.recv(4096)
connection.sendall(b"\0\5hello")
while connection.recv(4096):
    pass
"""
"""The same in the protocol's own bytes (ZMTP 3.0): it starts in a tenth of the time."""


@asynccontextmanager
async def peer_process(script: str, address: str, identity: str) -> AsyncIterator[trio.Process]:
    """Run a peer, and kill it on leaving if it is not killed yet."""
    options = ["-I", "-S"] if script is BARE_PEER else []
    command = [sys.executable, *options, "-c", script, address, identity]
    process = await trio.lowlevel.open_process(command)
    try:
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def receive_frames(receiver: FrameReceiver, limit: int = 5) -> list[Frames]:
    """Receive a batch of messages, whatever connections they come by."""
    return [frames for frames, _ in await receiver.receive_batch(limit)]


async def wait_until_readable(socket: ZmqSocket) -> None:
    """Give ØMQ's thread the time to bring all that was sent, without calling the socket."""
    await trio.lowlevel.wait_readable(socket._descriptor)
    await wait_all_tasks_blocked(0.2)
