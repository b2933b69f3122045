"""The dense families: Llama (1 to 3), Mistral, Qwen2 (and 2.5), Qwen3, Ernie 4.5 and Seed-OSS.

They differ in biases, in windows, in the norm of queries and keys, and in which numbers of a head are rotated together.
A family of another kind is a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_flag, read_window, windows_by_layer_type
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_llama(
    shape: ModelShape, values: Mapping[str, Any], output_bias: str = "attention_bias"
) -> Sequence[LayerPlan]:
    """Llama's layers; `output_bias` is the key that says whether the attention's output has a bias."""
    qkv_bias, output_has_bias = read_flag(values, "attention_bias"), read_flag(values, output_bias)
    mlp_bias = read_flag(values, "mlp_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, qkv_bias=qkv_bias, output_bias=output_has_bias),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=mlp_bias),
        )
        for index in range(shape.num_layers)
    ]


LLAMA = MODEL_FAMILIES.register("LlamaForCausalLM")(
    ModelFamily(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2},
        plan_layers=_plan_llama,
        model_type="llama",
    )
)


def _plan_mistral(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window = read_window(values)
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index in range(shape.num_layers)
    ]


MISTRAL = MODEL_FAMILIES.register("MistralForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        plan_layers=_plan_mistral,
        model_type="mistral",
    )
)
MINISTRAL3 = MODEL_FAMILIES.register("Ministral3ForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "eos_token_id": 2,
        },
        plan_layers=_plan_mistral,
        model_type="ministral3",
        scales_late_queries=True,
    )
)
MODEL_FAMILIES.register("Mistral3ForConditionalGeneration")(
    replace(MISTRAL, text_models={"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"})
)


def _plan_qwen2(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, qkv_bias=True),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index, window in enumerate(windows_by_layer_type(values))
    ]


QWEN2 = MODEL_FAMILIES.register("Qwen2ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        plan_layers=_plan_qwen2,
        model_type="qwen2",
    )
)


def _plan_qwen3(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "attention_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, has_bias, has_bias, head_norm=True),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index, window in enumerate(windows_by_layer_type(values))
    ]


QWEN3 = MODEL_FAMILIES.register("Qwen3ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        plan_layers=_plan_qwen3,
        model_type="qwen3",
    )
)


def _plan_ernie(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "use_bias")
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, interleaved=True),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=has_bias),
        )
        for index in range(shape.num_layers)
    ]


ERNIE = MODEL_FAMILIES.register("Ernie4_5ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        plan_layers=_plan_ernie,
        model_type="ernie4_5",
    )
)

SEED_OSS = MODEL_FAMILIES.register("SeedOssForCausalLM")(
    ModelFamily(
        defaults={
            "vocab_size": 155136,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
        },
        plan_layers=partial(_plan_llama, output_bias="attention_out_bias"),
        model_type="seed_oss",
    )
)
