"""A model's weights: tensors of the checkpoint, how each of their dimensions is shared out, and what reads them.

The cut is that of Megatron-LM (arXiv:1909.08053): queries, keys and values, gate and up by output features, the output
projections by input features, embedding and head by vocabulary. It is arithmetic on names and numbers, without torch,
so that sizes are known and files are checked before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from parallel.errors import ShardingError
from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import FLOATS, Quantization, TensorSlice

if TYPE_CHECKING:
    import torch


Use = Literal["plain", "float32", "linear", "dense", "expert", "head"]
"""What is multiplied with is "linear", an "expert", which some tokens meet, or the vocabulary's "head", and may be held
in another form, as a `LinearWeight` of trtrun.linear.quantization; what is "plain" is held in the dtype of
activations, and what is "float32" in that. What is "dense" is multiplied with in the dtype of activations, however
files have it."""


class Share(NamedTuple):
    """The place of a rank in a tensor-parallel group of `size`."""

    rank: int
    size: int


Cut = Callable[[int, int, int], range]
"""(size, rank, ranks) → what the rank has of it; one of parallel.sharding."""


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor, and how it is shared out.

    Attributes:
        size: of the whole tensor, in units.
        cut: which units a rank reads; None where every rank has all.
        unit: numbers that stay together, such as those of a head.
        padded: which units a rank keeps, where that is more than what it reads.
    """

    size: int
    cut: Cut | None = None
    unit: int = 1
    padded: Cut | None = None

    def units(self, share: Share) -> range:
        """What a rank reads of it, such as its heads.

        Raises:
            ShardingError: it cannot be shared out over so many ranks.
        """
        return range(self.size) if self.cut is None else self.cut(self.size, *share)

    def held(self, share: Share) -> range:
        """`units` in numbers; errors as there."""
        units = self.units(share)
        return range(units.start * self.unit, units.stop * self.unit)

    def kept(self, share: Share) -> int:
        """How many numbers a rank keeps; errors as of `units`."""
        return len(self.held(share)) if self.padded is None else len(self.padded(self.size, *share)) * self.unit


class Rows(NamedTuple):
    """Where something lies in a tensor that holds more.

    Attributes:
        first: its first row.
        all: rows of the tensor.
        group: how many of its units lie one behind the other, before what is not of it; None for all.
        period: rows from the begin of such a group to that of the next.
    """

    first: int
    all: int
    group: int | None = None
    period: int = 0

    def start(self, unit: int, size: int) -> int:
        """The first row of a unit of `size` rows."""
        if self.group is None:
            return self.first + unit * size
        return self.first + unit // self.group * self.period + unit % self.group * size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, or some of its rows.

    Attributes:
        name: such as "model.layers.0.mlp.down_proj.weight".
        axes: its dimensions.
        dummy_scale: of dummy weights: the factor of a matrix's deviation, or each number of a vector.
        is_optional: whether files may lack it, a vector whose numbers are then `dummy_scale`, or have it with other
            dimensions of one number.
        rows: where it lies in the tensor of that name, where this holds more.
        unit_order: the parts of a unit of the first dimension in the order in which ranks hold them; None as they lie.
    """

    name: str
    axes: tuple[Axis, ...]
    dummy_scale: float = 1.0
    is_optional: bool = False
    rows: Rows | None = None
    unit_order: tuple[range, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        own = tuple(axis.size * axis.unit for axis in self.axes)
        return own if self.rows is None else (self.rows.all, *own[1:])

    def cut(self, share: Share) -> Sequence[TensorSlice]:
        """What a rank reads, in the order in which it holds it; errors as of `Axis.units`."""
        others = tuple(axis.held(share) for axis in self.axes[1:])
        slices = [TensorSlice(self.name, self.shape, (rows, *others)) for rows in self._cut_rows(share)]
        if not self.is_optional:
            return slices
        return [replace(item, is_optional=True, ones_vary=True, usual=self.dummy_scale) for item in slices]

    def _cut_rows(self, share: Share) -> list[range]:
        axis, rows = self.axes[0], self.rows or Rows(0, 0)
        if not self.is_reordered:
            held = axis.held(share)
            return [range(rows.first + held.start, rows.first + held.stop)]
        starts = (rows.start(unit, axis.unit) for unit in axis.units(share))
        order = self.unit_order or (range(axis.unit),)
        return [range(start + part.start, start + part.stop) for start in starts for part in order]

    @property
    def is_reordered(self) -> bool:
        """Whether ranks hold its rows in another order than they lie in the tensor."""
        return self.unit_order is not None or (self.rows is not None and self.rows.group is not None)

    @property
    def is_output(self) -> bool:
        """Whether ranks add up what they make with it, for the residual stream: its inputs are shared out."""
        return len(self.axes) > 1 and self.axes[-1].cut is not None


@dataclass(frozen=True)
class HeldWeight:
    """What a rank holds of a weight: its parts one behind the other along the first dimension, then zeros up to
    `shape`."""

    shape: tuple[int, ...]
    parts: tuple[TensorSlice, ...]
    use: Use = "linear"

    @property
    def num_elements(self) -> int:
        """Numbers that the rank holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weight:
    """What a layer computes with: tensors that lie one behind the other along the first dimension.

    Attributes:
        parts: the tensors, which agree in the other dimensions.
        use: what for.
        stored: how files have it, where that is not plainly under the names of `parts`, whatever config.json says.
    """

    parts: tuple[StoredTensor, ...]
    use: Use = "plain"
    stored: Quantization | None = None

    def cut(self, share: Share) -> HeldWeight:
        """What a rank holds.

        Raises:
            CheckpointError: it cannot be shared out over so many ranks.
        """
        try:
            slices = tuple(item for part in self.parts for item in part.cut(share))
            rows = sum(part.axes[0].kept(share) for part in self.parts)
        except ShardingError as error:
            raise CheckpointError(f"tensor parallelism over {share.size} devices: {error}") from None
        return HeldWeight((rows, *(len(item) for item in slices[0].ranges[1:])), slices, self.use)


