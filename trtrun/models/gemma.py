"""Gemma 3's text models: four norms that multiply by 1 + weight, embeddings by the root of their size, gates through
GELU, and layers that see a window in turns with layers that see all, each with a rotation of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.ends import ModelEnds
from trtrun.models.config import FULL, MOST_POSITIONS, SLIDING, ModelFamily, read_flag, read_layer_types, read_window
from trtrun.models.layer_plan import AttentionPlan, DecoderPlan, GatedMLPPlan, LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.registry import MODEL_FAMILIES

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")
_FULL_PERIOD = 6
"""Of so many layers the last one sees all, where config.json names no layers' types."""


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    _check(values)
    window, max_positions = read_window(values), min(values["max_position_embeddings"], MOST_POSITIONS)
    local = {**values, "rope_theta": values["rope_local_base_freq"]}
    ropes = {
        FULL: parse_rope(values, max_positions, shape.head_dim, FULL),
        SLIDING: parse_rope(local, max_positions, shape.head_dim, SLIDING, scaled=False),
    }
    has_bias, scale = read_flag(values, "attention_bias"), read_number(values, "query_pre_attn_scalar") ** -0.5
    period = values.get("sliding_window_pattern") or _FULL_PERIOD
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise CheckpointError(f"'sliding_window_pattern' must be a positive whole number, not {shorten(period)}")
    usual = [FULL if (index + 1) % period == 0 else SLIDING for index in range(shape.num_layers)]

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps, adds_one=True)

    return [
        DecoderPlan(
            norm(index, "input_layernorm"),
            AttentionPlan(
                f"model.layers.{index}.self_attn",
                shape,
                window if kind == SLIDING else None,
                has_bias,
                has_bias,
                head_norm=True,
                rope=ropes[kind],
                scale=scale,
                norms_add_one=True,
            ),
            norm(index, "pre_feedforward_layernorm"),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, activation="gelu_tanh"),
            norm(index, "post_attention_layernorm"),
            norm(index, "post_feedforward_layernorm"),
        )
        for index, kind in enumerate(read_layer_types(values, usual))
    ]


def _check(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_activation")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"hidden_activation {shorten(activation)} is not supported; known: {known}")
    if values.get("attn_logit_softcapping") is not None:
        raise CheckpointError("attn_logit_softcapping is not supported: no kernel of attention caps scores")
    if read_flag(values, "use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported: tokens see those before them alone")


def _read_ends(values: Mapping[str, Any]) -> ModelEnds:
    capped = values.get("final_logit_softcapping") is not None
    return ModelEnds(
        embedding_factor=values["hidden_size"] ** 0.5,
        norm_adds_one=True,
        logit_soft_cap=read_number(values, "final_logit_softcapping") if capped else None,
    )


GEMMA3 = MODEL_FAMILIES.register("Gemma3ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": _ACTIVATIONS[0],
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "eos_token_id": 1,
        },
        plan_layers=_plan_layers,
        model_type="gemma3_text",
        read_ends=_read_ends,
        rope_type_of=FULL,
    )
)
