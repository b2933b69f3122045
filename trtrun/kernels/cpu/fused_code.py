"""The code of the small operations in fused.py, as LLVM IR.

It knows instructions. It does not know tensors. What is rounded when is told in fused.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from trtrun.kernels.cpu.emitter import LANES, Emitter, count
from trtrun.kernels.cpu.machine import NUM_THREADS, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

NORMALISE, SILU_AND_MULTIPLY, ROTATE = "normalise", "silu_and_multiply", "rotate"
_REGISTER_HALVES_BYTES = 2 * LANES


class Arguments(ctypes.Structure):
    """What each of the kernels gets, for `rows` rows of `parts` vectors of `size` numbers. Strides are in bytes.

    normalise: x (overwritten where delta is not null), delta, weight [parts, size], epsilon. silu_and_multiply: x with
    `size` gates and as many factors a row. rotate: x, and for each row cosine (as weight) and sine [size]. delta and
    output have no gaps between rows.
    """

    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


def fused_module(multiplies_bfloat16: bool) -> ir.Module:
    """A module with the three kernels, each of which shares its rows out over the threads that enter it."""
    return _FusedCode("fused", multiplies_bfloat16).module


class _FusedCode(Emitter):
    """Emits the kernels."""

    def __init__(self, name: str, multiplies_bfloat16: bool) -> None:
        super().__init__(name, multiplies_bfloat16)
        number = self.floats.element
        self._sum = self.declare("llvm.vector.reduce.fadd.v16f32", number, number, self.floats)
        self._root = self.declare("llvm.sqrt.f32", number, number)
        self._thread_number = self.declare(THREAD_NUMBER, self.small)
        self._num_threads = self.declare(NUM_THREADS, self.small)
        self._emit(NORMALISE, self._emit_normalise)
        self._emit(SILU_AND_MULTIPLY, self._emit_silu_and_multiply)
        self._emit(ROTATE, self._emit_rotate)

    def _emit(self, name: str, body: Callable[[ir.IRBuilder, dict[str, ir.Value], ir.Value], None]) -> None:
        """A function that calls `body` for each of this thread's rows."""
        builder, (pointer,) = self.define(name, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread = builder.zext(builder.call(self._thread_number, []), self.integer)
        threads = builder.zext(builder.call(self._num_threads, []), self.integer)
        start = builder.sdiv(builder.mul(thread, field["rows"]), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, self.integer(1)), field["rows"]), threads)
        with count(builder, start, stop, 1) as row:
            body(builder, field, row)
        builder.ret_void()

    def _bytes(self, builder: ir.IRBuilder, *factors: ir.Value) -> ir.Value:
        """The product of the factors, in bfloat16 numbers, as bytes."""
        result = self.integer(2)
        for factor in factors:
            result = builder.mul(result, factor)
        return result

    def _write(self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: ir.Value) -> ir.Value:
        """Store sixteen float32 as bfloat16; returns what was stored, as float32."""
        halves = self.round(builder, value)
        builder.store(halves, self.at(builder, base, offset), align=2)
        return self.extend(builder, halves)

    def _emit_normalise(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        integer, size = self.integer, field["size"]
        with count(builder, integer(0), field["parts"], 1) as part:
            inside = self._bytes(builder, part, size)
            x = self.at(builder, self.at(builder, field["x"], builder.mul(row, field["x_stride"])), inside)
            dense = builder.add(self._bytes(builder, row, field["parts"], size), inside)
            weight = self.at(builder, field["weight"], inside)
            squares = builder.alloca(self.floats)
            builder.store(self.zeros(), squares)
            has_delta = builder.icmp_unsigned("!=", builder.ptrtoint(field["delta"], integer), integer(0))
            with builder.if_then(has_delta), count(builder, integer(0), size, LANES) as at:
                offset = self._bytes(builder, at)
                delta = self.load_halves(builder, field["delta"], builder.add(dense, offset))
                self._write(builder, builder.fadd(self.load_halves(builder, x, offset), delta), x, offset)
            with count(builder, integer(0), size, LANES) as at:
                value = self.load_halves(builder, x, self._bytes(builder, at))
                total = builder.load(squares, typ=self.floats)
                builder.store(builder.fadd(total, builder.fmul(value, value)), squares)
            number = self.floats.element
            total = builder.call(self._sum, [number(0.0), builder.load(squares, typ=self.floats)])
            mean = builder.fdiv(total, builder.sitofp(size, number))
            root = builder.call(self._root, [builder.fadd(mean, field["epsilon"])])
            factor = self.spread(builder, builder.fdiv(number(1.0), root))
            output = self.at(builder, field["output"], dense)
            with count(builder, integer(0), size, LANES) as at:
                offset = self._bytes(builder, at)
                normal = self.round(builder, builder.fmul(self.load_halves(builder, x, offset), factor))
                scaled = builder.fmul(self.extend(builder, normal), self.load_halves(builder, weight, offset))
                self._write(builder, scaled, output, offset)

    def _emit_silu_and_multiply(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        size, one = field["size"], self.spread_constant(1.0)
        gates = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
        factors = self.at(builder, gates, self._bytes(builder, size))
        output = self.at(builder, field["output"], self._bytes(builder, row, size))
        with count(builder, self.integer(0), size, LANES) as at:
            offset = self._bytes(builder, at)
            gate = self.load_halves(builder, gates, offset)
            is_negative = builder.fcmp_ordered("<", gate, self.zeros())
            power = self.exp(builder, builder.select(is_negative, gate, builder.fneg(gate)))  # of -|gate|
            share = builder.fdiv(builder.select(is_negative, power, one), builder.fadd(power, one))
            activated = self.extend(builder, self.round(builder, builder.fmul(gate, share)))
            self._write(builder, builder.fmul(activated, self.load_halves(builder, factors, offset)), output, offset)

    def _emit_rotate(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        integer, size = self.integer, field["size"]
        angle = self._bytes(builder, row, size)
        cosine, sine = self.at(builder, field["weight"], angle), self.at(builder, field["sine"], angle)
        half = builder.sdiv(size, integer(2))
        source = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
        target = self.at(builder, field["output"], self._bytes(builder, row, field["parts"], size))
        with count(builder, integer(0), field["parts"], 1) as part:
            inside = self._bytes(builder, part, size)
            x, output = self.at(builder, source, inside), self.at(builder, target, inside)
            for start, other in ((integer(0), half), (half, integer(0))):
                with count(builder, integer(0), half, LANES) as at:
                    offset = self._bytes(builder, builder.add(start, at))
                    across = self.load_halves(builder, x, self._bytes(builder, builder.add(other, at)))
                    turned = self._rounded(builder, across, self.load_halves(builder, sine, offset))
                    kept = self.load_halves(builder, x, offset)
                    kept = self._rounded(builder, kept, self.load_halves(builder, cosine, offset))
                    self._write(builder, builder.fadd(kept, turned), output, offset)

    def _rounded(self, builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
        """The product, rounded to bfloat16, as float32."""
        return self.extend(builder, self.round(builder, builder.fmul(left, right)))
