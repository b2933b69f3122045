"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.layer_plan import AttentionPlan, DecoderPlan, GatedMLPPlan, LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    """Layers like Llama's, with such biases as config.json says."""
    qkv_bias, output_bias = read_flag(values, "attention_bias"), read_flag(values, "attention_out_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, qkv_bias=qkv_bias, output_bias=output_bias),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=read_flag(values, "mlp_bias")),
        )
        for index in range(shape.num_layers)
    ]


DEFAULTS = {
    "vocab_size": 155136,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
}
MODEL_FAMILIES.register("SeedOssForCausalLM")(ModelFamily(DEFAULTS, plan_layers, model_type="seed_oss"))
