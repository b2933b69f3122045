"""Read a Hugging Face config.json, as transformers 4 and 5 write it, into one plain description of the model.

Each architecture is a `ModelFamily`, registered by its own file, which says only what is special about it. This module
reads no weights (at most their dtype) and knows no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trtrun.errors import CheckpointError, TrtrunError
from trtrun.layers.rotary import RopeConfig, yarn_attention_factor
from trtrun.models.checkpoint import Checkpoint, read_json
from trtrun.registry import MODEL_FAMILIES

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of one decoder-only model.

    Attributes:
        architecture: name in config.json, such as "LlamaForCausalLM".
        vocab_size: rows of the embedding in the checkpoint (the tokenizer may know fewer tokens).
        sliding_windows: per layer, how many tokens back a query sees, itself included; None sees all.
        checkpoint_dtype: dtype that config.json states, or else that of the first tensor of the weights.
        eos_token_ids: tokens that end a text; empty when the checkpoint names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    checkpoint_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ModelFamily:
    """What one architecture adds to the common decoder.

    Attributes:
        defaults: values that transformers' config class takes for keys that config.json leaves out.
        qkv_bias, o_bias: whether the projections have a bias, given config.json.
        qk_norm: whether queries and keys are RMS-normalised per head before the rotation.
        sliding_windows: config.json → window per layer.
    """

    defaults: Mapping[str, Any]
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    o_bias: Callable[[Mapping[str, Any]], bool]
    sliding_windows: Callable[[Mapping[str, Any]], tuple[int | None, ...]]
    qk_norm: bool = False
    mlp_bias: Callable[[Mapping[str, Any]], bool] = field(default=lambda values: False)


def attention_bias(values: Mapping[str, Any]) -> bool:
    """Whether config.json's `attention_bias` is on."""
    return bool(values.get("attention_bias", False))


def no_windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Every layer sees the whole context."""
    return (None,) * int(values["num_hidden_layers"])


def windows_by_layer_type(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types` where given, else the layers from `max_window_layers` on, if `use_sliding_window`."""
    layers = int(values["num_hidden_layers"])
    window = values.get("sliding_window") if values.get("use_sliding_window") else None
    types = values.get("layer_types")
    if types is None:
        first = int(values["max_window_layers"])
        return tuple(window if index >= first else None for index in range(layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        detail = f"unknown layer type '{unknown[0]}'" if unknown else f"{len(types)} layer_types for {layers} layers"
        raise CheckpointError(f"{detail}; known layer types: full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_model_config(path: Path) -> ModelConfig:
    """Read `path`/config.json and generation_config.json.

    Raises:
        CheckpointError: the directory or config.json is missing or invalid, the architecture is unknown, or the model
            uses something that is not supported; one line that names the directory.
    """
    values = read_json(path, "config.json", required=True)
    generation = read_json(path, "generation_config.json", required=False)
    try:
        config = _parse(values, generation)
        dtype = _parse_dtype(values)
    except TrtrunError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from None
    # As transformers does: without a stated dtype, that of the weights.
    return replace(config, checkpoint_dtype=Checkpoint(path).first_dtype() if dtype is None else dtype)


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise CheckpointError(f"'architectures' must name one of {', '.join(MODEL_FAMILIES)}, not {architectures!r}")
    family: ModelFamily = MODEL_FAMILIES.get(str(architectures[0]))
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise CheckpointError(f"quantized weights ('{method}') are not supported; use a float32/float16/bfloat16 model")
    values = {**family.defaults, **raw}
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act '{values['hidden_act']}' is not supported; known: silu")
    hidden_size, num_heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    if values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = hidden_size // num_heads if values.get("head_dim") is None else _size(values, "head_dim")
    num_kv_heads = num_heads if values.get("num_key_value_heads") is None else _size(values, "num_key_value_heads")
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}, "
            f"and head_dim {head_dim} even"
        )
    max_positions = _size(values, "max_position_embeddings")
    num_layers = _size(values, "num_hidden_layers")
    windows = family.sliding_windows(values)
    if any(window is not None and (not isinstance(window, int) or window < 1) for window in windows):
        raise CheckpointError(
            f"sliding_window must be a positive whole number or null, not {values['sliding_window']!r}"
        )
    return ModelConfig(
        architecture=str(architectures[0]),
        vocab_size=_size(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(values, "rms_norm_eps"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(values),
        o_bias=family.o_bias(values),
        mlp_bias=family.mlp_bias(values),
        qk_norm=family.qk_norm,
        rope=_parse_rope(values, max_positions),
        sliding_windows=windows,
        checkpoint_dtype=torch.float32,
        eos_token_ids=_parse_eos(values, generation),
    )


def _size(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"'{name}' must be a positive whole number, not {value!r}")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"'{name}' must be a positive number, not {value!r}")
    return float(value)


def _parse_dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    name = values.get("dtype") or values.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"dtype '{name}' is not supported; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _parse_eos(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json decides where it exists, as in transformers: without the key nothing ends a text."""
    ids = (generation or values).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"'eos_token_id' must be a token id or a list of them, not {ids!r}")
    return tuple(ids)


def _parse_rope(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """transformers 4: rope_theta beside rope_scaling (`type` or `rope_type`); transformers 5: rope_parameters, flat or
    one entry per layer type."""
    raw = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"rope_scaling must be an object or null, not {raw!r}")
    rope: dict[str, Any] = {key: value for key, value in raw.items() if value is not None}
    nested = [value for key, value in rope.items() if key.endswith("_attention") and isinstance(value, dict)]
    if nested:
        if any(entry != nested[0] for entry in nested):
            raise CheckpointError("rope_parameters that differ between layer types are not supported")
        rope = {key: value for key, value in nested[0].items() if value is not None}
    rope.setdefault("rope_theta", 10000.0 if values.get("rope_theta") is None else values["rope_theta"])
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "dynamic":
        raise CheckpointError(
            "rope type 'dynamic' is not supported: it changes the angles of tokens already in the KV store as a text "
            "grows; use 'yarn' or 'linear', or remove rope_scaling to keep to max_position_embeddings"
        )
    if rope_type not in _ROPE_TYPES:
        raise CheckpointError(f"rope type '{rope_type}' is not supported; known: {', '.join(_ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported; only whole heads are rotated")
    theta = _number(rope, "rope_theta")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    original = rope.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    original = max_positions if original is None else original
    factor = max_positions / original if rope_type == "yarn" and "factor" not in rope else _number(rope, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    if rope_type == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        return RopeConfig("llama3", theta, factor, int(original), low, high)
    default = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return RopeConfig(
        "yarn",
        theta,
        factor,
        int(original),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(rope.get("attention_factor", default)),
    )
