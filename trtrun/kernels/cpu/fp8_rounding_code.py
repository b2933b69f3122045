"""The code of rounding activations to E4M3 in fp8_matmul.py, as LLVM IR.

It knows instructions. It does not know tensors. How numbers are rounded is told in trtrun.kernels.torch.fp8, which this
follows bit for bit.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from trtrun.kernels.cpu.emitter import LANES, Emitter, count
from trtrun.kernels.cpu.machine import NUM_THREADS, THREAD_NUMBER
from trtrun.kernels.torch.fp8 import EXPONENT, LARGEST, LEAST_EXPONENT, SMALLEST_SCALE, TO_STEP

if TYPE_CHECKING:
    from llvmlite import ir

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
        peaks = builder.alloca(self.floats)
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
