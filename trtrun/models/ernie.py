"""Ernie 4.5's dense models: Llama's layers, whose heads are rotated by neighbouring numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.layer_plan import AttentionPlan, DecoderPlan, GatedMLPPlan, LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "use_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, interleaved=True),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=has_bias),
        )
        for index in range(shape.num_layers)
    ]


ERNIE = MODEL_FAMILIES.register("Ernie4_5ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        plan_layers=_plan_layers,
        model_type="ernie4_5",
    )
)
