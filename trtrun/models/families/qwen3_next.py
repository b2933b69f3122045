"""Qwen3-Next and Qwen3.5, dense and of experts: in three of four layers a gated delta net stands in place of attention;
in the others what heads attend is gated. Norms multiply by 1 + weight, and a part of each head is rotated.

Qwen3.5's models see, too; of these the text model is run. The layer that drafts is `mtp.` in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trtrun.errors import CheckpointError
from trtrun.layers.ends import ModelEnds
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import (
    FULL,
    MOST_POSITIONS,
    ModelFamily,
    count_mtp_layers,
    read_flag,
    read_layer_types,
    read_size,
)
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.delta_net_plan import DeltaNetPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.models.families.mixtures import plan_mlp, read_experts
from trtrun.models.layer_plan import LayerPlan, MixerPlan, MLPPlan, ModelShape, NormPlan
from trtrun.models.mtp_plan import MTPPlan
from trtrun.models.rope_config import parse_rope
from trtrun.registry import MODEL_FAMILIES

LINEAR = "linear_attention"
"""Layers with a gated delta net."""

_PlanMLP = Callable[[int, ModelShape, Mapping[str, Any]], GatedMLPPlan | ExpertsPlan]


def _plan_layers(
    shape: ModelShape, values: Mapping[str, Any], plan_feed_forward: _PlanMLP, *, is_packed: bool
) -> Sequence[LayerPlan]:
    usual: list[str] = []
    if values.get("layer_types") is None:
        period = read_size(values, "full_attention_interval")
        usual = [LINEAR if (index + 1) % period else FULL for index in range(shape.num_layers)]
    attention, net = _read_attention(shape, values), _read_delta_net(shape, values, is_packed)

    def plan_mixer(index: int, kind: str) -> MixerPlan:
        if kind == LINEAR:
            return replace(net, name=f"model.layers.{index}.linear_attn")
        return replace(attention, name=f"model.layers.{index}.self_attn")

    return [
        _plan_layer(f"model.layers.{index}", plan_mixer(index, kind), plan_feed_forward(index, shape, values))
        for index, kind in enumerate(read_layer_types(values, usual, known=(FULL, LINEAR)))
    ]


def _plan_mtp(shape: ModelShape, values: Mapping[str, Any], plan_feed_forward: _PlanMLP) -> MTPPlan | None:
    """The layer that drafts: it attends, whatever most of the model's layers do."""
    if not count_mtp_layers(values, "mtp_num_hidden_layers"):
        return None
    if read_flag(values, "mtp_use_dedicated_embeddings"):
        raise CheckpointError("mtp_use_dedicated_embeddings is not supported: the model's embedding serves MTP layers")
    name = "mtp.layers.0"
    attention = replace(_read_attention(shape, values), name=f"{name}.self_attn")
    layer = _plan_layer(name, attention, replace(plan_feed_forward(0, shape, values), name=f"{name}.mlp"))
    of_embedding, of_hidden = (_norm(f"mtp.pre_fc_norm_{what}", shape) for what in ("embedding", "hidden"))
    return MTPPlan(of_embedding, of_hidden, "mtp.fc.weight", layer, _norm("mtp.norm", shape))


def _plan_layer(name: str, mixer: MixerPlan, mlp: MLPPlan) -> DecoderPlan:
    before, behind = (_norm(f"{name}.{own}", mixer.shape) for own in ("input_layernorm", "post_attention_layernorm"))
    return DecoderPlan(before, mixer, behind, mlp)


def _norm(name: str, shape: ModelShape) -> NormPlan:
    return NormPlan(name, shape.hidden_size, shape.rms_norm_eps, adds_one=True)


def _read_attention(shape: ModelShape, values: Mapping[str, Any]) -> AttentionPlan:
    """The plan of all layers of that kind, without a name."""
    has_bias = read_flag(values, "attention_bias")
    if values.get("attn_output_gate") is False:
        raise CheckpointError("attn_output_gate false is not supported: what heads attend is gated")
    max_positions = min(values["max_position_embeddings"], MOST_POSITIONS)
    rotated = parse_rope(values, max_positions, shape.head_dim, in_part=True).rotated
    return AttentionPlan(
        "", shape, None, has_bias, has_bias, head_norm=True, norms_add_one=True, rotated=rotated, has_gates=True
    )


def _read_delta_net(shape: ModelShape, values: Mapping[str, Any], is_packed: bool) -> DeltaNetPlan:
    """The plan of all layers of that kind, without a name."""
    keys, of_values = (read_size(values, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if of_values % keys:
        raise CheckpointError(f"linear_num_value_heads {of_values} must be a multiple of linear_num_key_heads {keys}")
    key_dim, value_dim = (read_size(values, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    kernel = read_size(values, "linear_conv_kernel_dim")
    if kernel < 2:
        raise CheckpointError("linear_conv_kernel_dim 1 is not supported: convolutions see tokens before, too")
    return DeltaNetPlan("", shape, keys, of_values, key_dim, value_dim, kernel, is_packed)


def _plan_dense(index: int, shape: ModelShape, values: Mapping[str, Any]) -> GatedMLPPlan:
    return GatedMLPPlan(f"model.layers.{index}.mlp", shape)


def _plan_next_mlp(index: int, shape: ModelShape, values: Mapping[str, Any]) -> GatedMLPPlan | ExpertsPlan:
    return plan_mlp(index, shape, values, read_size(values, "shared_expert_intermediate_size"))


def _plan_experts(index: int, shape: ModelShape, values: Mapping[str, Any]) -> ExpertsPlan:
    return ExpertsPlan(
        f"model.layers.{index}.mlp",
        shape,
        *read_experts(values),
        num_features=read_size(values, "moe_intermediate_size"),
        num_shared_features=read_size(values, "shared_expert_intermediate_size"),
    )


_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _family(model_type: str, plan: _PlanMLP, *, is_packed: bool = False, **defaults: Any) -> ModelFamily:
    return ModelFamily(
        defaults={**_DEFAULTS, **defaults},
        plan_layers=partial(_plan_layers, plan_feed_forward=plan, is_packed=is_packed),
        model_type=model_type,
        read_ends=lambda values: ModelEnds(norm_adds_one=True),
        rotates_in_part=True,
        plan_mtp=partial(_plan_mtp, plan_feed_forward=plan),
    )


QWEN3_NEXT = MODEL_FAMILIES.register("Qwen3NextForCausalLM")(
    _family(
        "qwen3_next",
        _plan_next_mlp,
        is_packed=True,
        vocab_size=151936,
        intermediate_size=5632,
        num_hidden_layers=48,
        decoder_sparse_step=1,
        num_experts_per_tok=10,
        num_experts=512,
        norm_topk_prob=True,
    )
)
QWEN3_5 = MODEL_FAMILIES.register("Qwen3_5ForCausalLM")(
    _family(
        "qwen3_5_text",
        _plan_dense,
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_key_value_heads=4,
    )
)
QWEN3_5_MOE = MODEL_FAMILIES.register("Qwen3_5MoeForCausalLM")(
    _family(
        "qwen3_5_moe_text",
        _plan_experts,
        vocab_size=248320,
        num_hidden_layers=40,
        intermediate_size=512,  # which no layer has
        num_experts_per_tok=8,
        num_experts=256,
    )
)
MODEL_FAMILIES.register("Qwen3_5ForConditionalGeneration")(
    replace(QWEN3_5, text_models={"qwen3_5_text": "Qwen3_5ForCausalLM"})
)
MODEL_FAMILIES.register("Qwen3_5MoeForConditionalGeneration")(
    replace(QWEN3_5_MOE, text_models={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"})
)
