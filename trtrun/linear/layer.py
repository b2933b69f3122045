"""A linear layer on this rank's slice of its weight, and one with adapters beside it (LoRA, arXiv:2106.09685).

The quantization says what a weight is held in and how it is multiplied; the model adds up or gathers the partial
results of tensor parallelism. A layer with adapters adds for each line of activations the product with the two narrow
matrices of the line's adapter. The forward says once for all layers which adapter a line has (`AdaptedLayers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from trtrun.kernels.arguments import Activations, LineSlots, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.low_rank import Factors, Install, LowRankShape
from trtrun.linear.quantization.base import LinearWeight, Quantization, Tensors


class Linear:
    """y = x @ weight.T + bias, for x [tokens, in] to y [tokens, out], in x's dtype on its device.

    Attributes:
        out_features, in_features: of this rank's slice.
        device: where the weight is.
        product: x [tokens, in] → [tokens, out], as the quantization has it.
        takes_rounded_rows: how RoundedRows are rounded that x may be, and is best given as by whoever makes it; None
            where it must be as it is.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        quantization: Quantization,
        tensors: Tensors,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = True,
    ) -> None:
        """A layer whose weight of `shape` [out, in] is held in `tensors`.

        Args:
            shape: [out, in].
            quantization: how the weight is held.
            tensors: what `quantization.load` made. The caller must not keep them, so that packed copies replace them.
            bias: [out] in x's dtype, or None.
            batch_invariant: see `Quantization.apply`.
        """
        self.out_features, self.in_features = shape
        self.device = next(iter(tensors.values())).device
        self.product: Callable[[Any], torch.Tensor] = quantization.apply(tensors, bias, batch_invariant=batch_invariant)
        self.takes_rounded_rows: Rounding | None = getattr(self.product, "takes_rounded_rows", None)

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        return self.product(x)


@dataclass(frozen=True)
class AdapterSpace:
    """Room for adapters.

    Attributes:
        num_slots: adapters that may be loaded at once.
        max_rank: of an adapter.
    """

    num_slots: int
    max_rank: int

    def shape(self, weight: LinearWeight) -> LowRankShape:
        """Shape of what adapters add to a layer with `weight`."""
        outputs = tuple(len(part.ranges[0]) for part in weight.parts)
        return LowRankShape(outputs, weight.shape[1], self.num_slots, self.max_rank)


class AdaptedLayers:
    """The layers of one model on one rank that may have adapters.

    Attributes:
        space: of each of them.
        lines: the slots of the lines that the forward computes now.
        layers: with the weight of each.
    """

    def __init__(self, space: AdapterSpace) -> None:
        self.space = space
        self.lines: LineSlots | None = None
        self.layers: list[tuple[LinearWeight, AdaptedLinear]] = []

    def make(
        self,
        weight: LinearWeight,
        quantization: Quantization,
        tensors: Tensors,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        batch_invariant: bool,
    ) -> AdaptedLinear:
        """A layer with `weight`; see Linear."""
        layer = AdaptedLinear(weight, quantization, tensors, bias, self, dtype, batch_invariant=batch_invariant)
        self.layers.append((weight, layer))
        return layer

    def begin(self, slots: torch.Tensor) -> None:
        """A forward begins, whose lines have `slots` [lines] int64 on the device."""
        self.lines = LineSlots(slots)

    def keep(self, lines: torch.Tensor) -> None:
        """Keep only some `lines` [n] int64 from here on in the forward."""
        assert self.lines is not None
        self.lines = self.lines.select(lines)


class AdaptedLinear(Linear):
    """A `Linear` with adapters. Activations come as they are, never rounded: adapters are narrow, and multiply them
    so."""

    def __init__(
        self,
        weight: LinearWeight,
        quantization: Quantization,
        tensors: Tensors,
        bias: torch.Tensor | None,
        layers: AdaptedLayers,
        dtype: torch.dtype,
        *,
        batch_invariant: bool = True,
    ) -> None:
        super().__init__(weight.shape, quantization, tensors, bias, batch_invariant=batch_invariant)
        self.takes_rounded_rows = None
        self._layers = layers
        operations = operations_of(self.device.type)
        self._adapters = operations.low_rank(layers.space.shape(weight), dtype, self.device)

    def prepare(self, factors: Sequence[Factors | None]) -> Install:
        """Make an adapter ready; see LowRank."""
        return self._adapters.prepare(factors)

    @override
    def __call__(self, x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "activations with adapters are not rounded"
        assert self._layers.lines is not None, "a forward has begun"
        return self._adapters.add_to(super().__call__, x, self._layers.lines)
