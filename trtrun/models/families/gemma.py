"""Gemma 2 and Gemma 3's text models: four norms that multiply by 1 + weight, embeddings by the root of their size,
gates through GELU, and layers that see a window in turns with layers that see all.

Gemma 2 caps scores and logits softly. Gemma 3 has norms of queries and keys in place of that, and its two kinds of
layers rotate differently; its larger models are parts of an architecture that sees, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.ends import ModelEnds
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import FULL, MOST_POSITIONS, SLIDING, ModelFamily, read_flag, read_layer_types, read_window
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope, read_number
from trtrun.registry import MODEL_FAMILIES

_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")
_FULL_PERIOD = 6
"""The last of so many layers of Gemma 3 sees all, where config.json names no types of layers."""


def _plan_gemma2(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    kinds = read_layer_types(values, [FULL if index % 2 else SLIDING for index in range(shape.num_layers)])
    cap = read_cap(values, "attn_logit_softcapping")
    return _plan_layers(values, kinds, [AttentionPlan("", shape, soft_cap=cap)] * len(kinds))


def _plan_gemma3(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    if values.get("attn_logit_softcapping") is not None:
        raise CheckpointError("attn_logit_softcapping is not supported: Gemma 3 in transformers caps no scores")
    period = values.get("sliding_window_pattern") or _FULL_PERIOD
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise CheckpointError(f"'sliding_window_pattern' must be a positive whole number, not {shorten(period)}")
    usual = [FULL if (index + 1) % period == 0 else SLIDING for index in range(shape.num_layers)]
    kinds = read_layer_types(values, usual)
    max_positions = min(values["max_position_embeddings"], MOST_POSITIONS)
    local = {**values, "rope_theta": values["rope_local_base_freq"]}
    ropes = {
        FULL: parse_rope(values, max_positions, shape.head_dim, FULL),
        SLIDING: parse_rope(local, max_positions, shape.head_dim, SLIDING, scaled=False),
    }
    normed = AttentionPlan("", shape, head_norm=True, norms_add_one=True)
    return _plan_layers(values, kinds, [replace(normed, rope=ropes[kind]) for kind in kinds])


def _plan_layers(
    values: Mapping[str, Any], kinds: Sequence[str], attention: Sequence[AttentionPlan]
) -> Sequence[LayerPlan]:
    """The layers, of a type each, with the attention of each, in which what both families have is filled in."""
    activation = values.get("hidden_activation")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"hidden_activation {shorten(activation)} is not supported; known: {known}")
    if read_flag(values, "use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention is not supported: tokens see those before them alone")
    window, has_bias = read_window(values), read_flag(values, "attention_bias")
    scale, shape = read_number(values, "query_pre_attn_scalar") ** -0.5, attention[0].shape

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps, adds_one=True)

    return [
        DecoderPlan(
            norm(index, "input_layernorm"),
            replace(
                own,
                name=f"model.layers.{index}.self_attn",
                window=window if kind == SLIDING else None,
                qkv_bias=has_bias,
                output_bias=has_bias,
                scale=scale,
            ),
            norm(index, "pre_feedforward_layernorm"),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, activation="gelu_tanh"),
            norm(index, "post_attention_layernorm"),
            norm(index, "post_feedforward_layernorm"),
        )
        for index, (kind, own) in enumerate(zip(kinds, attention, strict=True))
    ]


def read_cap(values: Mapping[str, Any], name: str) -> float | None:
    """A soft cap of config.json's `values`; None where there is none.

    Raises:
        CheckpointError: it is no number.
    """
    return None if values.get(name) is None else read_number(values, name)


def _read_ends(values: Mapping[str, Any]) -> ModelEnds:
    return ModelEnds(
        embedding_factor=values["hidden_size"] ** 0.5,
        norm_adds_one=True,
        logit_soft_cap=read_cap(values, "final_logit_softcapping"),
    )


_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": _ACTIVATIONS[0],
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
GEMMA2 = MODEL_FAMILIES.register("Gemma2ForCausalLM")(
    ModelFamily(
        defaults={
            **_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        plan_layers=_plan_gemma2,
        activations=_ACTIVATIONS,
        model_type="gemma2",
        read_ends=_read_ends,
    )
)
GEMMA3 = MODEL_FAMILIES.register("Gemma3ForCausalLM")(
    ModelFamily(
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        plan_layers=_plan_gemma3,
        activations=_ACTIVATIONS,
        model_type="gemma3_text",
        read_ends=_read_ends,
        rope_type_of=FULL,
    )
)
MODEL_FAMILIES.register("Gemma3ForConditionalGeneration")(
    replace(GEMMA3, text_models={"gemma3_text": "Gemma3ForCausalLM"})
)
