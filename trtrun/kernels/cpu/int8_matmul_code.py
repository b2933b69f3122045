"""The code of the product with weights of 8 bits in int8_matmul.py, as LLVM IR.

It knows how integers become bfloat16; the rest is the product with bytes (byte_matmul_code.py). It does not know
tensors, nor where scales come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtrun.kernels.cpu.byte_matmul_code import ByteMatmulCode
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.matmul_code import Prefetch

if TYPE_CHECKING:
    from llvmlite import ir


def int8_matmul_module(prefetch: Prefetch) -> ir.Module:
    """A module whose function KERNEL takes the Arguments of matmul_code.py, with `bias` as FEATURE_BYTES tells."""
    return _Int8MatmulCode(prefetch).module


class _Int8MatmulCode(ByteMatmulCode):
    """Every integer of 8 bits is a bfloat16."""

    def prepare(self) -> None:
        """See ByteMatmulCode."""
        self._join = self.declare("llvm.x86.avx512bf16.cvtne2ps2bf16.512", self.pairs, self.floats, self.floats)

    def widen(self, builder: ir.IRBuilder, line: ir.Value, offset: int) -> ir.Value:
        """See ByteMatmulCode."""
        integers = self._ir.VectorType(self.byte, LANES)
        low, high = (
            builder.sitofp(
                builder.sext(builder.load(self.at(builder, line, place), typ=integers, align=LANES), self.lanes),
                self.floats,
            )
            for place in (offset, offset + LANES)
        )
        return builder.call(self._join, [high, low])
