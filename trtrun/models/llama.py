"""LlamaForCausalLM (Llama 1 to 3): the plain decoder, with optional biases. It knows no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias, mlp_bias = read_flag(values, "attention_bias"), read_flag(values, "mlp_bias")
    return [
        DecoderPlan(
            NormPlan(f"model.layers.{index}.input_layernorm", shape.hidden_size, shape.rms_norm_eps),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, qkv_bias=has_bias, output_bias=has_bias),
            NormPlan(f"model.layers.{index}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=mlp_bias),
        )
        for index in range(shape.num_layers)
    ]


LLAMA = MODEL_FAMILIES.register("LlamaForCausalLM")(
    ModelFamily(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2},
        plan_layers=_plan_layers,
        model_type="llama",
    )
)
