"""The part of config.json that says how positions are rotated, as transformers 4 and 5 write it.

It knows keys, types and ranges; whether odd numbers give angles is asked of `layers.rotary`, which uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.rope import RopeConfig, longrope_attention_factor, yarn_attention_factor

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def read_number(values: Mapping[str, Any], name: str) -> float:
    """A positive number of config.json.

    Raises:
        CheckpointError: it is not one, or not finite.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
        raise CheckpointError(f"'{name}' must be a positive number, not {shorten(value)}")
    return float(value)


def parse_rope(
    values: Mapping[str, Any],
    max_positions: int,
    head_dim: int,
    layer_type: str | None = None,
    scaled: bool = True,
    in_part: bool = False,
) -> RopeConfig:
    """How the model, or its layers of a type, rotate queries and keys.

    Args:
        values: of config.json.
        max_positions: `max_position_embeddings`.
        head_dim: of the model.
        layer_type: whose entry of `rope_parameters` counts, where it has one for each type; None where all are alike.
        scaled: whether `rope_scaling`, which knows no types, is of these layers.
        in_part: whether the family holds heads so that a part of them may be rotated.

    Raises:
        CheckpointError: a kind of rotation that is not supported, or numbers that give no angles.
    """
    found = _find(values if scaled else {**values, "rope_scaling": None}, layer_type)
    rotated = _read_rotated(values, found, head_dim, in_part=in_part)
    rope = replace(_parse(values, found, max_positions, rotated or head_dim), rotated=rotated)
    if rope.is_ordinary:
        return rope
    from trtrun.layers.rotary import inverse_frequencies  # not at the top: odd numbers are rare, and torch takes long

    try:
        is_finite = bool(inverse_frequencies(rope, head_dim).isfinite().all())
    except (ArithmeticError, ValueError, RuntimeError):  # a logarithm of 0, a division by it, 10**30 in a tensor
        is_finite = False
    if not is_finite:
        raise CheckpointError(f"the numbers of rope type '{rope.rope_type}' give no angles: check them ({rope})")
    return rope


def _whole(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"'{name}' must be a positive whole number, not {shorten(value)}")
    return value


def _optional(values: Mapping[str, Any], name: str, default: float) -> float:
    """A number that may be left out; as in transformers, 0 leaves it out."""
    value = values.get(name)
    is_left_out = value is None or (not isinstance(value, bool) and value == 0)
    return default if is_left_out else read_number(values, name)


def _find(values: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """What config.json says of the rotation. transformers 4: rope_theta beside rope_scaling (`type` or `rope_type`);
    transformers 5: rope_parameters, flat or one entry per layer type."""
    raw = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"rope_scaling must be an object or null, not {shorten(raw)}")
    rope: dict[str, Any] = {key: value for key, value in raw.items() if value is not None}
    nested = [value for key, value in rope.items() if key.endswith("_attention") and isinstance(value, dict)]
    if nested:
        own = rope.get(layer_type) if layer_type is not None else None
        if own is None and any(entry != nested[0] for entry in nested):
            raise CheckpointError("rope_parameters that differ between layer types are not supported")
        rope = {key: value for key, value in (own or nested[0]).items() if value is not None}
    rope.setdefault("rope_theta", 10000.0 if values.get("rope_theta") is None else values["rope_theta"])
    return rope


def _read_rotated(values: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int, *, in_part: bool) -> int | None:
    """How many of a head's numbers are rotated; None for all."""
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial is None and values.get("rotary_dim") is not None:
        partial = read_number(values, "rotary_dim") / head_dim
    if partial in (None, 1, 1.0) or rope.get("rope_type") == "proportional":
        return None
    if not in_part:
        raise CheckpointError(
            f"partial_rotary_factor {shorten(partial)} is not supported; only whole heads are rotated"
        )
    rotated = int(head_dim * read_number({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor {shorten(partial)} of heads of {head_dim} numbers rotates {rotated}: not an even "
            f"number from 2 to {head_dim}"
        )
    return None if rotated == head_dim else rotated


def _parse(values: Mapping[str, Any], rope: Mapping[str, Any], max_positions: int, rotated: int) -> RopeConfig:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "su" or (rope_type == "yarn" and "short_factor" in rope):
        rope_type = "longrope"  # as older files name it
    if rope_type == "dynamic":
        raise CheckpointError(
            "rope type 'dynamic' is not supported: it changes the angles of tokens already in the KV store as a text "
            "grows; use 'yarn' or 'linear', or remove rope_scaling to keep to max_position_embeddings"
        )
    if rope_type not in _ROPE_TYPES:
        raise CheckpointError(f"rope type {shorten(rope_type)} is not supported; known: {', '.join(_ROPE_TYPES)}")
    theta = read_number(rope, "rope_theta")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "proportional":
        return RopeConfig(
            "proportional",
            theta,
            read_number({"factor": 1.0, **rope}, "factor"),
            proportion=min(1.0, read_number({"partial_rotary_factor": 1.0, **rope}, "partial_rotary_factor")),
        )
    if rope_type == "longrope":
        return _parse_longrope(values, rope, max_positions, rotated)
    original = rope.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    original = max_positions if original is None else _whole("original_max_position_embeddings", original)
    factor = max_positions / original if rope_type == "yarn" and "factor" not in rope else read_number(rope, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    if rope_type == "llama3":
        low, high = read_number(rope, "low_freq_factor"), read_number(rope, "high_freq_factor")
        return RopeConfig("llama3", theta, factor, original, low, high)
    mscale, mscale_all_dim = (_optional(rope, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    default = yarn_attention_factor(factor, mscale, mscale_all_dim)
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"'truncate' must be true or false, not {shorten(truncate)}")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=_optional(rope, "beta_fast", 32.0),
        beta_slow=_optional(rope, "beta_slow", 1.0),
        truncate=truncate,
        attention_factor=_optional(rope, "attention_factor", default),
    )


def _parse_longrope(values: Mapping[str, Any], rope: Mapping[str, Any], max_positions: int, rotated: int) -> RopeConfig:
    """Factors for texts of the whole context; see `RopeConfig.in_context`."""
    said = values.get("original_max_position_embeddings")  # which transformers puts first
    said = rope.get("original_max_position_embeddings", max_positions) if said is None else said
    original = _whole("original_max_position_embeddings", said)
    factor = read_number(rope, "factor") if "factor" in rope else max_positions / original
    short, long = (_read_factors(rope, name, rotated // 2) for name in ("short_factor", "long_factor"))
    return RopeConfig(
        "longrope",
        read_number(rope, "rope_theta"),
        factor,
        original,
        attention_factor=_optional(rope, "attention_factor", longrope_attention_factor(factor, original)),
        short_factors=short,
        long_factors=long,
        is_long=max_positions > original,
    )


def _read_factors(rope: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    factors = rope.get(name)
    if not isinstance(factors, list) or len(factors) != count:
        raise CheckpointError(f"'{name}' must be a list of {count} numbers, not {shorten(factors)}")
    return tuple(read_number({name: factor}, name) for factor in factors)
