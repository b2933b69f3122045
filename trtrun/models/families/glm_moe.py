"""GLM-4.5 and GLM-4.6: experts chosen by sigmoids behind some dense layers, and half of each head is rotated. The layer
behind the last one drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.kernels.routing import Routing
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import MOST_POSITIONS, ModelFamily, count_mtp_layers, read_flag, read_size
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.layer_plan import LayerPlan, MLPPlan, ModelShape
from trtrun.models.mtp_plan import MTPPlan
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.registry import MODEL_FAMILIES

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None)


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return [_plan_layer(index, shape, values) for index in range(shape.num_layers)]


def _plan_mtp(shape: ModelShape, values: Mapping[str, Any]) -> MTPPlan | None:
    if not count_mtp_layers(values, "num_nextn_predict_layers"):
        return None
    return MTPPlan.of_layer(f"model.layers.{shape.num_layers}", _plan_layer(shape.num_layers, shape, values))


def _plan_layer(index: int, shape: ModelShape, values: Mapping[str, Any]) -> DecoderPlan:
    max_positions = min(values["max_position_embeddings"], MOST_POSITIONS)
    attention = AttentionPlan(
        f"model.layers.{index}.self_attn",
        shape,
        qkv_bias=read_flag(values, "attention_bias"),
        head_norm=read_flag(values, "use_qk_norm"),
        rotated=parse_rope(values, max_positions, shape.head_dim, in_part=True).rotated,
    )
    return DecoderPlan.of_layer(index, attention, plan_scored_mlp(index, shape, values))


def plan_scored_mlp(index: int, shape: ModelShape, values: Mapping[str, Any]) -> MLPPlan:
    """Experts as DeepSeek-V3 has them; in the first layers one feed-forward layer for all tokens.

    Raises:
        CheckpointError: groups of experts that cannot be.
    """
    name, first = f"model.layers.{index}.mlp", values["first_k_dense_replace"]
    if type(first) is not int or first < 0:
        raise CheckpointError(f"'first_k_dense_replace' must be a number of layers, not {shorten(first)}")
    if index < first:
        return GatedMLPPlan(name, shape)
    count, chosen = read_size(values, "n_routed_experts"), read_size(values, "num_experts_per_tok")
    groups, of_groups = read_size(values, "n_group"), read_size(values, "topk_group")
    if count % groups or of_groups > groups or chosen > count // groups * of_groups or count < 2 * groups:
        raise CheckpointError(
            f"{chosen} of {count} experts cannot be chosen from {of_groups} of {groups} groups, of two at least "
            "(num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    features = read_size(values, "moe_intermediate_size")
    return ExpertsPlan(
        name,
        shape,
        count,
        chosen,
        features,
        _NAMES,
        renormalises=read_flag(values, "norm_topk_prob"),
        num_shared_features=features * read_size(values, "n_shared_experts"),
        routing=Routing(
            "sigmoid",
            has_bias=True,
            groups=groups,
            chosen_groups=of_groups,
            summed=2,
            factor=read_number(values, "routed_scaling_factor"),
            in_float32=True,
        ),
    )


GLM4_MOE = MODEL_FAMILIES.register("Glm4MoeForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        plan_layers=_plan_layers,
        model_type="glm4_moe",
        rotates_in_part=True,
        plan_mtp=_plan_mtp,
    )
)
