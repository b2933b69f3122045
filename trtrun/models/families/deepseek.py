"""DeepSeek-V2 and -V3, and what has their layers, such as Kimi-K2 and GLM-4.7-Flash: attention over latents, and
experts in groups beside ones that all tokens go through. Layers that draft, behind the last one, are left in the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from trtrun.errors import CheckpointError, shorten
from trtrun.kernels.routing import Routing
from trtrun.models.config import ModelFamily, count_mtp_layers, read_flag, read_size
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.latent_plan import LatentAttentionPlan
from trtrun.models.layer_plan import LayerPlan, MLPPlan, ModelShape
from trtrun.models.mtp_plan import MTPPlan
from trtrun.models.rope_config import read_number
from trtrun.registry import MODEL_FAMILIES

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None)


class _Kind(NamedTuple):
    """What differs between the two.

    Attributes:
        scoring: `scoring_func`.
        methods: values of `topk_method`; the first where config.json leaves it out.
        refused: flags that may not be on.
        is_interleaved: whether neighbouring numbers are rotated together, whatever config.json says.
    """

    scoring: Literal["softmax", "sigmoid"]
    methods: tuple[str, ...]
    refused: tuple[str, ...]
    is_interleaved: bool


def _plan_layers(shape: ModelShape, values: Mapping[str, Any], kind: _Kind) -> Sequence[LayerPlan]:
    return [_plan_layer(index, shape, values, kind) for index in range(shape.num_layers)]


def _plan_layer(index: int, shape: ModelShape, values: Mapping[str, Any], kind: _Kind) -> DecoderPlan:
    return DecoderPlan.of_layer(
        index,
        _plan_attention(f"model.layers.{index}.self_attn", shape, values, kind),
        _plan_mlp(index, shape, values, kind),
    )


def _plan_mtp(shape: ModelShape, values: Mapping[str, Any], kind: _Kind) -> MTPPlan | None:
    if not count_mtp_layers(values, "num_nextn_predict_layers"):
        return None
    return MTPPlan.of_layer(f"model.layers.{shape.num_layers}", _plan_layer(shape.num_layers, shape, values, kind))


def _plan_attention(name: str, shape: ModelShape, values: Mapping[str, Any], kind: _Kind) -> LatentAttentionPlan:
    if shape.num_kv_heads != shape.num_heads:
        raise CheckpointError(
            f"num_key_value_heads {shape.num_kv_heads} must be num_attention_heads {shape.num_heads}: all heads share "
            "latents"
        )
    read_size(values, "qk_rope_head_dim")  # where it is null the shape has another size
    plain, query_rank = read_size(values, "qk_nope_head_dim"), None
    if values.get("q_lora_rank") is not None:
        query_rank = read_size(values, "q_lora_rank")
    has_bias = read_flag(values, "attention_bias")
    if has_bias and query_rank is None:
        raise CheckpointError("'attention_bias' true is not supported without q_lora_rank")
    return LatentAttentionPlan(
        name,
        shape,
        read_size(values, "kv_lora_rank"),
        plain,
        read_size(values, "v_head_dim"),
        (plain + shape.head_dim) ** -0.5 * _read_mscale(values) ** 2,
        query_rank,
        has_bias,
        kind.is_interleaved or read_flag(values, "rope_interleave"),
    )


def _read_mscale(values: Mapping[str, Any]) -> float:
    """What yarn multiplies queries by, and keys: `mscale_all_dim` counts here; in cosines and sines it stands beside
    `mscale`."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor, weight = read_number(rope, "factor"), read_number(rope, "mscale_all_dim")
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _plan_mlp(index: int, shape: ModelShape, values: Mapping[str, Any], kind: _Kind) -> MLPPlan:
    """Experts; in the first layers, and between others, one feed-forward layer for all tokens."""
    name = f"model.layers.{index}.mlp"
    for key in kind.refused:
        if read_flag(values, key):
            raise CheckpointError(f"'{key}' true is not supported for this architecture")
    if not _has_experts(index, values):
        return GatedMLPPlan(name, shape)
    count, chosen = read_size(values, "n_routed_experts"), read_size(values, "num_experts_per_tok")
    features, shared = read_size(values, "moe_intermediate_size"), values.get("n_shared_experts")
    return ExpertsPlan(
        name,
        shape,
        count,
        chosen,
        features,
        _NAMES,
        read_flag(values, "norm_topk_prob"),
        num_shared_features=features * read_size(values, "n_shared_experts") if shared else 0,
        routing=_read_routing(values, kind, count, chosen),
    )


