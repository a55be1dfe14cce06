"""Parameters of vLLM's own class that cannot work here say what to do instead."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest

from trio_vllm.protocol import SamplingParams
from trio_vllm.protocol.sampling import VLLM_ONLY


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"ignore_eos": True}, "leave eos_token_id unset"),
        ({"stop": ["\n"]}, "use stop_token_ids"),
        ({"detokenize": False}, "token ids"),
        ({"include_stop_str_in_output": True}, "cut texts"),
        ({"bad_words": ["no"]}, "use bad_words_token_ids"),
        ({"output_kind": 2, "max_tokens": 5}, "Llm.stream"),
        ({"guided_decoding": None}, "StructuredOutputsParams"),
    ],
)
def test_name_of_vllms_class_is_explained(fields: dict[str, Any], advice: str) -> None:
    (name, *_) = fields

    with pytest.raises(TypeError, match=rf"SamplingParams has no {name} here: .*{advice}"):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", VLLM_ONLY)
def test_each_is_none_of_ours(name: str) -> None:
    assert name not in {attribute.name for attribute in attrs.fields(SamplingParams)}

    with pytest.raises(TypeError, match=f"has no {name} here"):
        SamplingParams(**{name: None})  # type: ignore[arg-type]


def test_name_of_nobody_is_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[call-arg]


def test_signature_is_that_of_the_fields() -> None:
    names = [attribute.name for attribute in attrs.fields(SamplingParams)]

    assert list(inspect.signature(SamplingParams).parameters) == names
