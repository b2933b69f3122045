"""Checkpoints of several models of which one reads and writes text: its values stand under `text_config`, and its
tensors have a prefix. Here they become those of the text model alone, so that nobody else knows of the others.

The registered family of such an architecture says which text models there may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.registry import MODEL_FAMILIES

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.layers.": "model.layers.",
    "model.language_model.": "model.",
    "language_model.lm_head": "lm_head",
    "lm_head": "lm_head",
    "mtp.": "mtp.",
}
"""In front of the text model's tensors, as transformers 4 and 5 have them in memory and in files, and early NVFP4
checkpoints of Kimi-K2.5 in part → as they are called in a text model."""

_OF_ALL = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "quantization_config")
"""Keys that count for all models where they stand outside of `text_config`, too."""


def is_nested(values: Mapping[str, Any]) -> bool:
    """Whether config.json is of an architecture with a text model among others."""
    return bool(_text_models(values))


def to_text_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the text model, from that of an architecture with one.

    Raises:
        CheckpointError: it has none, or another one than the architecture's.
    """
    known, text = _text_models(values), values.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"'text_config' must be an object with the text model's values, not {shorten(text)}")
    kind = text.get("model_type", next(iter(known)))
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(
            f"the text model of {values['architectures'][0]} is of model_type {shorten(kind)}, which is not supported; "
            f"known: {', '.join(known)}"
        )
    of_all = {key: values[key] for key in _OF_ALL if values.get(key) is not None}
    return {**text, **of_all, "model_type": kind, "architectures": [known[kind]]}


def text_name(stored: str) -> str | None:
    """What a tensor is called in the text model; None where it is of another model."""
    for prefix, own in _PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None


def with_text_names(said: Any) -> Any:
    """What a configuration says, with modules of the text model by their names in it."""
    if isinstance(said, str):
        return text_name(said) or said
    if isinstance(said, list):
        return [with_text_names(one) for one in said]
    if isinstance(said, dict):
        return {with_text_names(key): with_text_names(value) for key, value in said.items()}
    return said


def _text_models(values: Mapping[str, Any]) -> Mapping[str, str]:
    """model_type of each text model that the architecture may have → the architecture that it is."""
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in MODEL_FAMILIES:
        return {}
    found: Mapping[str, str] = getattr(MODEL_FAMILIES.get(str(named[0])), "text_models", {})
    return found
