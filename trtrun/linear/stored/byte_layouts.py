"""Layouts of one byte a weight: E4M3 with scales of tensors, output features or blocks, and whole numbers.

Sources: compressed-tensors' float-quantized and int-quantized compressors, transformers' finegrained_fp8, vLLM's fp8
and ModelOpt's export. It knows names, shapes and bytes. It does not know configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import FLOATS, TensorSlice
from trtrun.linear.quantization.fp8_block import BLOCK
from trtrun.linear.stored.layout import Codes, cut_groups, stored_as
from trtrun.linear.stored.settings import Activations

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import Fp8Weight, Int8Weight

_SCALES = (*FLOATS, "float8_e8m0fnu")


@dataclass(frozen=True)
class Fp8Layout:
    """weight [out, in] E4M3 and a tensor of scales that it is multiplied by.

    Attributes:
        name: see Layout.
        activations: see `Activations`.
        strategy: what has a scale of its own: "tensor" ([1]), "channel" ([out] or [out, 1]) or "block" ([ceil(out /
            rows), ceil(in / columns)]).
        block: rows and columns of a block.
        scale: end of the name of the scales.
    """

    name: str
    activations: Activations
    strategy: str
    block: tuple[int, int] = (128, 128)
    scale: str = "weight_scale"

    @property
    def rounds_activations(self) -> bool:
        """See Layout."""
        return self.activations == "group" if self.strategy == "block" else self.activations in ("token", "static")

    def codes(self, part: TensorSlice) -> Codes | None:
        """See Layout. The one product in blocks rounds activations in groups."""
        if self.strategy != "block":
            return "fp8"
        return "fp8_block" if self.block == (BLOCK, BLOCK) and self.activations == "group" else None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
        codes = TensorSlice(part.name, part.shape, part.ranges, ("float8_e4m3fn",))
        return {"weight": codes, "scale": _scales(part, self.strategy, self.scale, self.block)}

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Fp8Weight:
        """See Layout."""
        from trtrun.linear.stored.forms import Fp8Weight

        scale = tensors["scale"].float()
        scale = scale.reshape(()) if self.strategy == "tensor" else scale
        return Fp8Weight(tensors["weight"], scale, self.activations, self.block)


@dataclass(frozen=True)
class Int8Layout:
    """weight [out, in] int8 and weight_scale, of the tensor [1] or of output features [out, 1].

    Attributes:
        name: see Layout.
        activations: see `Activations`.
        strategy: "tensor" or "channel".
    """

    name: str
    activations: Activations
    strategy: str

    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        """See Layout."""
        return None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
        codes = TensorSlice(part.name, part.shape, part.ranges, ("int8",))
        return {"weight": codes, "scale": _scales(part, self.strategy, "weight_scale")}

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Int8Weight:
        """See Layout."""
        from trtrun.linear.stored.forms import Int8Weight

        codes = tensors["weight"]
        return Int8Weight(codes, tensors["scale"].float().expand(codes.shape[0]), self.activations)


def _scales(part: TensorSlice, strategy: str, end: str, block: tuple[int, int] = (128, 128)) -> TensorSlice:
    name = stored_as(part, end)
    if strategy == "block":
        shape = tuple(-(-size // of_block) for size, of_block in zip(part.shape, block, strict=True))
        ranges = tuple(cut_groups(part, axis, block[axis]) for axis in (0, 1))
        return TensorSlice(name, shape, ranges, _SCALES)
    if strategy == "tensor":
        return TensorSlice(name, (1,), (range(1),), _SCALES, ones_vary=True)
    return TensorSlice(name, part.shape[:1], part.ranges[:1], _SCALES, ones_vary=True)
