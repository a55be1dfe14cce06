"""LoRA adapters by name, id and path; mirrors upstream ``vllm/lora/request.py``."""

from __future__ import annotations

import attrs

from trio_vllm.protocol._containers import optional
from trio_vllm.protocol._forms import BOOL, STR, TEXT, Form, integer
from trio_vllm.protocol._structs import array_struct


@attrs.define(kw_only=True)
class LoRARequest:
    """An adapter that the engine loads from ``lora_path`` on its own file system."""

    lora_name: str
    lora_int_id: int
    """From 1, unique for each adapter of an engine."""
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


LORA_REQUEST: Form[LoRARequest] = array_struct(
    LoRARequest,
    3,
    {
        "lora_name": STR,
        "lora_int_id": integer(1, 2**63 - 1, "a positive integer"),
        "lora_path": TEXT,
        "base_model_name": optional(STR),
        "load_inplace": BOOL,
        "is_3d_lora_weight": BOOL,
    },
)
