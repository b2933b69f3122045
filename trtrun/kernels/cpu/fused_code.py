"""The code of the small operations between products (fused.py), as LLVM IR."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from trtrun.kernels.arguments import GELU_CUBIC, GELU_LINEAR, SWIGLU_SLOPE, Activation
from trtrun.kernels.cpu.emitter import LANES, Emitter, count

if TYPE_CHECKING:
    from llvmlite import ir

NORMALISE, SQUARE_SUMS, ROTATE, XIELU = "normalise", "square_sums", "rotate", "xielu"
ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu_and_multiply",
    "gelu_tanh": "gelu_tanh_and_multiply",
    "clamped_swiglu": "clamped_swiglu",
    "sigmoid": "sigmoid_and_multiply",
}
"""Kernels of gates, by what these go through."""


class Arguments(ctypes.Structure):
    """What each of the kernels gets, for `rows` rows of `parts` vectors of `size` numbers. Strides are in bytes.

    normalise: x (overwritten where delta is not null), delta, weight [parts, size], epsilon. square_sums: x, with a
    float32 a row as output. ACTIVATIONS: x with `size` gates and as many factors a row, and the limit of
    clamped_swiglu. xielu: x, and four float32 as weight. rotate: x, and for each row cosine (as weight) and sine
    [size]. delta and output have no gaps between rows.
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
        ("limit", ctypes.c_float),
    ]


def fused_module(multiplies_bfloat16: bool, is_float32: bool) -> ir.Module:
    """A module with all kernels, each of which shares its rows out over the threads that enter it; vectors of
    bfloat16, and the halves that are rotated, have a multiple of 16 numbers."""
    return _FusedCode("fused", multiplies_bfloat16, is_float32).module


