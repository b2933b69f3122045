"""gpt-oss: experts with biases in every layer, whose gates and factors have a limit; heads with sinks; layers that see
a window in turns with layers that see all; norms that round once. Released in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.ends import ModelEnds
from trtrun.linear.stored.expert_layouts import expert_layout
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import FULL, SLIDING, ModelFamily, read_flag, read_layer_types, read_window
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.experts_plan import ExpertNames, ExpertsPlan
from trtrun.models.families.mixtures import read_experts
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import read_number
from trtrun.registry import MODEL_FAMILIES

_ALPHA = 1.702
"""What gates are multiplied by in their sigmoid; the activation has no other one."""


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    if values["swiglu_alpha"] != _ALPHA:
        raise CheckpointError(f"swiglu_alpha {shorten(values['swiglu_alpha'])} is not supported; known: {_ALPHA}")
    kinds = read_layer_types(values, [FULL if index % 2 else SLIDING for index in range(shape.num_layers)])
    window, has_bias = read_window(values), read_flag(values, "attention_bias")
    (count, chosen), limit = read_experts(values), read_number(values, "swiglu_limit")
    layers = []
    for index, kind in enumerate(kinds):
        attention = AttentionPlan(
            f"model.layers.{index}.self_attn",
            shape,
            window if kind == SLIDING else None,
            has_bias,
            has_bias,
            has_sinks=True,
        )
        name = f"model.layers.{index}.mlp"
        experts = ExpertsPlan(
            name,
            shape,
            count,
            chosen,
            shape.intermediate_size,
            ExpertNames(router="router"),
            activation="clamped_swiglu",
            has_bias=True,
            limit=limit,
            in_one_tensor=expert_layout(values.get("quantization_config"), f"{name}.experts", count),
        )
        layers.append(
            DecoderPlan(
                _norm(index, "input_layernorm", shape),
                attention,
                _norm(index, "post_attention_layernorm", shape),
                experts,
            )
        )
    return layers


def _norm(index: int, name: str, shape: ModelShape) -> NormPlan:
    return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps, in_float32=True)


GPT_OSS = MODEL_FAMILIES.register("GptOssForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        plan_layers=_plan_layers,
        model_type="gpt_oss",
        read_ends=lambda values: ModelEnds(norm_in_float32=True),
    )
)
