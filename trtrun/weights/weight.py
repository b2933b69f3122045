"""A model's weights: tensors of the checkpoint, how each of their dimensions is shared out, and what reads them.

The cut is that of Megatron-LM (arXiv:1909.08053): queries, keys and values, gate and up by output features, the output
projections by input features, embedding and head by vocabulary. It is arithmetic on names and numbers, without torch,
so that sizes are known and files are checked before anything is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from parallel.errors import ShardingError
from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import FLOATS, TensorSlice

if TYPE_CHECKING:
    import torch


Use = Literal["plain", "linear", "head"]
"""What is multiplied with is "linear" or the vocabulary's "head", and may be held in another form, as a `LinearWeight`
of trtrun.linear.quantization; what is "plain" is held in the dtype of activations."""


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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: such as "model.layers.0.mlp.down_proj.weight".
        axes: its dimensions.
        dummy_scale: of dummy weights: the factor of a matrix's deviation, or each number of a vector.
        is_optional: whether files may lack it, a vector whose numbers are then `dummy_scale`, or have it with other
            dimensions of one number.
    """

    name: str
    axes: tuple[Axis, ...]
    dummy_scale: float = 1.0
    is_optional: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(axis.size * axis.unit for axis in self.axes)

    def cut(self, share: Share) -> TensorSlice:
        """What a rank reads; errors as of `Axis.units`."""
        ranges = tuple(axis.held(share) for axis in self.axes)
        if not self.is_optional:
            return TensorSlice(self.name, self.shape, ranges)
        return TensorSlice(self.name, self.shape, ranges, is_optional=True, ones_vary=True, usual=self.dummy_scale)

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
    """

    parts: tuple[StoredTensor, ...]
    use: Use = "plain"

    def cut(self, share: Share) -> HeldWeight:
        """What a rank holds.

        Raises:
            CheckpointError: it cannot be shared out over so many ranks.
        """
        try:
            slices = tuple(part.cut(share) for part in self.parts)
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
    """

    name: str
    outputs: Mapping[str, Axis]
    inputs: Axis
    has_bias: bool = False
    dummy_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def weight(self) -> Weight:
        """[out, in]."""
        return Weight(
            tuple(
                StoredTensor(f"{self.name}.{name}.weight", (axis, self.inputs), self.dummy_scales.get(name, 1.0))
                for name, axis in self.outputs.items()
            ),
            "linear",
        )

    @property
    def bias(self) -> Weight | None:
        """[out]."""
        if not self.has_bias:
            return None
        return Weight(
            tuple(StoredTensor(f"{self.name}.{name}.bias", (axis,), 0.0) for name, axis in self.outputs.items())
        )

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
