"""GLM-4 and GLM-4-0414: half of each head is rotated, neighbouring numbers together, and gate and up lie in one tensor;
the newer ones have norms of what layers add, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import MOST_POSITIONS, ModelFamily, read_flag
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope
from trtrun.registry import MODEL_FAMILIES


def _plan(shape: ModelShape, values: Mapping[str, Any], *, norms_outputs: bool) -> Sequence[LayerPlan]:
    has_bias, max_positions = (
        read_flag(values, "attention_bias"),
        min(values["max_position_embeddings"], MOST_POSITIONS),
    )
    rotated = parse_rope(values, max_positions, shape.head_dim, in_part=True).rotated

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps)

    return [
        DecoderPlan(
            norm(index, "input_layernorm"),
            AttentionPlan(
                f"model.layers.{index}.self_attn", shape, qkv_bias=has_bias, rotated=rotated, interleaved=True
            ),
            norm(index, "post_attention_layernorm"),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, fused_gate_up=True),
            norm(index, "post_self_attn_layernorm") if norms_outputs else None,
            norm(index, "post_mlp_layernorm") if norms_outputs else None,
        )
        for index in range(shape.num_layers)
    ]


def _plan_glm(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return _plan(shape, values, norms_outputs=False)


def _plan_glm4(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return _plan(shape, values, norms_outputs=True)


_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
GLM = MODEL_FAMILIES.register("GlmForCausalLM")(
    ModelFamily(defaults=_DEFAULTS, plan_layers=_plan_glm, model_type="glm", rotates_in_part=True)
)
GLM4 = MODEL_FAMILIES.register("Glm4ForCausalLM")(
    ModelFamily(defaults=_DEFAULTS, plan_layers=_plan_glm4, model_type="glm4", rotates_in_part=True)
)
