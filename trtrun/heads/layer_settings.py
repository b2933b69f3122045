"""What the layers of a head compute that shapes of tensors do not show: by which activation, and how far back they see.

It reads the part of a head's config.json that describes a layer. It does not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.models.config import FULL, MOST_POSITIONS, SLIDING, read_size

if TYPE_CHECKING:
    from trtrun.kernels.arguments import Activation

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""By `hidden_act`. speculators takes the target's, so that heads for Gemma have GELU."""


def read_activation(values: Mapping[str, Any]) -> Activation:
    """What gates of the layers go through.

    Raises:
        CheckpointError: `hidden_act` is none that is known.
    """
    name = values["hidden_act"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act {shorten(name)} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_window_of(values: Mapping[str, Any], index: int) -> int | None:
    """How many tokens back the layer `index` sees, itself included; None where it sees all.

    Raises:
        CheckpointError: `layer_types` or `sliding_window` do not say.
    """
    kinds = values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or index >= len(kinds) or kinds[index] not in (FULL, SLIDING):
        raise CheckpointError(
            f"config.json: 'layer_types' must name {FULL} or {SLIDING} for each layer, and for layer {index} does not: "
            f"{shorten(kinds)}"
        )
    return min(read_size(values, "sliding_window"), MOST_POSITIONS) if kinds[index] == SLIDING else None
