"""The facade: prompts in, completions out."""

from trio_vllm.llm.llm import GenerateStream, Llm, open_llm
from trio_vllm.llm.output import (
    CompletionOutput,
    EncodeOutput,
    GenerateOutput,
    RequestTimings,
    Usage,
    WeightVersionSpan,
)
from trio_vllm.llm.request import EncodeRequest, GenerateRequest

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
