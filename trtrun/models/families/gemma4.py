"""Gemma 4's text models: two sizes of heads, in layers that see a window and in those that see all; norms of queries,
keys and values; a factor behind each layer. Some have experts beside the feed-forward layer, others inputs of each
layer, and keys and values that later layers share.

Its models see and hear, too; of these the text model is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.ends import ModelEnds
from trtrun.layers.rope import RopeConfig
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import (
    FULL,
    MOST_POSITIONS,
    SLIDING,
    ModelFamily,
    read_flag,
    read_layer_types,
    read_size,
    read_window,
)
from trtrun.models.decoder_plan import GatedMLPPlan
from trtrun.models.experts_beside_plan import ExpertsBesidePlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.families.gemma import read_cap
from trtrun.models.layer_inputs_plan import InputMixerPlan, LayerInputsPlan, ScaledLayerPlan
from trtrun.models.layer_plan import LayerPlan, MLPPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope
from trtrun.registry import MODEL_FAMILIES

_ACTIVATIONS = ("gelu_pytorch_tanh",)
_FULL_PERIOD = 6
"""The last of so many layers sees all, where config.json names no types of layers."""

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OF_LAYERS = {"head_dim", "num_key_value_heads"}
"""What `per_layer_config`, as transformers saves it, may say of a layer."""


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    _check_values(values)
    kinds, window = read_kinds(shape.num_layers, values), read_window(values)
    shapes, shared = _read_shapes(shape, values, kinds), _read_shared(values, kinds)
    has_bias, equals = read_flag(values, "attention_bias"), read_flag(values, "attention_k_eq_v")
    ropes = {kind: _read_rope(values, kind, shapes[kinds.index(kind)]) for kind in set(kinds)}

    def plan_attention(index: int, kind: str) -> AttentionPlan:
        return AttentionPlan(
            f"model.layers.{index}.self_attn",
            shapes[index],
            window if kind == SLIDING else None,
            has_bias,
            has_bias,
            head_norm=True,
            rope=ropes[kind],
            scale=1.0,
            norms_in_float32=True,
            keys_are_values=equals and kind == FULL,
            norms_values=True,
            shared_layer=shared[index],
        )

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps, in_float32=True)

    has_experts, size = read_flag(values, "enable_moe_block"), _read_input_size(values)
    return [
        ScaledLayerPlan(
            norm(index, "input_layernorm"),
            plan_attention(index, kind),
            None if has_experts else norm(index, "pre_feedforward_layernorm"),
            _plan_mlp(index, shape, values, is_wide=shared[index] is not None),
            norm(index, "post_attention_layernorm"),
            norm(index, "post_feedforward_layernorm"),
            index=index,
            mixer=InputMixerPlan(index, shape, size) if size else None,
        )
        for index, kind in enumerate(kinds)
    ]


def _check_values(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_activation")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"hidden_activation {shorten(activation)} is not supported; known: {known}")
    both_ways = values.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):
        raise CheckpointError(
            f"use_bidirectional_attention {shorten(both_ways)} is not supported: tokens see those before them alone"
        )


def read_kinds(num_layers: int, values: Mapping[str, Any]) -> list[str]:
    """The type of each layer; the last one sees all, whatever config.json says, as in transformers."""
    usual = [SLIDING if (index + 1) % _FULL_PERIOD else FULL for index in range(num_layers)]
    return [*read_layer_types(values, usual)[:-1], FULL]


def _read_rope(values: Mapping[str, Any], kind: str, shape: ModelShape) -> RopeConfig:
    max_positions = min(values["max_position_embeddings"], MOST_POSITIONS)
    return parse_rope(values, max_positions, shape.head_dim, kind)


def _read_shapes(shape: ModelShape, values: Mapping[str, Any], kinds: Sequence[str]) -> list[ModelShape]:
    """The heads of each layer: of layers that see all `global_head_dim` and, with `attention_k_eq_v`,
    `num_global_key_value_heads`; or what `per_layer_config` says.

    Raises:
        CheckpointError: they are not alike in layers of a type, or no heads.
    """
    overrides: dict[str, Any] = {"head_dim": values["global_head_dim"]}
    if read_flag(values, "attention_k_eq_v") and values.get("num_global_key_value_heads") is not None:
        overrides["num_key_value_heads"] = values["num_global_key_value_heads"]
    said = values.get("per_layer_config")
    if said is None:
        said = {str(index): overrides for index, kind in enumerate(kinds) if kind == FULL}
    is_known = isinstance(said, dict) and all(
        index.isdecimal() and isinstance(one, dict) and set(one) <= _OF_LAYERS for index, one in said.items()
    )
    if not is_known:
        raise CheckpointError(
            f"'per_layer_config' must name {' and '.join(sorted(_OF_LAYERS))} of layers, not {shorten(said)}"
        )
    of_layers = {int(index): one for index, one in said.items()}  # some are written as "05"
    shapes = [_read_heads(shape, of_layers.get(index, {})) for index in range(len(kinds))]
    if len({*zip(kinds, shapes, strict=True)}) > len({*kinds}):
        raise CheckpointError("'per_layer_config' has other heads in layers of the same type, which is not supported")
    return shapes


def _read_heads(shape: ModelShape, said: Mapping[str, Any]) -> ModelShape:
    own = {"head_dim": shape.head_dim, "num_key_value_heads": shape.num_kv_heads, **said}
    head_dim, num_kv_heads = read_size(own, "head_dim"), read_size(own, "num_key_value_heads")
    if shape.num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads {shape.num_heads} must be a multiple of the {num_kv_heads} heads of keys in layers "
            f"that see all, and the size {head_dim} of these even"
        )
    return replace(shape, head_dim=head_dim, num_kv_heads=num_kv_heads)


def _read_shared(values: Mapping[str, Any], kinds: Sequence[str]) -> list[int | None]:
    """In whose keys and values each layer attends: of the last `num_kv_shared_layers`, the last layer before these of
    the same type; None for others.

    Raises:
        CheckpointError: there is none.
    """
    count = values.get("num_kv_shared_layers") or 0
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < len(kinds):
        raise CheckpointError(f"'num_kv_shared_layers' must be fewer than {len(kinds)} layers, not {shorten(count)}")
    own = len(kinds) - count
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    missing = next((kind for kind in kinds[own:] if kind not in last), None)
    if missing is not None:
        raise CheckpointError(f"'num_kv_shared_layers' is {count}, but no {missing} layer is before these")
    return [None] * own + [last[kind] for kind in kinds[own:]]


def _plan_mlp(index: int, shape: ModelShape, values: Mapping[str, Any], *, is_wide: bool) -> MLPPlan:
    """The feed-forward layer, twice as wide in some; with experts beside it where the model has these."""
    layer = f"model.layers.{index}"
    if is_wide and read_flag(values, "use_double_wide_mlp"):
        shape = replace(shape, intermediate_size=2 * shape.intermediate_size)
    mlp = GatedMLPPlan(f"{layer}.mlp", shape, activation="gelu_tanh")
    if not read_flag(values, "enable_moe_block"):
        return mlp
    count, chosen = read_size(values, "num_experts"), read_size(values, "top_k_experts")
    if chosen > count:
        raise CheckpointError(f"'top_k_experts' is {chosen}, more than there are experts: {count}")
    experts = ExpertsPlan(
        layer,
        shape,
        count,
        chosen,
        read_size(values, "moe_intermediate_size"),
        ExpertNames(router="router.proj"),
        activation="gelu_tanh",
        share_factors="router.per_expert_scale",
    )
    return ExpertsBesidePlan(layer, mlp, experts)


def _read_input_size(values: Mapping[str, Any]) -> int:
    """Size of a layer's inputs; 0 where there are none."""
    return read_size(values, "hidden_size_per_layer_input") if values.get("hidden_size_per_layer_input") else 0


