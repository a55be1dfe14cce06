"""The facade: prompts in, completions out."""

from trio_vllm.llm._generation import GenerateStream
from trio_vllm.llm._llm import Llm, open_llm
from trio_vllm.llm._output import (
    CompletionOutput,
    EncodeOutput,
    GenerateOutput,
    RequestTimings,
    Usage,
    WeightVersionSpan,
)
from trio_vllm.llm._request import EncodeRequest, GenerateRequest

__all__ = [
    "CompletionOutput",
    "EncodeOutput",
    "EncodeRequest",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateStream",
    "Llm",
    "RequestTimings",
    "Usage",
    "WeightVersionSpan",
    "open_llm",
]
