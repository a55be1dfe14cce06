"""A web service on asyncio over `trio_vllm.asyncio`; token ids in, token ids out.

Needs ``pip install fastapi uvicorn``.

    HANDSHAKE_ADDRESS=tcp://127.0.0.1:29550 uvicorn --app-dir examples fastapi_app:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from trio_vllm import EngineDeadError, GenerateRequest, HandshakeOwner, RequestError, SamplingParams
from trio_vllm.asyncio import open_llm


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold the connection to the engine while the service runs."""
    address = os.environ.get("HANDSHAKE_ADDRESS", "tcp://127.0.0.1:29550")
    async with open_llm(HandshakeOwner(handshake_address=address)) as llm:
        app.state.llm = llm
        yield


app = FastAPI(lifespan=lifespan)


class Prompt(BaseModel):
    """What is asked."""

    token_ids: list[int]
    max_tokens: int = 16


@app.post("/generate")
async def generate(prompt: Prompt, request: Request) -> dict[str, object]:
    """Complete a prompt. A caller who goes away aborts the request."""
    try:
        output = await request.app.state.llm.generate(
            GenerateRequest(
                prompt_token_ids=prompt.token_ids,
                sampling_params=SamplingParams(max_tokens=prompt.max_tokens),
            )
        )
    except RequestError as error:
        raise HTTPException(400, str(error)) from error
    except EngineDeadError as error:
        raise HTTPException(503, str(error)) from error
    return {"token_ids": output.token_ids, "finish_reason": output.finish_reason.name.lower()}
