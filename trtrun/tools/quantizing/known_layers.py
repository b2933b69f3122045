"""Which models calibration can run in plain torch: those whose plans say nothing that plain_layer.py does not compute.

A family that is added later, or an option of a block, is refused by name until it is known here. It knows plans.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from trtrun.errors import ConfigError
from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.config import ModelConfig

_KNOWN: dict[type, frozenset[str]] = {
    DecoderPlan: frozenset({"input_norm", "attention", "post_attention_norm", "mlp"}),
    NormPlan: frozenset({"name", "size", "eps"}),
    AttentionPlan: frozenset({"name", "shape", "window", "qkv_bias", "output_bias", "head_norm"}),
    GatedMLPPlan: frozenset({"name", "shape", "has_bias"}),
    ModelConfig: frozenset(
        {
            *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
            *("rms_norm_eps", "architecture", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope"),
            *("layers", "checkpoint_dtype", "eos_token_ids", "quant_method", "stored", "mask_token"),
        }
    ),
}


def known_plans(config: ModelConfig) -> list[DecoderPlan]:
    """The plans of a model's layers.

    Raises:
        ConfigError: they, or the model, are of a kind that is not known.
    """
    _check(config, config.architecture)
    for plan in config.layers:
        _check(plan, config.architecture)
        assert isinstance(plan, DecoderPlan)
        for block in (plan.input_norm, plan.attention, plan.post_attention_norm, plan.mlp):
            _check(block, config.architecture)
    return [plan for plan in config.layers if isinstance(plan, DecoderPlan)]


def _check(item: Any, architecture: str) -> None:
    known = _KNOWN.get(type(item))
    if known is None:
        raise ConfigError(f"trtrun quantize does not know layers of {architecture}: they have a {type(item).__name__}")
    for one in fields(item):
        default = None if one.default is MISSING else one.default
        if one.name not in known and getattr(item, one.name) != default:
            raise ConfigError(f"trtrun quantize does not know the {one.name} of {architecture}")
