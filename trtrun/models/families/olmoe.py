"""OLMoE: experts in every layer, and queries and keys that are normalised over all heads as one, as OLMo 2's are, but
rounded before they are weighed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.models.families.mixtures import read_experts
from trtrun.models.families.olmo import WholeNormAttentionPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    if values.get("clip_qkv") is not None:
        raise CheckpointError(f"clip_qkv {shorten(values['clip_qkv'])} is not supported: nothing is clipped")
    has_bias, (count, chosen) = read_flag(values, "attention_bias"), read_experts(values)
    renormalises = read_flag(values, "norm_topk_prob")
    return [
        DecoderPlan.of_layer(
            index,
            WholeNormAttentionPlan(
                f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, rounds_before_weighing=True
            ),
            ExpertsPlan(
                f"model.layers.{index}.mlp",
                shape,
                count,
                chosen,
                shape.intermediate_size,
                renormalises=renormalises,
            ),
        )
        for index in range(shape.num_layers)
    ]


OLMOE = MODEL_FAMILIES.register("OlmoeForCausalLM")(
    ModelFamily(
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        plan_layers=_plan_layers,
        model_type="olmoe",
    )
)
