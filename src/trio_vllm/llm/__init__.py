"""The facade: prompts in, completions out. Public, and so is `trio_vllm.llm.metrics`."""

from trio_vllm.llm.batch import BatchResults as BatchResults
from trio_vllm.llm.llm import GenerateStream as GenerateStream
from trio_vllm.llm.llm import Llm as Llm
from trio_vllm.llm.llm import open_llm as open_llm
from trio_vllm.llm.observers import AdapterState as AdapterState
from trio_vllm.llm.observers import FinishedCompletion as FinishedCompletion
from trio_vllm.llm.observers import Observer as Observer
from trio_vllm.llm.output import CompletionDelta as CompletionDelta
from trio_vllm.llm.output import CompletionOutput as CompletionOutput
from trio_vllm.llm.output import EncodeOutput as EncodeOutput
from trio_vllm.llm.output import GenerateOutput as GenerateOutput
from trio_vllm.llm.output import RequestTimings as RequestTimings
from trio_vllm.llm.output import Usage as Usage
from trio_vllm.llm.output import WeightVersionSpan as WeightVersionSpan
from trio_vllm.llm.request import EncodeRequest as EncodeRequest
from trio_vllm.llm.request import GenerateRequest as GenerateRequest
from trio_vllm.llm.statistics import EngineStatistics as EngineStatistics
from trio_vllm.llm.statistics import LlmStatistics as LlmStatistics
from trio_vllm.llm.statistics import TokenTotals as TokenTotals
