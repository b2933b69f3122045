"""Qwen3ForCausalLM: queries and keys normalised per head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.config import ModelFamily, read_flag, windows_by_layer_type
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "attention_bias")
    return [
        DecoderPlan(
            NormPlan(f"model.layers.{index}.input_layernorm", shape.hidden_size, shape.rms_norm_eps),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, has_bias, has_bias, head_norm=True),
            NormPlan(f"model.layers.{index}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index, window in enumerate(windows_by_layer_type(values))
    ]


QWEN3 = MODEL_FAMILIES.register("Qwen3ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        plan_layers=_plan_layers,
        model_type="qwen3",
    )
)
