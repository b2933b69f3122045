"""Qwen2ForCausalLM (Qwen2, Qwen2.5): biases on queries, keys and values; a sliding window on the later layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.config import ModelFamily, windows_by_layer_type
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return [
        DecoderPlan(
            NormPlan(f"model.layers.{index}.input_layernorm", shape.hidden_size, shape.rms_norm_eps),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, qkv_bias=True),
            NormPlan(f"model.layers.{index}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index, window in enumerate(windows_by_layer_type(values))
    ]


QWEN2 = MODEL_FAMILIES.register("Qwen2ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        plan_layers=_plan_layers,
        model_type="qwen2",
    )
)
