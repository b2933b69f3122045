"""What a layer keeps of the rows that run, on one rank: kinds and sizes, which plans of layers name and stores are made
of.

It knows no tensor and no device, so that processes that only start ranks reckon with it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class PagedKeysAndValues:
    """A key and a value of each token, in blocks of tokens.

    Attributes:
        kv_heads: heads that the rank holds.
        head_dim: numbers of each.
        window: how many tokens back a query sees, itself included; None sees all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class SharedKeysAndValues:
    """Keys and values of another layer, in which a layer attends that writes none.

    Attributes:
        layer: index of the other one, an earlier one that keeps its own.
    """

    layer: int


@dataclass(frozen=True)
class RecurrentState:
    """One state of a row, however long it is, which each token changes in its turn. It is kept a few tokens behind the
    newest, beside what these tokens bring to it, as they may yet be rejected: a state cannot forget (`RowStates`).

    Attributes:
        parts: shapes of the tensors that a state consists of, float32 each.
        inputs: shapes of what a token brings to it, float32 each.
    """

    parts: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def state_numbers(self) -> int:
        """Numbers of a state."""
        return sum(map(prod, self.parts))

    @property
    def input_numbers(self) -> int:
        """Numbers that a token brings."""
        return sum(map(prod, self.inputs))


CacheSpec = PagedKeysAndValues | SharedKeysAndValues | RecurrentState
LayerSpecs = Sequence[CacheSpec]
"""What one layer keeps: of each kind one at most, and nothing where a layer has no memory."""


def paged_of(specs: LayerSpecs) -> PagedKeysAndValues | None:
    """The keys and values that a layer keeps; None where it keeps none."""
    return next((spec for spec in specs if isinstance(spec, PagedKeysAndValues)), None)


def shared_of(specs: LayerSpecs) -> SharedKeysAndValues | None:
    """Whose keys and values a layer attends in, where these are another's."""
    return next((spec for spec in specs if isinstance(spec, SharedKeysAndValues)), None)


def state_of(specs: LayerSpecs) -> RecurrentState | None:
    """The state that a layer keeps; None where it keeps none."""
    return next((spec for spec in specs if isinstance(spec, RecurrentState)), None)


def like_layers(num_layers: int, kv_heads: int, head_dim: int) -> list[LayerSpecs]:
    """Layers that all keep keys and values of so many heads, of the whole text."""
    return [(PagedKeysAndValues(kv_heads, head_dim),)] * num_layers