@dataclass(frozen=True)
class LinearPlan:
    """A linear layer: tensors of the checkpoint that are multiplied with as one, and their biases.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.mlp".
        outputs: output features by the name of each tensor, such as "up_proj": `name`.up_proj.weight [out, in] and
            `name`.up_proj.bias [out].
        inputs: features that go in. Where they are shared out, ranks add up what they make of theirs.
        has_bias: whether there are biases.
        dummy_scales: by the name of a tensor, where it is not 1; see StoredTensor.
        fused: name of the one tensor in which all lie, one behind the other; None where each is its own.
        unit_orders: by the name of a tensor; see StoredTensor.
        inside: by the name of what is a part of a tensor, the name of that one, and where it lies there.
    """

    name: str
    outputs: Mapping[str, Axis]
    inputs: Axis
    has_bias: bool = False
    dummy_scales: Mapping[str, float] = field(default_factory=dict)
    fused: str | None = None
    unit_orders: Mapping[str, tuple[range, ...]] = field(default_factory=dict)
    inside: Mapping[str, tuple[str, Rows]] = field(default_factory=dict)

    @property
    def weight(self) -> Weight:
        """[out, in]."""
        return Weight(
            tuple(
                self._stored(name, "weight", (self.inputs,), self.dummy_scales.get(name, 1.0)) for name in self.outputs
            ),
            "linear",
        )

    @property
    def bias(self) -> Weight | None:
        """[out]."""
        if not self.has_bias:
            return None
        return Weight(tuple(self._stored(name, "bias", (), 0.0) for name in self.outputs))

    def _stored(self, name: str, kind: str, others: tuple[Axis, ...], dummy_scale: float) -> StoredTensor:
        axes = self.outputs[name], *others
        own = StoredTensor(f"{self.name}.{name}.{kind}", axes, dummy_scale, unit_order=self.unit_orders.get(name))
        if name in self.inside:
            tensor, rows = self.inside[name]
            return replace(own, name=f"{self.name}.{tensor}.{kind}", rows=rows)
        if self.fused is None:
            return own
        sizes = {other: axis.size * axis.unit for other, axis in self.outputs.items()}
        first = sum(size for other, size in sizes.items() if list(sizes).index(other) < list(sizes).index(name))
        return replace(own, name=f"{self.name}.{self.fused}.{kind}", rows=Rows(first, sum(sizes.values())))

    @property
    def weights(self) -> Sequence[Weight]:
        """The weight, and the bias where it has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class WeightFiles(Protocol):
    """What is used of a `Checkpoint`, or of what stands for one.

    Attributes:
        path: of the model directory.
        bytes_read: bytes that were handed out so far.
        is_dummy: whether there are no files: whatever is asked for is a dummy, of the shapes of plain weights.
    """

    path: Path
    bytes_read: int
    is_dummy: bool

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, *, ones_vary: bool = False
    ) -> int:
        """Check a tensor by its header, as `Checkpoint.check` does."""
        ...

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Read a tensor in pieces, as `Checkpoint.pieces` does; they may be on the device that they are for."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...
