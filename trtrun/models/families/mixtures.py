"""Families whose feed-forward layers are experts: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_flag, read_size, read_window, windows_by_layer_type
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES

MIXTRAL_NAMES = ExpertNames(gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")


def read_experts(values: Mapping[str, Any]) -> tuple[int, int]:
    """How many experts there are, and how many of them a token chooses.

    Raises:
        CheckpointError: config.json does not say, or a token would choose more than there are.
    """
    key = "num_local_experts" if values.get("num_experts") is None else "num_experts"
    count, chosen = read_size(values, key), read_size(values, "num_experts_per_tok")
    if chosen > count:
        raise CheckpointError(f"'num_experts_per_tok' is {chosen}, more than there are experts: {count}")
    return count, chosen


def _plan_mixtral(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window, (count, chosen) = read_window(values), read_experts(values)
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window),
            ExpertsPlan(
                f"model.layers.{index}.block_sparse_moe", shape, count, chosen, shape.intermediate_size, MIXTRAL_NAMES
            ),
        )
        for index in range(shape.num_layers)
    ]


MIXTRAL = MODEL_FAMILIES.register("MixtralForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
            "eos_token_id": 2,
        },
        plan_layers=_plan_mixtral,
        model_type="mixtral",
    )
)


def _plan_qwen2_moe(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    shared, has_bias = read_size(values, "shared_expert_intermediate_size"), read_flag(values, "qkv_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, qkv_bias=has_bias),
            plan_mlp(index, shape, values, shared),
        )
        for index, window in enumerate(windows_by_layer_type(values))
    ]


QWEN2_MOE = MODEL_FAMILIES.register("Qwen2MoeForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "qkv_bias": True,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        plan_layers=_plan_qwen2_moe,
        model_type="qwen2_moe",
    )
)


def _plan_qwen3_moe(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "attention_bias")
    window = read_window(values) if read_flag(values, "use_sliding_window") else None
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, has_bias, has_bias, head_norm=True),
            plan_mlp(index, shape, values, 0),
        )
        for index in range(shape.num_layers)
    ]


QWEN3_MOE = MODEL_FAMILIES.register("Qwen3MoeForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
        plan_layers=_plan_qwen3_moe,
        model_type="qwen3_moe",
    )
)


def plan_mlp(index: int, shape: ModelShape, values: Mapping[str, Any], num_shared: int) -> GatedMLPPlan | ExpertsPlan:
    """Experts, or in some layers a feed-forward layer that all tokens go through, as Qwen's rule has it."""
    name, dense = f"model.layers.{index}.mlp", values.get("mlp_only_layers")
    step = read_size(values, "decoder_sparse_step")
    if dense is not None and not (isinstance(dense, list) and all(type(number) is int for number in dense)):
        raise CheckpointError(f"'mlp_only_layers' must be a list of layers, not {shorten(dense)}")
    if index in (dense or ()) or (index + 1) % step:
        return GatedMLPPlan(name, shape)
    return ExpertsPlan(
        name,
        shape,
        *read_experts(values),
        num_features=read_size(values, "moe_intermediate_size"),
        renormalises=read_flag(values, "norm_topk_prob"),
        num_shared_features=num_shared,
    )
