"""`open_client`: from addresses to a client that serves requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trio_vllm._errors import ConfigurationError, EngineCoreError
from trio_vllm.client._client import EngineCoreClient
from trio_vllm.transport import Bootstrapped, HandshakeOwner, open_frontend

_log = logging.getLogger("trio_vllm.client")

LEARNING_TIMEOUT = 5.0
"""Seconds that engines which have just started may take to say what they support."""


@asynccontextmanager
async def open_client(
    mode: HandshakeOwner | Bootstrapped,
    *,
    client_index: int = 0,
    vocab_size: int | None = None,
    structured_outputs_backend: str = "xgrammar",
) -> AsyncIterator[EngineCoreClient]:
    """Connect to engine cores; the block's value drives them.

    Args:
      mode: Whether we do the startup handshake or a supervisor has done it.
      client_index: Which of the frontend's clients we are; engines answer on that output address.
        They are told but one address by us, so other clients need a supervisor (`Bootstrapped`).
      vocab_size: Number of the model's token ids, if known. An engine dies of an id beyond it and
        does not tell its size, so with this such requests can be refused.
      structured_outputs_backend: For requests that name none.

    Raises:
      ConfigurationError: An address is unusable, the engines need a coordinator, or would not
        answer to ``client_index``.
      StartupError: Engines are missing after the mode's timeout; tells which, and in which phase.
      InternalError: A bug of this package, never a peer's doing.

    The engines are asked what the model supports, since one that pools dies of a request to generate
    and the other way round. If they do not answer in `LEARNING_TIMEOUT` seconds, that is logged, and
    they are asked again before the first pooling request.

    Leaving the block aborts what is in flight; after it nothing of the client runs. What the block
    raises comes out as it is.

    Cancellation:
      Leaves nothing behind, at any point.
    """
    if client_index and isinstance(mode, HandshakeOwner):
        raise ConfigurationError(
            f"client_index must be 0, not {client_index}: HandshakeOwner tells the engines one output"
            " address, and they would answer on one that does not exist"
        )
    async with open_frontend(mode) as links:
        client = EngineCoreClient(
            links,
            client_index=client_index,
            vocab_size=vocab_size,
            structured_outputs_backend=structured_outputs_backend,
        )
        async with client.running():
            try:
                await client.learn_supported_tasks(timeout=LEARNING_TIMEOUT)
            except EngineCoreError as error:
                _log.warning("what the engines support is not known: %s", error)
            yield client