def _has_experts(index: int, values: Mapping[str, Any]) -> bool:
    """Whether a layer has experts: `mlp_layer_types` where given, else by the number of those in front without. Layers
    that draft have."""
    first, kinds = values["first_k_dense_replace"], values.get("mlp_layer_types")
    if type(first) is not int or first < 0:
        raise CheckpointError(f"'first_k_dense_replace' must be a number of layers, not {shorten(first)}")
    if kinds is None:
        return index >= first and index % read_size(values, "moe_layer_freq") == 0
    if not isinstance(kinds, list) or len(kinds) != values["num_hidden_layers"] or set(kinds) - {"dense", "sparse"}:
        raise CheckpointError(f"'mlp_layer_types' must be 'dense' or 'sparse' for each layer, not {shorten(kinds)}")
    return index >= len(kinds) or kinds[index] == "sparse"


def _read_routing(values: Mapping[str, Any], kind: _Kind, count: int, chosen: int) -> Routing:
    """How experts are chosen.

    Raises:
        CheckpointError: in a way that is not known, or groups do not have as many experts as a token needs.
    """
    scoring, method = values.get("scoring_func") or kind.scoring, values.get("topk_method") or kind.methods[0]
    if scoring != kind.scoring or method not in kind.methods:
        raise CheckpointError(
            f"scoring_func {shorten(scoring)} with topk_method {shorten(method)} is not supported; known: "
            f"{kind.scoring} with {' or '.join(kind.methods)}"
        )
    is_grouped = method != "greedy"
    groups, taken = (read_size(values, name) if is_grouped else 1 for name in ("n_group", "topk_group"))
    if count % groups or taken > groups or chosen > count // groups * taken:
        raise CheckpointError(
            f"a token cannot choose {chosen} of {count} experts in {taken} of {groups} groups (num_experts_per_tok, "
            "n_routed_experts, topk_group, n_group)"
        )
    summed = 2 if kind.scoring == "sigmoid" else 1
    if groups > 1 and summed > count // groups:
        raise CheckpointError(f"{groups} groups (n_group) of {count} experts have less than {summed} each")
    return Routing(
        kind.scoring,
        has_bias=kind.scoring == "sigmoid",
        groups=groups,
        chosen_groups=taken,
        summed=summed,
        factor=read_number(values, "routed_scaling_factor"),
        in_float32=True,
    )


_V2 = _Kind("softmax", ("greedy", "group_limited_greedy"), ("mlp_bias", "norm_topk_prob"), is_interleaved=True)
_V3 = _Kind("sigmoid", ("noaux_tc",), ("mlp_bias",), is_interleaved=False)

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
DEEPSEEK_V2 = MODEL_FAMILIES.register("DeepseekV2ForCausalLM")(
    ModelFamily(
        defaults={
            **_DEFAULTS,
            "vocab_size": 102400,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "eos_token_id": 2,
        },
        plan_layers=partial(_plan_layers, kind=_V2),
        model_type="deepseek_v2",
        head_dim_key="qk_rope_head_dim",
    )
)
_OF_V3: dict[str, Any] = {
    **_DEFAULTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "eos_token_id": 1,
}
DEEPSEEK_V3 = MODEL_FAMILIES.register("DeepseekV3ForCausalLM")(
    ModelFamily(
        defaults={
            **_OF_V3,
            "vocab_size": 129280,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        plan_layers=partial(_plan_layers, kind=_V3),
        plan_mtp=partial(_plan_mtp, kind=_V3),
        model_type="deepseek_v3",
        head_dim_key="qk_rope_head_dim",
    )
)
MODEL_FAMILIES.register("KimiK25ForConditionalGeneration")(
    replace(DEEPSEEK_V3, text_models=dict.fromkeys(("kimi_k2", "deepseek_v3"), "DeepseekV3ForCausalLM"))
)
GLM4_MOE_LITE = MODEL_FAMILIES.register("Glm4MoeLiteForCausalLM")(
    replace(
        DEEPSEEK_V3,
        defaults={
            **_OF_V3,
            "vocab_size": 154880,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
        },
        model_type="glm4_moe_lite",
    )
)
