"""Layouts of 4 bits with an exponent (E2M1), two numbers a byte, and a scale for each group of a row's numbers: NVFP4
with groups of 16, whose scales are E4M3 and share one of the whole matrix, and MXFP4 with groups of 32, whose scales
are powers of two.

Sources: compressed-tensors' nvfp4 and mxfp4 compressors, ModelOpt's export, and OCP Microscaling Formats 1.0. It knows
names, shapes and bytes. It does not know configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import FLOATS, TensorSlice
from trtrun.linear.stored.layout import Codes, cut_groups, cut_words, stored_as

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import Fp4Weight

_MANTISSA_BITS = 23
"""Of float32, whose exponent is stored plus 127, too: powers of two are shifted there. The least one is subnormal."""


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
        """See Layout."""
        return None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
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
        """See Layout."""
        import torch

        from trtrun.linear.stored.forms import Fp4Weight

        scale = tensors["scale"]
        if self.whole is None:
            bits = torch.where(scale > 0, scale.int() << _MANTISSA_BITS, 1 << (_MANTISSA_BITS - 1))
            return Fp4Weight(tensors["codes"], bits.int().view(torch.float32), self.group_size)
        whole = tensors["whole"].float().reshape(())
        scale = scale.float() / whole if self.divides else scale.float() * whole
        return Fp4Weight(tensors["codes"], scale, self.group_size)
