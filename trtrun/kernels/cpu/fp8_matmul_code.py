"""The code of the product with weights in E4M3 in fp8_matmul.py, as LLVM IR.

It knows how E4M3 becomes bfloat16, and where a row's own scale lies; the rest is the product with bytes
(byte_matmul_code.py). It does not know tensors, nor where scales come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtrun.kernels.cpu.byte_matmul_code import ByteMatmulCode
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.matmul_code import Prefetch

if TYPE_CHECKING:
    from llvmlite import ir

ROW_SCALE_BYTES = 4
"""A float32 behind a row's inputs: what its results are multiplied by, where rows are scaled."""

_SHIFT, _SIGN_AND_MAGNITUDE = 4, -0x7810
"""E4M3 moved up by 4 bits lies as bfloat16 does; the mask (0x87F0) cuts off what sign extension brings."""
_EXPONENT, _BIAS = 0x0780, (127 - 7) << 7
_SIGN = -0x8000
# 1/512 to 7/512: what E4M3 has below 2^-6, as bits of bfloat16.
_SMALL = (0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60)


def fp8_matmul_module(prefetch: Prefetch, *, scales_rows: bool) -> ir.Module:
    """A module whose function KERNEL takes the Arguments of matmul_code.py, with `bias` as FEATURE_BYTES tells.

    Args:
        prefetch: how weights are asked for.
        scales_rows: whether a float32 lies behind each row's inputs, which multiplies the row's sums.
    """
    return _Fp8MatmulCode(prefetch, scales_rows).module


class _Fp8MatmulCode(ByteMatmulCode):
    """Every number of E4M3 is a bfloat16; NaN is not expected among weights."""

    def __init__(self, prefetch: Prefetch, scales_rows: bool) -> None:
        self._scales_rows = scales_rows
        super().__init__(prefetch)

    def prepare(self) -> None:
        """See ByteMatmulCode."""
        self._shorts = self._ir.VectorType(self._ir.IntType(16), 2 * LANES)
        self._look_up = self.declare("llvm.x86.avx512.permvar.hi.512", *[self._shorts] * 3)

    def widen(self, builder: ir.IRBuilder, line: ir.Value, offset: int) -> ir.Value:
        """See ByteMatmulCode."""
        bytes_there = self._ir.VectorType(self.byte, 2 * LANES)
        codes = builder.load(self.at(builder, line, offset), typ=bytes_there, align=2 * LANES)
        codes = builder.sext(codes, self._shorts)
        moved = builder.and_(builder.shl(codes, self._same(_SHIFT)), self._same(_SIGN_AND_MAGNITUDE))
        table = self._ir.Constant(self._shorts, list(_SMALL * 4))
        # It looks at the lowest five bits, of which small numbers have the upper two clear.
        small = builder.call(self._look_up, [table, codes])
        small = builder.or_(small, builder.and_(moved, self._same(_SIGN)))
        is_small = builder.icmp_signed("==", builder.and_(moved, self._same(_EXPONENT)), self._same(0))
        return builder.bitcast(builder.select(is_small, small, builder.add(moved, self._same(_BIAS))), self.pairs)

    def scale_row(self, builder: ir.IRBuilder, scaled: ir.Value, end: ir.Value) -> ir.Value:
        """See ByteMatmulCode."""
        if not self._scales_rows:
            return scaled
        factor = builder.load(end, typ=self.floats.element, align=2)
        return builder.fmul(scaled, self.spread(builder, factor))

    def _same(self, value: int) -> ir.Value:
        return self._ir.Constant(self._shorts, [value] * (2 * LANES))
