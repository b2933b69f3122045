"""The code of the product in matmul.py, as LLVM IR.

It knows instructions, registers and caches. It does not know tensors. How the weight lies, and in which order the
products are added, is told in matmul.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trtrun.layers.native.emitter import LANES, PAIR_BYTES, REGISTER_BYTES, Emitter, count
from trtrun.layers.native.machine import NUM_THREADS, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

KERNEL = "matmul"
BLOCK = 64
"""Output features of a block: four registers of sixteen float32."""
TILE_ROWS = 6
"""Rows computed at a time: 24 of 32 registers are then accumulators, the rest hold weights and the broadcast pair."""
STRETCH = 1024
"""Pairs of input features that several tiles go through together: 256 KiB of a block, so that this stretch and the
next, which is on its way, fit a second-level cache of 1 MiB."""

_REGISTERS = BLOCK // LANES
_LINE_BYTES = REGISTER_BYTES
_BLOCK_PAIR_BYTES = BLOCK * PAIR_BYTES
_TO_SECOND_LEVEL = 2


class Prefetch(NamedTuple):
    """How the first tile asks for a weight that memory delivers: bytes ahead, and locality as in Emitter.prefetch."""

    distance: int
    locality: int


def prefetch_for(processor: str) -> Prefetch:
    """What is fastest on `processor` (a name as LLVM has it).

    On Zen 5 lines that are used once leave the first-level cache to x: 5 % at six rows over other prefetches, and 15 %
    over none; 2 to 8 KiB ahead are the same to 5 %. On a Xeon with AMX that was 2.5 times slower than asking for the
    second-level cache, as the first level waits for few lines at a time; there 4 to 32 KiB ahead are the same.
    """
    return Prefetch(6144, 0) if processor.startswith("znver") else Prefetch(8192, _TO_SECOND_LEVEL)


class Arguments(ctypes.Structure):
    """What the kernel gets.

    Strides are in bytes. scratch is [threads, rows, 64] float32, needed where rows > TILE_ROWS and pairs > STRETCH.
    is_cached is 1 for a weight that caches may hold from call to call, 0 for one that memory delivers each time.
    """

    _fields_: ClassVar = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("is_cached", ctypes.c_int64),
    ]


def matmul_module(prefetch: Prefetch) -> ir.Module:
    """A module whose function KERNEL takes Arguments and shares the blocks out over the threads that enter it."""
    code = _MatmulCode(KERNEL)
    tiles = [[code.emit_tile(rows, kind) for rows in range(1, TILE_ROWS + 1)] for kind in (prefetch, None)]
    code.emit_kernel(tiles)
    return code.module


class _MatmulCode(Emitter):
    """Emits the kernel and its tiles."""

    def emit_tile(self, rows: int, prefetch: Prefetch | None) -> ir.Function:
        """tile(x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last) for `rows` rows.

        `lanes` output features of the block exist. Accumulators start at zero in the `first` stretch, else in scratch,
        and end in y after the `last`, else in scratch. With every pair the tile prefetches what lies a bit ahead of its
        weight; without `prefetch`, as the weight is in a cache, one line at `ahead`.
        """
        integer, pointer, bit = self.integer, self.pointer, self.bit
        kinds = [pointer, integer, pointer, pointer, pointer, pointer, integer, pointer, integer, integer, bit, bit]
        builder, arguments = self.define(f"tile_{rows}_{'cached' if prefetch is None else 'streamed'}", *kinds)
        x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last = arguments
        sums = [[builder.alloca(self.floats) for _ in range(_REGISTERS)] for _ in range(rows)]
        places = [
            (sums[row][part], row, part, self.at(builder, scratch, (row * _REGISTERS + part) * _LINE_BYTES))
            for row in range(rows)
            for part in range(_REGISTERS)
        ]
        with builder.if_else(first) as (then, otherwise):
            with then:
                for place, *_ in places:
                    builder.store(self.zeros(), place)
            with otherwise:
                for place, _, _, saved in places:
                    builder.store(builder.load(saved, typ=self.floats, align=4), place)
        inputs = [self.at(builder, x, builder.mul(x_stride, integer(row))) for row in range(rows)]
        with count(builder, integer(0), pairs, 1) as pair:
            offset = builder.mul(pair, integer(_BLOCK_PAIR_BYTES))
            line = self.at(builder, weight, offset)
            if prefetch is None:
                self.prefetch(builder, self.at(builder, ahead, offset), _TO_SECOND_LEVEL)
            else:
                for part in range(_REGISTERS):
                    place = self.at(builder, line, part * _LINE_BYTES + prefetch.distance)
                    self.prefetch(builder, place, prefetch.locality)
            self._add_products(builder, sums, inputs, line, pair)
        with builder.if_else(last) as (then, otherwise):
            with then:
                self._emit_results(builder, places, bias, y, y_stride, lanes)
            with otherwise:
                for place, _, _, saved in places:
                    builder.store(builder.load(place, typ=self.floats), saved, align=4)
        builder.ret_void()
        return builder.function

    def _add_products(
        self,
        builder: ir.IRBuilder,
        sums: list[list[ir.Value]],
        inputs: list[ir.Value],
        line: ir.Value,
        pair: ir.Value,
    ) -> None:
        """Input features `pair` of every row times the 64 pairs of weights at `line`, added to `sums`."""
        weights = [
            builder.load(self.at(builder, line, part * _LINE_BYTES), typ=self.pairs, align=64)
            for part in range(_REGISTERS)
        ]
        offset = builder.mul(pair, self.integer(PAIR_BYTES))
        for row, source in enumerate(inputs):
            pairs = self.spread_pair(builder, self.at(builder, source, offset))
            for part, place in enumerate(sums[row]):
                self.add_dot(builder, place, pairs, weights[part])

    def _emit_results(
        self,
        builder: ir.IRBuilder,
        places: list[tuple[ir.Value, int, int, ir.Value]],
        bias: ir.Value,
        y: ir.Value,
        y_stride: ir.Value,
        lanes: ir.Value,
    ) -> None:
        """Add the bias, where there is one, round to bfloat16 and store the lanes that exist."""
        integer = self.integer
        with builder.if_then(builder.icmp_unsigned("!=", builder.ptrtoint(bias, integer), integer(0))):
            for place, _, part, _ in places:
                added = builder.load(self.at(builder, bias, part * _LINE_BYTES), typ=self.floats, align=4)
                builder.store(builder.fadd(builder.load(place, typ=self.floats), added), place)
        limit = self.spread(builder, builder.trunc(lanes, self.small))
        for place, row, part, _ in places:
            lane = self.numbers(range(part * LANES, (part + 1) * LANES))
            target = self.at(builder, y, builder.mul(y_stride, integer(row)))
            target = self.at(builder, target, part * _LINE_BYTES // 2)
            rounded = self.round(builder, builder.load(place, typ=self.floats))
            self.store_some(builder, rounded, target, builder.icmp_signed("<", lane, limit))

    def emit_kernel(self, tiles: list[list[ir.Function]]) -> None:
        """For each block of this thread, for each stretch of input features, for each tile of rows."""
        integer = self.integer
        thread_number = self.declare(THREAD_NUMBER, self.small)
        num_threads = self.declare(NUM_THREADS, self.small)
        builder, (pointer,) = self.define(KERNEL, self.pointer)
        field = self.read(builder, pointer, Arguments)
        rows, pairs, features = field["rows"], field["pairs"], field["features"]
        thread = builder.zext(builder.call(thread_number, []), integer)
        threads = builder.zext(builder.call(num_threads, []), integer)
        blocks = builder.sdiv(builder.add(features, integer(BLOCK - 1)), integer(BLOCK))
        start = builder.sdiv(builder.mul(thread, blocks), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), blocks), threads)
        y_stride = builder.mul(features, integer(2))
        alone = builder.icmp_signed("<=", rows, integer(TILE_ROWS))
        stretch = builder.select(alone, pairs, integer(STRETCH))
        saved_bytes = integer(BLOCK * 4)
        scratch = self.at(builder, field["scratch"], builder.mul(builder.mul(thread, rows), saved_bytes))
        has_bias = builder.icmp_unsigned("!=", builder.ptrtoint(field["bias"], integer), integer(0))
        with count(builder, start, stop, 1) as block:
            block_bytes = builder.mul(pairs, integer(_BLOCK_PAIR_BYTES))
            weight = self.at(builder, field["weight"], builder.mul(block, block_bytes))
            first_feature = builder.mul(block, integer(BLOCK))
            bias = self.at(builder, field["bias"], builder.mul(first_feature, integer(4)))
            bias = builder.select(has_bias, bias, field["bias"])
            y = self.at(builder, field["y"], builder.mul(first_feature, integer(2)))
            lanes = builder.sub(features, first_feature)
            with count(builder, integer(0), pairs, stretch) as pair, count(builder, integer(0), rows, TILE_ROWS) as row:
                remaining = builder.sub(pairs, pair)
                last = builder.icmp_signed("<=", remaining, stretch)
                taken = builder.select(last, remaining, stretch)
                row_x = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
                stretch_weight = self.at(builder, weight, builder.mul(pair, integer(_BLOCK_PAIR_BYTES)))
                arguments = [
                    self.at(builder, row_x, builder.mul(pair, integer(PAIR_BYTES))),
                    field["x_stride"],
                    stretch_weight,
                    self._ahead(builder, stretch_weight, taken, row),
                    bias,
                    self.at(builder, y, builder.mul(row, y_stride)),
                    y_stride,
                    self.at(builder, scratch, builder.mul(row, saved_bytes)),
                    taken,
                    lanes,
                    builder.icmp_signed("==", pair, integer(0)),
                    last,
                ]
                self._emit_choice(builder, tiles, builder.sub(rows, row), row, field["is_cached"], arguments)
        builder.ret_void()

    def _ahead(self, builder: ir.IRBuilder, weight: ir.Value, pairs: ir.Value, row: ir.Value) -> ir.Value:
        """What a later tile asks for: tiles 1, 2, 3, 4, 5… line 0, 1, 2, 3, 0… of each pair of the next stretch."""
        tile = builder.sdiv(row, self.integer(TILE_ROWS))
        line = builder.and_(builder.sub(tile, self.integer(1)), self.integer(_REGISTERS - 1))
        behind = self.at(builder, weight, builder.mul(pairs, self.integer(_BLOCK_PAIR_BYTES)))
        return self.at(builder, behind, builder.mul(line, self.integer(_LINE_BYTES)))

    def _emit_choice(
        self,
        builder: ir.IRBuilder,
        tiles: list[list[ir.Function]],
        left: ir.Value,
        row: ir.Value,
        is_cached: ir.Value,
        arguments: list[ir.Value],
    ) -> None:
        """Call the tile for the `left` rows from `row` on: tiles [from memory, from a cache][rows - 1]."""
        full = self.integer(TILE_ROWS)
        taken = builder.select(builder.icmp_signed("<", left, full), left, full)
        is_later = builder.icmp_signed(">", row, self.integer(0))
        kind = builder.select(is_later, self.integer(1), is_cached)
        number = builder.add(taken, builder.mul(kind, full))
        self.call_one(builder, number, [tile for hint in tiles for tile in hint], arguments)
