"""MistralForCausalLM: no biases, and one sliding window for every layer unless config.json sets it to null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtrun.models.config import ModelFamily
from trtrun.registry import MODEL_FAMILIES


def _windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    return (values["sliding_window"],) * int(values["num_hidden_layers"])


MISTRAL = MODEL_FAMILIES.register("MistralForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        qkv_bias=lambda values: False,
        o_bias=lambda values: False,
        sliding_windows=_windows,
    )
)
