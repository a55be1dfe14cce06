"""One ØMQ context a test, and pairs of sockets in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.transport.peers import ANY_PORT, Pair

from trio_vllm.transport.zmq_context import SocketType, ZmqContext, open_context


@pytest.fixture
async def context() -> AsyncIterator[ZmqContext]:
    async with open_context() as context:
        yield context


@pytest.fixture
def pull_and_push(context: ZmqContext) -> Pair:
    """A bound PULL and the PUSH that is connected to it."""
    pull, push = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    push.connect(pull.bind(ANY_PORT))
    return pull, push


@pytest.fixture
async def router_and_dealer(context: ZmqContext) -> Pair:
    """A bound ROUTER and the DEALER "peer" that it already knows."""
    router = context.socket(SocketType.ROUTER)
    dealer = context.socket(SocketType.DEALER, identity=b"peer")
    dealer.connect(router.bind(ANY_PORT))
    await dealer.send([b"hello"])
    assert await router.receive() == [b"peer", b"hello"]
    return router, dealer