def _plan_inputs(shape: ModelShape, values: Mapping[str, Any]) -> LayerInputsPlan | None:
    size = _read_input_size(values)
    if not size:
        return None
    count, tokens = read_size(values, "vocab_size"), read_size(values, "vocab_size_per_layer_input")
    if tokens < count:
        raise CheckpointError(f"'vocab_size_per_layer_input' is {tokens}, fewer than there are tokens: {count}")
    return LayerInputsPlan("model", shape, tokens, size)


def _read_ends(values: Mapping[str, Any]) -> ModelEnds:
    return ModelEnds(
        embedding_factor=values["hidden_size"] ** 0.5,
        norm_in_float32=True,
        logit_soft_cap=read_cap(values, "final_logit_softcapping"),
    )


GEMMA4 = MODEL_FAMILIES.register("Gemma4ForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_activation": _ACTIVATIONS[0],
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPES,
            "sliding_window": 512,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "eos_token_id": 1,
        },
        plan_layers=_plan_layers,
        activations=_ACTIVATIONS,
        model_type="gemma4_text",
        read_ends=_read_ends,
        rope_type_of=SLIDING,
        plan_inputs=_plan_inputs,
    )
)
MODEL_FAMILIES.register("Gemma4ForConditionalGeneration")(
    replace(GEMMA4, text_models={"gemma4_text": "Gemma4ForCausalLM"})
)
GEMMA4_UNIFIED = MODEL_FAMILIES.register("Gemma4UnifiedForCausalLM")(
    replace(
        GEMMA4,
        defaults={
            **GEMMA4.defaults,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
        model_type="gemma4_unified_text",
    )
)
MODEL_FAMILIES.register("Gemma4UnifiedForConditionalGeneration")(
    replace(GEMMA4_UNIFIED, text_models={"gemma4_unified_text": "Gemma4UnifiedForCausalLM"})
)
