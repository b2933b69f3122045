"""The code of fp8_matmul.py, as LLVM IR: the product with weights in E4M3, and rounding activations to E4M3.

It knows how E4M3 becomes bfloat16, and where a row's own scale lies; the rest is the product with bytes
(byte_matmul_code.py). It does not know tensors, nor where scales come from. How numbers are rounded is told in
trtrun.kernels.torch.fp8, which this follows bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtrun.kernels.cpu.byte_matmul_code import ByteMatmulCode
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.matmul_code import Prefetch

if TYPE_CHECKING:
    from llvmlite import ir
import ctypes
from typing import TYPE_CHECKING, ClassVar

from trtrun.kernels.cpu.emitter import Emitter, count
from trtrun.kernels.cpu.machine import NUM_THREADS, THREAD_NUMBER
from trtrun.kernels.torch.fp8 import EXPONENT, LARGEST, LEAST_EXPONENT, SMALLEST_SCALE, TO_STEP

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


ROUND_ROWS = "round_rows"


class RoundingArguments(ctypes.Structure):
    """What the kernel gets: rows of `size` bfloat16, a multiple of 16, and where they go, as bfloat16 with the row's
    scale behind them. Strides are in bytes."""

    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
    ]


def rounding_module() -> ir.Module:
    """A module whose function ROUND_ROWS takes RoundingArguments and shares rows out over the threads that enter it."""
    return _RoundingCode(ROUND_ROWS).module


class _RoundingCode(Emitter):
    """Emits the kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        number, integer = self.floats.element, self.integer
        self._size_of = self.declare("llvm.fabs.v16f32", self.floats, self.floats)
        self._largest = self.declare("llvm.vector.reduce.fmax.v16f32", number, self.floats)
        thread_number, num_threads = self.declare(THREAD_NUMBER, self.small), self.declare(NUM_THREADS, self.small)
        builder, (pointer,) = self.define(ROUND_ROWS, self.pointer)
        field = self.read(builder, pointer, RoundingArguments)
        peaks = self.room(builder)
        thread = builder.zext(builder.call(thread_number, []), integer)
        threads = builder.zext(builder.call(num_threads, []), integer)
        start = builder.sdiv(builder.mul(thread, field["rows"]), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), field["rows"]), threads)
        with count(builder, start, stop, 1) as row:
            x = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
            output = self.at(builder, field["output"], builder.mul(row, field["output_stride"]))
            scale = self._emit_scale(builder, x, field["size"], peaks)
            builder.store(scale, self.at(builder, output, builder.mul(field["size"], integer(2))), align=2)
            factor = self.spread(builder, builder.fdiv(number(1.0), scale))
            with count(builder, integer(0), field["size"], LANES) as at:
                offset = builder.mul(at, integer(2))
                value = builder.fmul(self.load_halves(builder, x, offset), factor)
                rounded = self.round(builder, self._emit_rounded(builder, value))
                builder.store(rounded, self.at(builder, output, offset), align=2)
        builder.ret_void()

    def _emit_scale(self, builder: ir.IRBuilder, x: ir.Value, size: ir.Value, peaks: ir.Value) -> ir.Value:
        """The scale of the row at `x`. NaN is passed over: its own code is NaN, whatever the scale."""
        builder.store(self.zeros(), peaks)
        with count(builder, self.integer(0), size, LANES) as at:
            value = builder.call(self._size_of, [self.load_halves(builder, x, builder.mul(at, self.integer(2)))])
            peak = builder.load(peaks, typ=self.floats)
            builder.store(builder.select(builder.fcmp_ordered(">", value, peak), value, peak), peaks)
        number = self.floats.element
        scale = builder.fdiv(builder.call(self._largest, [builder.load(peaks, typ=self.floats)]), number(LARGEST))
        least = number(SMALLEST_SCALE)
        return builder.select(builder.fcmp_ordered(">", scale, least), scale, least)

    def _emit_rounded(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """Sixteen float32 → the nearest numbers of E4M3."""
        exponent = builder.and_(builder.bitcast(value, self.lanes), self.numbers([EXPONENT] * LANES))
        least = self.numbers([LEAST_EXPONENT] * LANES)
        exponent = builder.select(builder.icmp_signed(">", exponent, least), exponent, least)
        magic = builder.bitcast(builder.add(exponent, self.numbers([TO_STEP] * LANES)), self.floats)
        return builder.fsub(builder.fadd(value, magic), magic)
