"""The code of products with weights of a byte each, as LLVM IR: integers of 8 bits, E4M3, and rounding activations to
it.

Bytes become bfloat16 on the way, once for all rows; the rest is the product of bfloat16 (matmul_code.py). Where
scales come from is the caller's business.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from trtrun.kernels.cpu.emitter import LANES, Emitter, count
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, NUM_THREADS, THREAD_NUMBER
from trtrun.kernels.cpu.matmul_code import (
    BLOCK,
    BLOCK_PAIR_BYTES,
    FORMS,
    KERNEL,
    LINE_BYTES,
    REGISTERS,
    STRETCH,
    MatmulCode,
    Prefetch,
    Source,
)
from trtrun.kernels.torch.fp8 import EXPONENT, LARGEST, LEAST_EXPONENT, SMALLEST_SCALE, TO_STEP

if TYPE_CHECKING:
    from llvmlite import ir

    from trtrun.kernels.cpu.matmul_code import Place


FEATURE_BYTES = 8
"""A scale and a bias, both float32, for each output feature: a block's scales lie before its biases."""
UNPACKED_BYTES = STRETCH * BLOCK_PAIR_BYTES
"""A stretch of a block as bfloat16: room that each thread needs for more rows than a tile takes."""

_PAIR_BYTES = BLOCK_PAIR_BYTES // 2


class ByteMatmulCode(MatmulCode):
    """Widens weights in registers for the rows of one tile; for more rows once, into a buffer that all tiles read."""

    feature_bytes = FEATURE_BYTES
    unpacked_bytes = UNPACKED_BYTES

    def __init__(self, prefetch: Prefetch) -> None:
        super().__init__(KERNEL, FORMS[MULTIPLIES_BFLOAT16])
        self.weight_pair_bytes = _PAIR_BYTES
        self.prepare()
        self._unpack = self._emit_unpack(prefetch)
        sources = [
            Source("streamed", _PAIR_BYTES, prefetch),
            Source("cached", _PAIR_BYTES, None),
            Source("unpacked", BLOCK_PAIR_BYTES, None),
        ]
        self.emit_kernel([self.emit_tiles(source) for source in sources])

    def prepare(self) -> None:
        """Declare what `widen` calls."""

    def widen(self, builder: ir.IRBuilder, line: ir.Value, offset: int) -> ir.Value:
        """32 bytes at `line` plus `offset` bytes, as bfloat16."""
        raise NotImplementedError

    def load_weights(self, builder: ir.IRBuilder, line: ir.Value, source: Source) -> list[ir.Value]:
        """The 64 pairs of weights at `line`."""
        if source.pair_bytes == BLOCK_PAIR_BYTES:
            return super().load_weights(builder, line, source)
        return [self.widen(builder, line, part * LINE_BYTES // 2) for part in range(REGISTERS)]

    def finish(self, builder: ir.IRBuilder, places: list[Place], bias: ir.Value, ends: list[ir.Value]) -> None:
        """Turn sums into results: times the feature's scale, plus its bias."""
        for place, row, part, _ in places:
            scale = builder.load(self.at(builder, bias, part * LINE_BYTES), typ=self.floats, align=4)
            added = self.at(builder, bias, BLOCK * 4 + part * LINE_BYTES)
            scaled = builder.fmul(builder.load(place, typ=self.floats), scale)
            scaled = self.scale_row(builder, scaled, ends[row])
            builder.store(builder.fadd(scaled, builder.load(added, typ=self.floats, align=4)), place)

    def scale_row(self, builder: ir.IRBuilder, scaled: ir.Value, end: ir.Value) -> ir.Value:
        """Sixteen sums of a row times what the row itself was divided by; `end` is the address behind its inputs."""
        return scaled

    def begin_stretch(
        self, builder: ir.IRBuilder, weight: ir.Value, pairs: ir.Value, room: ir.Value, alone: ir.Value
    ) -> ir.Value:
        """Widen the stretch into `room` where there are more rows than a tile takes."""
        with builder.if_then(builder.not_(alone)):
            builder.call(self._unpack, [weight, room, pairs])
        return builder.select(alone, weight, room)

    def choose_tiles(self, builder: ir.IRBuilder, row: ir.Value, alone: ir.Value, is_cached: ir.Value) -> ir.Value:
        """Choose one of the lists [from memory, from a cache, from the buffer]."""
        return builder.select(alone, is_cached, self.integer(2))

    def _emit_unpack(self, prefetch: Prefetch) -> ir.Function:
        """unpack(weight, room, pairs): `pairs` pairs of a block as bfloat16."""
        builder, (weight, room, pairs) = self.define("unpack", self.pointer, self.pointer, self.integer)
        with count(builder, self.integer(0), pairs, 1) as pair:
            line = self.at(builder, weight, builder.mul(pair, self.integer(_PAIR_BYTES)))
            target = self.at(builder, room, builder.mul(pair, self.integer(BLOCK_PAIR_BYTES)))
            for place in range(0, _PAIR_BYTES, LINE_BYTES):
                self.prefetch(builder, self.at(builder, line, place + prefetch.distance), prefetch.locality)
            for part in range(REGISTERS):
                wide = self.widen(builder, line, part * LINE_BYTES // 2)
                builder.store(wide, self.at(builder, target, part * LINE_BYTES), align=LINE_BYTES)
        builder.ret_void()
        return builder.function


def int8_matmul_module(prefetch: Prefetch) -> ir.Module:
    """A module whose function KERNEL takes the Arguments of matmul_code.py, with `bias` as FEATURE_BYTES tells."""
    return _Int8MatmulCode(prefetch).module


class _Int8MatmulCode(ByteMatmulCode):
    """Every integer of 8 bits is a bfloat16."""

    @override
    def prepare(self) -> None:
        self._join = self.declare("llvm.x86.avx512bf16.cvtne2ps2bf16.512", self.pairs, self.floats, self.floats)

    @override
    def widen(self, builder: ir.IRBuilder, line: ir.Value, offset: int) -> ir.Value:
        integers = self._ir.VectorType(self.byte, LANES)
        low, high = (
            builder.sitofp(
                builder.sext(builder.load(self.at(builder, line, place), typ=integers, align=LANES), self.lanes),
                self.floats,
            )
            for place in (offset, offset + LANES)
        )
        return builder.call(self._join, [high, low])


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

    @override
    def prepare(self) -> None:
        self._shorts = self._ir.VectorType(self._ir.IntType(16), 2 * LANES)
        self._look_up = self.declare("llvm.x86.avx512.permvar.hi.512", *[self._shorts] * 3)

    @override
    def widen(self, builder: ir.IRBuilder, line: ir.Value, offset: int) -> ir.Value:
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

    @override
    def scale_row(self, builder: ir.IRBuilder, scaled: ir.Value, end: ir.Value) -> ir.Value:
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
