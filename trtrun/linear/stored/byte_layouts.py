"""Layouts of one byte a weight, E4M3 or whole numbers, and of E2M1, two numbers a byte; and `quant_method: fp8`.

E4M3 has scales of tensors, output features or blocks of 128 by 128, as DeepSeek, Qwen and AutoFP8 write it. E2M1 has a
scale for each group of a row's numbers: NVFP4 with groups of 16, whose scales are E4M3 and share one of the whole
matrix, and MXFP4 with groups of 32, whose scales are powers of two.

Sources: compressed-tensors' compressors, transformers' finegrained_fp8, vLLM's fp8, ModelOpt's export, and OCP
Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import FLOATS, STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.quantization.quantizations import BLOCK
from trtrun.linear.stored.layout import Codes, StoredLinear, cut_groups, cut_words, stored_as
from trtrun.linear.stored.settings import Activations, ModuleNames, everywhere, read_names, refuse

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import Fp4Weight, Fp8Weight, Int8Weight


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
        return self.activations == "group" if self.strategy == "block" else self.activations in ("token", "static")

    def codes(self, part: TensorSlice) -> Codes | None:
        """Name the product that takes the codes as they are; the one in blocks rounds activations in groups."""
        if self.strategy != "block":
            return "fp8"
        return "fp8_block" if self.block == (BLOCK, BLOCK) and self.activations == "group" else None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        codes = TensorSlice(part.name, part.shape, part.ranges, ("float8_e4m3fn",))
        return {"weight": codes, "scale": _scales(part, self.strategy, self.scale, self.block)}

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Fp8Weight:
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
        return None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        codes = TensorSlice(part.name, part.shape, part.ranges, ("int8",))
        return {"weight": codes, "scale": _scales(part, self.strategy, "weight_scale")}

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Int8Weight:
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


_MANTISSA_BITS = 23
"""Mantissa bits of float32, whose exponent is stored plus 127, too: powers of two are shifted there. The least one is
subnormal."""


@dataclass(frozen=True)
class Fp4Layout:
    """Codes uint8 [out, in / 2], the even number in the lower bits; weight_scale [out, groups]; and, for groups of 16,
    a scale of the whole matrix [1].

    Attributes:
        name: see Layout.
        codes_end: end of the name of the codes.
        group_size: 16, with scales in E4M3, or 32, with exponents of two plus 127.
        whole: end of the name of the scale of the whole matrix; None without.
        divides: whether scales are divided by that of the whole matrix; else they are multiplied by it.
    """

    name: str
    codes_end: str
    group_size: int
    whole: str | None
    divides: bool = False

    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        columns = part.ranges[1]
        is_cut = columns.start % self.group_size or columns.stop % self.group_size
        return None if is_cut else "mxfp4" if self.whole is None else "nvfp4"

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        (features, inputs), (rows, _) = part.shape, part.ranges
        pairs, groups = cut_words(part, 1, 2), cut_groups(part, 1, self.group_size)
        kind = "uint8" if self.whole is None else "float8_e4m3fn"
        found = {
            "codes": TensorSlice(stored_as(part, self.codes_end), (features, inputs // 2), (rows, pairs), ("uint8",)),
            "scale": TensorSlice(
                stored_as(part, "weight_scale"), (features, -(-inputs // self.group_size)), (rows, groups), (kind,)
            ),
        }
        if self.whole is not None:
            found["whole"] = TensorSlice(stored_as(part, self.whole), (1,), (range(1),), FLOATS, ones_vary=True)
        return found

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Fp4Weight:
        from trtrun.linear.stored.forms import Fp4Weight

        scale = tensors["scale"]
        if self.whole is None:
            return Fp4Weight(tensors["codes"], power_of_two(scale), self.group_size, scale)
        whole = tensors["whole"].float().reshape(())
        wide = scale.float() / whole if self.divides else scale.float() * whole
        return Fp4Weight(tensors["codes"], wide, self.group_size, scale, 1 / whole if self.divides else whole)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float32 of exponents plus 127, uint8 (E8M0); infinite for 255, which stands for no number."""
    import torch

    bits = torch.where(exponents > 0, exponents.int() << _MANTISSA_BITS, 1 << (_MANTISSA_BITS - 1))
    return bits.int().view(torch.float32)


@STORED_QUANTIZATIONS.register("fp8")
def parse_fp8(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    refuse(values, "fmt", "e4m3", method="fp8", default="e4m3")
    refuse(values, "activation_scheme", "dynamic", "static", method="fp8", default="dynamic")
    plain = ModuleNames(read_names(values, "modules_to_not_convert", "ignored_layers"))
    block = values.get("weight_block_size")
    is_static = values.get("activation_scheme") == "static"
    # As transformers calls them, which writes the key without blocks, too. They are multiplied by all the same.
    scale = "weight_scale_inv" if "weight_block_size" in values else "weight_scale"
    if block is None:
        layout = Fp8Layout("fp8", "static" if is_static else "token", "tensor", scale=scale)
    else:
        layout = Fp8Layout("fp8", "static" if is_static else "group", "block", read_block(block), scale)
    return everywhere(StoredLinear(layout), plain)


def read_block(value: object) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        CheckpointError: it is no pair of sizes.
    """
    if isinstance(value, str):  # as older files have it: "128x128"
        value = [int(size) if size.isdecimal() else size for size in value.split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ):
        raise CheckpointError(
            f"a block of quantized weights must be two sizes such as [128, 128], not {shorten(value)}"
        )
    return value[0], value[1]