class _FusedCode(Emitter):
    """Emits the kernels."""

    def __init__(self, name: str, multiplies_bfloat16: bool, is_float32: bool) -> None:
        super().__init__(name, multiplies_bfloat16)
        self._is_float32, self._item_bytes = is_float32, 4 if is_float32 else 2
        number = self.floats.element
        self._sum = self.declare("llvm.vector.reduce.fadd.v16f32", number, number, self.floats)
        self._root = self.declare("llvm.sqrt.f32", number, number)
        self._emit(NORMALISE, self._emit_normalise)
        self._emit(SQUARE_SUMS, self._emit_square_sums)
        self._emit(ACTIVATIONS["silu"], partial(self._emit_gates, lambda builder, gate: gate))
        self._emit(ACTIVATIONS["gelu_tanh"], partial(self._emit_gates, self._emit_gelu_argument))
        self._emit(ACTIVATIONS["clamped_swiglu"], self._emit_clamped_gates)
        self._emit(ACTIVATIONS["sigmoid"], self._emit_sigmoids)
        self._emit(ROTATE, self._emit_rotate)
        self._emit(XIELU, self._emit_xielu)

    def _emit(self, name: str, body: Callable[[ir.IRBuilder, dict[str, ir.Value], ir.Value], None]) -> None:
        """A function that calls `body` for each of this thread's rows."""
        builder, (pointer,) = self.define(name, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread, threads = self.emit_thread(builder)
        start = builder.sdiv(builder.mul(thread, field["rows"]), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, self.integer(1)), field["rows"]), threads)
        with count(builder, start, stop, 1) as row:
            body(builder, field, row)
        builder.ret_void()

    def _bytes(self, builder: ir.IRBuilder, *factors: ir.Value) -> ir.Value:
        """The product of the factors, in numbers, as bytes."""
        result = self.integer(self._item_bytes)
        for factor in factors:
            result = builder.mul(result, factor)
        return result

    def _each(self, builder: ir.IRBuilder, size: ir.Value, body: Callable[[ir.Value, ir.Value | None], None]) -> None:
        """Emit `body` for every sixteen of `size` numbers: it gets the first, and for the last of a vector of float32 a
        mask of those that there are."""
        if not self._is_float32:
            with count(builder, self.integer(0), size, LANES) as at:
                body(at, None)
            return
        rest = builder.srem(size, self.integer(LANES))
        whole = builder.sub(size, rest)
        with count(builder, self.integer(0), whole, LANES) as at:
            body(at, None)
        with builder.if_then(builder.icmp_signed(">", rest, self.integer(0))):
            limit = self.spread(builder, builder.trunc(rest, self.small))
            body(whole, builder.icmp_signed("<", self.numbers(range(LANES)), limit))

    def _load(self, builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Sixteen numbers at `base` plus `offset` bytes, as float32: zeros where the mask has none."""
        if mask is not None:
            return self.load_some(builder, self.at(builder, base, offset), mask)
        if self._is_float32:
            return builder.load(self.at(builder, base, offset), typ=self.floats, align=4)
        return self.load_halves(builder, base, offset)

    def _rounded(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """Sixteen float32, rounded to the dtype, as float32."""
        return value if self._is_float32 else self.extend(builder, self.round(builder, value))

    def _write(
        self, builder: ir.IRBuilder, value: ir.Value, base: ir.Value, offset: ir.Value, mask: ir.Value | None = None
    ) -> None:
        """Store sixteen float32 in the dtype."""
        stored, place = value if self._is_float32 else self.round(builder, value), self.at(builder, base, offset)
        if mask is not None:
            self.store_some(builder, stored, place, mask)
        else:
            builder.store(stored, place, align=self._item_bytes)

    def _emit_normalise(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        integer, size, number = self.integer, field["size"], self.floats.element
        squares = self.room(builder)
        with count(builder, integer(0), field["parts"], 1) as part:
            inside = self._bytes(builder, part, size)
            x = self.at(builder, self.at(builder, field["x"], builder.mul(row, field["x_stride"])), inside)
            dense = builder.add(self._bytes(builder, row, field["parts"], size), inside)
            weight, output = (self.at(builder, field[name], at) for name, at in (("weight", inside), ("output", dense)))

            def add_delta(at: ir.Value, mask: ir.Value | None) -> None:
                offset = self._bytes(builder, at)
                delta = self._load(builder, field["delta"], builder.add(dense, offset), mask)
                self._write(builder, builder.fadd(self._load(builder, x, offset, mask), delta), x, offset, mask)

            has_delta = builder.icmp_unsigned("!=", builder.ptrtoint(field["delta"], integer), integer(0))
            with builder.if_then(has_delta):
                self._each(builder, size, add_delta)
            total = self._sum_squares(builder, squares, x, size)
            mean = builder.fdiv(total, builder.sitofp(size, number))
            root = builder.call(self._root, [builder.fadd(mean, field["epsilon"])])
            factor = self.spread(builder, builder.fdiv(number(1.0), root))

            def scale(at: ir.Value, mask: ir.Value | None) -> None:
                offset = self._bytes(builder, at)
                normal = self._rounded(builder, builder.fmul(self._load(builder, x, offset, mask), factor))
                scaled = builder.fmul(normal, self._load(builder, weight, offset, mask))
                self._write(builder, scaled, output, offset, mask)

            self._each(builder, size, scale)

    def _sum_squares(self, builder: ir.IRBuilder, room: ir.Value, x: ir.Value, size: ir.Value) -> ir.Value:
        """The sum of the squares of `size` numbers at `x`, a float32; `room` for sixteen is overwritten."""

        def add_square(at: ir.Value, mask: ir.Value | None) -> None:
            value = self._load(builder, x, self._bytes(builder, at), mask)
            total = builder.load(room, typ=self.floats)
            builder.store(builder.fadd(total, builder.fmul(value, value)), room)

        builder.store(self.zeros(), room)
        self._each(builder, size, add_square)
        return builder.call(self._sum, [self.floats.element(0.0), builder.load(room, typ=self.floats)])

    def _emit_square_sums(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        x = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
        total = self._sum_squares(builder, self.room(builder), x, field["size"])
        builder.store(total, self.at(builder, field["output"], builder.mul(row, self.integer(4))), align=4)

    def _emit_gelu_argument(self, builder: ir.IRBuilder, gate: ir.Value) -> ir.Value:
        """What a gate is multiplied by the sigmoid of, in GELU's approximation by tanh."""
        cubic = builder.fmul(self.spread_constant(GELU_CUBIC), builder.fmul(gate, builder.fmul(gate, gate)))
        return builder.fmul(self.spread_constant(GELU_LINEAR), builder.fadd(gate, cubic))

    def _emit_gates(
        self,
        argument: Callable[[ir.IRBuilder, ir.Value], ir.Value],
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        row: ir.Value,
    ) -> None:
        """Gates times the sigmoid of their `argument`, times factors."""

        def activate(gate: ir.Value, factor: ir.Value) -> ir.Value:
            share = self._sigmoid(builder, argument(builder, gate))
            return builder.fmul(self._rounded(builder, builder.fmul(gate, share)), factor)

        self._emit_activated(builder, field, row, activate)

    def _emit_clamped_gates(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        """Gates and factors within the limit: gates times their sigmoid, times factors plus one."""
        limit = self.spread(builder, field["limit"])
        least = builder.fneg(limit)

        def activate(gate: ir.Value, factor: ir.Value) -> ir.Value:
            gate = builder.select(builder.fcmp_ordered(">", gate, limit), limit, gate)
            factor = builder.select(builder.fcmp_ordered(">", factor, limit), limit, factor)
            factor = builder.select(builder.fcmp_ordered("<", factor, least), least, factor)
            share = self._sigmoid(builder, builder.fmul(self.spread_constant(SWIGLU_SLOPE), gate))
            return builder.fmul(builder.fmul(gate, share), builder.fadd(factor, self.spread_constant(1.0)))

        self._emit_activated(builder, field, row, activate)

    def _emit_sigmoids(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        """Sigmoids of gates, times factors."""

        def activate(gate: ir.Value, factor: ir.Value) -> ir.Value:
            return builder.fmul(self._rounded(builder, self._sigmoid(builder, gate)), factor)

        self._emit_activated(builder, field, row, activate)

    def _sigmoid(self, builder: ir.IRBuilder, inner: ir.Value) -> ir.Value:
        one, is_negative = self.spread_constant(1.0), builder.fcmp_ordered("<", inner, self.zeros())
        power = self.exp(builder, builder.select(is_negative, inner, builder.fneg(inner)))  # of -|inner|
        return builder.fdiv(builder.select(is_negative, power, one), builder.fadd(power, one))

    def _emit_activated(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        row: ir.Value,
        activate: Callable[[ir.Value, ir.Value], ir.Value],
    ) -> None:
        """What `activate` makes of sixteen gates and their factors, for a row of them."""
        size = field["size"]
        gates = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
        factors = self.at(builder, gates, self._bytes(builder, size))
        output = self.at(builder, field["output"], self._bytes(builder, row, size))

        def multiply(at: ir.Value, mask: ir.Value | None) -> None:
            offset = self._bytes(builder, at)
            gate, factor = (self._load(builder, base, offset, mask) for base in (gates, factors))
            self._write(builder, activate(gate, factor), output, offset, mask)

        self._each(builder, size, multiply)

    def _emit_xielu(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value) -> None:
        """As `TorchOperations.xielu` has it."""
        size = field["size"]
        x = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
        output = self.at(builder, field["output"], self._bytes(builder, row, size))
        numbers = [self.spread_number(builder, self.at(builder, field["weight"], 4 * index)) for index in range(4)]
        positive, negative, slope, least = numbers

        def bend(at: ir.Value, mask: ir.Value | None) -> None:
            offset = self._bytes(builder, at)
            value = self._load(builder, x, offset, mask)
            above = builder.fmul(builder.fmul(positive, value), value)
            lower = builder.select(builder.fcmp_ordered("<", value, least), value, least)
            below = builder.fmul(builder.fsub(self.exp_less_one(builder, lower), value), negative)
            bent = builder.select(builder.fcmp_ordered(">", value, self.zeros()), above, below)
            self._write(builder, builder.fadd(bent, builder.fmul(slope, value)), output, offset, mask)

        self._each(builder, size, bend)

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
                    across = self._load(builder, x, self._bytes(builder, builder.add(other, at)))
                    turned = self._rounded(builder, builder.fmul(across, self._load(builder, sine, offset)))
                    kept = builder.fmul(self._load(builder, x, offset), self._load(builder, cosine, offset))
                    self._write(builder, builder.fadd(self._rounded(builder, kept), turned), output, offset)
