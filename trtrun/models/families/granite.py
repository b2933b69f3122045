"""Granite: Llama's layers with factors: of embeddings, of scores, of what layers add, and a divisor of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.layers.ends import ModelEnds
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.models.rope_config import read_number
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias, mlp_bias = read_flag(values, "attention_bias"), read_flag(values, "mlp_bias")
    scale, factor = read_number(values, "attention_multiplier"), read_number(values, "residual_multiplier")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, scale=scale),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=mlp_bias),
            residual_factor=factor,
        )
        for index in range(shape.num_layers)
    ]


def _read_ends(values: Mapping[str, Any]) -> ModelEnds:
    return ModelEnds(
        embedding_factor=read_number(values, "embedding_multiplier"),
        logit_divisor=read_number(values, "logits_scaling"),
    )


GRANITE = MODEL_FAMILIES.register("GraniteForCausalLM")(
    ModelFamily(
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 2,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        plan_layers=_plan_layers,
        model_type="granite",
        read_ends=_read_ends,
    )
)
