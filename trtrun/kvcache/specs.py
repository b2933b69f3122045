"""What a layer keeps of the rows that run, on one rank: kinds and sizes, which plans of layers name and stores are made
of.

It knows no tensor and no device, so that processes that only start ranks reckon with it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

StateDtype = Literal["float32", "float16", "bfloat16"]
STATE_BYTES: dict[StateDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""How states may be kept, and bytes of a number."""


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

    @property
    def num_parts(self) -> int:
        """What is kept of a token beside each other, each of `kv_heads` times `head_dim` numbers: keys, then values."""
        return 2


@dataclass(frozen=True)
class PagedLatent:
    """One vector of each token for all heads, the same on all ranks of a group, in blocks of tokens: its first numbers
    stand for values, and all of them for keys.

    Attributes:
        head_dim: numbers of the vector.
        window: no layer has one so far.
    """

    head_dim: int
    window: None = None
    kv_heads: ClassVar[int] = 1
    num_parts: ClassVar[int] = 1


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
        num_narrow: so many of the last parts may be kept in fewer bytes: what a token leaves behind is rounded then.
    """

    parts: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    num_narrow: int = 0

    def part_dtypes(self, narrow: StateDtype) -> list[StateDtype]:
        """The dtype that each part is kept in, where those that may be are kept in `narrow`."""
        num_wide = len(self.parts) - self.num_narrow
        return ["float32" if part < num_wide else narrow for part in range(len(self.parts))]

    def state_bytes(self, narrow: StateDtype) -> int:
        """Bytes of a state."""
        dtypes = self.part_dtypes(narrow)
        return sum(prod(shape) * STATE_BYTES[dtype] for shape, dtype in zip(self.parts, dtypes, strict=True))

    @property
    def input_numbers(self) -> int:
        """Numbers that a token brings."""
        return sum(map(prod, self.inputs))


Paged = PagedKeysAndValues | PagedLatent
CacheSpec = Paged | SharedKeysAndValues | RecurrentState
LayerSpecs = Sequence[CacheSpec]
"""What one layer keeps: of each kind one at most, and nothing where a layer has no memory."""


def paged_of(specs: LayerSpecs) -> Paged | None:
    """The keys and values, or latents, that a layer keeps; None where it keeps none."""
    return next((spec for spec in specs if isinstance(spec, Paged)), None)


def latent_of(layers: Sequence[LayerSpecs]) -> PagedLatent | None:
    """The widest latents that any layer keeps; None where none keeps any."""
    found = (spec for specs in layers for spec in specs if isinstance(spec, PagedLatent))
    return max(found, key=lambda spec: spec.head_dim, default=None)


def shared_of(specs: LayerSpecs) -> SharedKeysAndValues | None:
    """Whose keys and values a layer attends in, where these are another's."""
    return next((spec for spec in specs if isinstance(spec, SharedKeysAndValues)), None)


def state_of(specs: LayerSpecs) -> RecurrentState | None:
    """The state that a layer keeps; None where it keeps none."""
    return next((spec for spec in specs if isinstance(spec, RecurrentState)), None)


def like_layers(num_layers: int, kv_heads: int, head_dim: int) -> list[LayerSpecs]:
    """Layers that all keep keys and values of so many heads, of the whole text."""
    return [(PagedKeysAndValues(kv_heads, head_dim),)] * num_layers
