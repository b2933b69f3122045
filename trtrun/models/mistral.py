"""MistralForCausalLM: no biases, and one sliding window for every layer unless config.json sets it to null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.config import ModelFamily, read_window
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window = read_window(values)
    return [
        DecoderPlan(
            NormPlan(f"model.layers.{index}.input_layernorm", shape.hidden_size, shape.rms_norm_eps),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window),
            NormPlan(f"model.layers.{index}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index in range(shape.num_layers)
    ]


MISTRAL = MODEL_FAMILIES.register("MistralForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        plan_layers=_plan_layers,
        model_type="mistral",
    )
)
