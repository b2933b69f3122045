"""Mixtures whose experts are chosen by scores with a bias of each expert beside: MiniMax-M2, Hy3 and Ernie 4.5's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.kernels.routing import Routing
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import MOST_POSITIONS, ModelFamily, read_flag, read_size
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.families.mixtures import MIXTRAL_NAMES, read_experts
from trtrun.models.families.olmo import WholeNormAttentionPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.registry import MODEL_FAMILIES

_SIGMOID = Routing("sigmoid", has_bias=True, in_float32=True)
_SOFTMAX = Routing("softmax", has_bias=True, in_float32=True)

_MINIMAX = replace(MIXTRAL_NAMES, choice_bias="e_score_correction_bias")
_HY3 = ExpertNames(router="router.gate", choice_bias="expert_bias", shared="shared_mlp", shared_gate=None)
_ERNIE = ExpertNames(
    choice_bias="moe_statics.e_score_correction_bias", has_bias_row=True, shared="shared_experts", shared_gate=None
)


def _refuse(values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError where config.json asks for another form than layers have here."""
    for key, value in expected.items():
        if values.get(key, value) != value:
            raise CheckpointError(f"'{key}' {shorten(values[key])} is not supported, only {value}")


def _plan_minimax(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    _refuse(
        values,
        {
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
    )
    kinds = values.get("attn_type_list")
    if kinds is not None and kinds != [1] * shape.num_layers:  # linear attention, as MiniMax-M1 has it
        raise CheckpointError(f"'attn_type_list' must be 1 for each layer, not {shorten(kinds)}")
    count, chosen = read_experts(values)
    rope = parse_rope(values, min(values["max_position_embeddings"], MOST_POSITIONS), shape.head_dim, in_part=True)
    return [
        DecoderPlan.of_layer(
            index,
            WholeNormAttentionPlan(
                f"model.layers.{index}.self_attn", shape, rotated=rope.rotated, rounds_before_weighing=True
            ),
            ExpertsPlan(
                f"model.layers.{index}.block_sparse_moe",
                shape,
                count,
                chosen,
                shape.intermediate_size,
                _MINIMAX,
                routing=_SIGMOID,
            ),
        )
        for index in range(shape.num_layers)
    ]


MINIMAX_M2 = MODEL_FAMILIES.register("MiniMaxM2ForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "eos_token_id": 200020,
        },
        plan_layers=_plan_minimax,
        model_type="minimax_m2",
        rotates_in_part=True,
    )
)


def _plan_hy3(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    kinds = values.get("mlp_layer_types") or ["dense", *["sparse"] * (shape.num_layers - 1)]
    if not isinstance(kinds, list) or len(kinds) != shape.num_layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise CheckpointError(f"'mlp_layer_types' must name dense or sparse for each layer, not {shorten(kinds)}")
    (count, chosen), has_bias = read_experts(values), read_flag(values, "attention_bias")
    mlp_bias, features = read_flag(values, "mlp_bias"), read_size(values, "moe_intermediate_size")
    routing = replace(_SIGMOID, factor=read_number(values, "router_scaling_factor"))
    if mlp_bias:
        raise CheckpointError("'mlp_bias' true is not supported, only false")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, head_norm=True),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape)
            if kind == "dense"
            else ExpertsPlan(
                f"model.layers.{index}.mlp",
                shape,
                count,
                chosen,
                features,
                _HY3,
                num_shared_features=features * read_size(values, "num_shared_experts"),
                routing=routing,
            ),
        )
        for index, kind in enumerate(kinds)
    ]


HY3 = MODEL_FAMILIES.register("HYV3ForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 120832,
            "hidden_size": 4096,
            "intermediate_size": 13312,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        plan_layers=_plan_hy3,
        model_type="hy_v3",
    )
)


def _plan_ernie(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    if read_flag(values, "use_bias"):
        raise CheckpointError("'use_bias' true is not supported in layers of experts, only false")
    count, chosen = read_size(values, "moe_num_experts"), read_size(values, "moe_k")
    if chosen > count:
        raise CheckpointError(f"'moe_k' is {chosen}, more than there are experts: {count}")
    first, last, interval = (values[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    if not all(type(number) is int for number in (first, last, interval)) or interval < 1:
        raise CheckpointError(
            "'moe_layer_start_index', 'moe_layer_end_index' and 'moe_layer_interval' must be whole numbers, not "
            f"{shorten([first, last, interval])}"
        )
    sparse = range(first, (shape.num_layers - 1 if last == -1 else last) + 1)
    features = read_size(values, "moe_intermediate_size")
    num_shared = read_size(values, "moe_num_shared_experts") if values["moe_num_shared_experts"] else 0
    experts = ExpertsPlan(
        "",
        shape,
        count,
        chosen,
        features,
        _ERNIE,
        num_shared_features=features * num_shared,
        routing=_SOFTMAX,
    )
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, interleaved=True),
            replace(experts, name=f"model.layers.{index}.mlp")
            if index in sparse and (index + 1) % interval == 0
            else GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index in range(shape.num_layers)
    ]


ERNIE_MOE = MODEL_FAMILIES.register("Ernie4_5_MoeForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 103424,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "eos_token_id": 2,
        },
        plan_layers=_plan_ernie,
        model_type="ernie4_5_moe",
    )
)
