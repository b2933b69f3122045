"""The code of the product in matmul.py, as LLVM IR.

It knows instructions, registers and caches. It does not know tensors. How the weight lies, and in which order the
products are added, is told in matmul.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from trtrun.layers.native.machine import count, declare_threads

if TYPE_CHECKING:
    from llvmlite import ir

KERNEL = "matmul"
BLOCK = 64
"""Output features of a block: four registers of sixteen float32."""
TILE_ROWS = 6
"""Rows computed at a time: 24 of 32 registers are then accumulators, the rest hold weights and the broadcast pair."""
STRETCH = 1024
"""Pairs of input features that several tiles go through together: 256 KiB of a block, so that this stretch and the next,
which is on its way, fit a second-level cache of 1 MiB."""

_LANES = 16
_REGISTERS = BLOCK // _LANES
_PAIR_BYTES = 4
_LINE_BYTES = 4 * _LANES
_PREFETCH_BYTES = 6144
"""How far ahead the first tile asks for memory. Measured on Zen 5: 2 to 8 KiB are within 5 %, asking for none costs 15 %
at six rows."""
_USE_ONCE, _TO_SECOND_LEVEL, _KEEP = 0, 2, 3
"""Prefetches: lines used once leave the first-level cache to x (5 % at six rows), but are lost to later calls."""

class Arguments(ctypes.Structure):
    """What the kernel gets.

    Strides are in bytes. scratch is [threads, rows, 64] float32, needed where rows > TILE_ROWS and pairs > STRETCH. keep
    is 1 for a weight that caches may hold from call to call, 0 for one that memory delivers each time.
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
        ("keep", ctypes.c_int64),
    ]


def matmul_module() -> ir.Module:
    """A module whose function KERNEL takes Arguments and shares the blocks out over the threads that enter it."""
    from llvmlite import ir

    return _MatmulCode(ir.Module(name=KERNEL)).module


class _MatmulCode:
    """Emits the kernel and its tiles into `module`."""

    def __init__(self, module: ir.Module) -> None:
        from llvmlite import ir

        class BFloat(ir.Type):  # type: ignore[misc]
            """LLVM's bfloat, which llvmlite has no class for."""

            intrinsic_name = "bf16"

            def _to_string(self) -> str:
                return "bfloat"

        self._ir = ir
        self.module = module
        self._integer, self._small, self._bit = ir.IntType(64), ir.IntType(32), ir.IntType(1)
        self._byte, self._pointer = ir.IntType(8), ir.PointerType()
        self._floats = ir.VectorType(ir.FloatType(), _LANES)
        self._halves, self._pairs = ir.VectorType(BFloat(), _LANES), ir.VectorType(BFloat(), 2 * _LANES)
        self._mask = ir.VectorType(self._bit, _LANES)
        void, floats = ir.VoidType(), self._floats
        self._dot = self._declare("llvm.x86.avx512bf16.dpbf16ps.512", floats, floats, self._pairs, self._pairs)
        self._round = self._declare("llvm.x86.avx512bf16.cvtneps2bf16.512", self._halves, floats)
        self._prefetch = self._declare(
            "llvm.prefetch.p0", void, self._pointer, self._small, self._small, self._small
        )
        self._store = self._declare(
            "llvm.masked.store.v16bf16.p0", void, self._halves, self._pointer, self._small, self._mask
        )
        hints = (_USE_ONCE, _KEEP, _TO_SECOND_LEVEL)
        self._emit_kernel([[self._emit_tile(rows, hint) for rows in range(1, TILE_ROWS + 1)] for hint in hints])

    def _declare(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        return self._ir.Function(self.module, self._ir.FunctionType(result, arguments), name)

    def _at(self, builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """`pointer` plus `offset` bytes."""
        if isinstance(offset, int):
            offset = self._integer(offset)
        return builder.gep(pointer, [offset], source_etype=self._byte)

    def _emit_tile(self, rows: int, hint: int) -> ir.Function:
        """tile(x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last): a block's `rows` rows.

        `lanes` output features of the block exist. Accumulators start at zero in the `first` stretch, else in scratch,
        and end in y after the `last`, else in scratch. With every pair the tile prefetches what lies a bit ahead of its
        weight; with _TO_SECOND_LEVEL, one line at `ahead` instead, as an earlier tile has brought the weight.
        """
        ir, integer, pointer = self._ir, self._integer, self._pointer
        kinds = [pointer, integer, pointer, pointer, pointer, pointer, integer, pointer, integer, integer]
        kinds += [self._bit, self._bit]
        tile = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), f"tile_{rows}_{hint}")
        tile.linkage = "internal"
        x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last = tile.args
        builder = ir.IRBuilder(tile.append_basic_block("entry"))
        sums = [[builder.alloca(self._floats) for _ in range(_REGISTERS)] for _ in range(rows)]
        places = [
            (sums[row][part], row, part, self._at(builder, scratch, (row * _REGISTERS + part) * _LINE_BYTES))
            for row in range(rows)
            for part in range(_REGISTERS)
        ]
        with builder.if_else(first) as (then, otherwise):
            with then:
                for place, *_ in places:
                    builder.store(ir.Constant(self._floats, None), place)
            with otherwise:
                for place, _, _, saved in places:
                    builder.store(builder.load(saved, typ=self._floats, align=4), place)
        inputs = [self._at(builder, x, builder.mul(x_stride, integer(row))) for row in range(rows)]
        with count(builder, integer(0), pairs, 1) as pair:
            offset = builder.mul(pair, integer(_REGISTERS * _LINE_BYTES))
            line = self._at(builder, weight, offset)
            if hint == _TO_SECOND_LEVEL:
                self._emit_prefetch(builder, self._at(builder, ahead, offset), hint)
            else:
                for part in range(_REGISTERS):
                    self._emit_prefetch(builder, self._at(builder, line, part * _LINE_BYTES + _PREFETCH_BYTES), hint)
            self._add_products(builder, sums, inputs, line, pair)
        with builder.if_else(last) as (then, otherwise):
            with then:
                self._emit_results(builder, places, bias, y, y_stride, lanes)
            with otherwise:
                for place, _, _, saved in places:
                    builder.store(builder.load(place, typ=self._floats), saved, align=4)
        builder.ret_void()
        return tile

    def _emit_prefetch(self, builder: ir.IRBuilder, address: ir.Value, hint: int) -> None:
        read, data = self._small(0), self._small(1)
        builder.call(self._prefetch, [address, read, self._small(hint), data])

    def _add_products(
        self,
        builder: ir.IRBuilder,
        sums: list[list[ir.Value]],
        inputs: list[ir.Value],
        line: ir.Value,
        pair: ir.Value,
    ) -> None:
        """Input features `pair` of every row times the 64 pairs of weights at `line`, added to `sums`."""
        ir = self._ir
        weights = [
            builder.load(self._at(builder, line, part * _LINE_BYTES), typ=self._pairs, align=64)
            for part in range(_REGISTERS)
        ]
        offset = builder.mul(pair, self._integer(_PAIR_BYTES))
        lanes = ir.VectorType(self._small, _LANES)
        undefined, everywhere = ir.Constant(lanes, ir.Undefined), ir.Constant(lanes, None)
        for row, source in enumerate(inputs):
            # Two bfloat16 as one number of 32 bits, in every lane.
            value = builder.load(self._at(builder, source, offset), typ=self._small, align=2)
            spread = builder.shuffle_vector(
                builder.insert_element(undefined, value, self._small(0)), undefined, everywhere
            )
            pairs = builder.bitcast(spread, self._pairs)
            for part, place in enumerate(sums[row]):
                total = builder.load(place, typ=self._floats)
                builder.store(builder.call(self._dot, [total, pairs, weights[part]]), place)

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
        ir, integer = self._ir, self._integer
        with builder.if_then(builder.icmp_unsigned("!=", builder.ptrtoint(bias, integer), integer(0))):
            for place, _, part, _ in places:
                added = builder.load(self._at(builder, bias, part * _LINE_BYTES), typ=self._floats, align=4)
                builder.store(builder.fadd(builder.load(place, typ=self._floats), added), place)
        numbers = ir.VectorType(integer, _LANES)
        one = builder.insert_element(ir.Constant(numbers, ir.Undefined), lanes, self._small(0))
        zeros = ir.Constant(ir.VectorType(self._small, _LANES), None)
        limit = builder.shuffle_vector(one, ir.Constant(numbers, ir.Undefined), zeros)
        for place, row, part, _ in places:
            lane = ir.Constant(numbers, [part * _LANES + number for number in range(_LANES)])
            rounded = builder.call(self._round, [builder.load(place, typ=self._floats)])
            target = self._at(builder, y, builder.mul(y_stride, integer(row)))
            target = self._at(builder, target, part * _LINE_BYTES // 2)
            builder.call(self._store, [rounded, target, self._small(2), builder.icmp_signed("<", lane, limit)])

    def _emit_kernel(self, tiles: list[list[ir.Function]]) -> None:
        """For each block of this thread, for each stretch of input features, for each tile of rows."""
        ir, integer = self._ir, self._integer
        thread_number, num_threads = declare_threads(self.module)
        kernel = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [self._pointer]), KERNEL)
        builder = ir.IRBuilder(kernel.append_basic_block("entry"))
        values = []
        for index, (_, kind) in enumerate(Arguments._fields_):
            place = self._at(builder, kernel.args[0], 8 * index)
            values.append(builder.load(place, typ=self._pointer if kind is ctypes.c_void_p else integer))
        x, weight, bias, y, scratch, x_stride, rows, pairs, features, keep = values
        thread = builder.zext(builder.call(thread_number, []), integer)
        threads = builder.zext(builder.call(num_threads, []), integer)
        blocks = builder.sdiv(builder.add(features, integer(BLOCK - 1)), integer(BLOCK))
        start = builder.sdiv(builder.mul(thread, blocks), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), blocks), threads)
        y_stride = builder.mul(features, integer(2))
        alone = builder.icmp_signed("<=", rows, integer(TILE_ROWS))
        stretch = builder.select(alone, pairs, integer(STRETCH))
        pair_bytes, row_bytes = integer(_REGISTERS * _LINE_BYTES), integer(_REGISTERS * _LINE_BYTES)
        scratch = self._at(builder, scratch, builder.mul(builder.mul(thread, rows), row_bytes))
        with count(builder, start, stop, 1) as block:
            block_weight = self._at(builder, weight, builder.mul(builder.mul(block, pairs), pair_bytes))
            first_feature = builder.mul(block, integer(BLOCK))
            lanes = builder.sub(features, first_feature)
            has_bias = builder.icmp_unsigned("!=", builder.ptrtoint(bias, integer), integer(0))
            block_bias = self._at(builder, bias, builder.mul(first_feature, integer(4)))
            block_bias = builder.select(has_bias, block_bias, bias)
            block_y = self._at(builder, y, builder.mul(first_feature, integer(2)))
            with count(builder, integer(0), pairs, stretch) as pair, count(builder, integer(0), rows, TILE_ROWS) as row:
                left, remaining = builder.sub(rows, row), builder.sub(pairs, pair)
                full = integer(TILE_ROWS)
                taken = builder.select(builder.icmp_signed("<", left, full), left, full)
                last = builder.icmp_signed("<=", remaining, stretch)
                taken_pairs = builder.select(last, remaining, stretch)
                row_x = self._at(builder, x, builder.mul(row, x_stride))
                stretch_weight = self._at(builder, block_weight, builder.mul(pair, pair_bytes))
                # Tiles 1, 2, 3, 4, 5… ask for line 0, 1, 2, 3, 0… of each pair of the next stretch, which lies behind.
                tile_number = builder.sdiv(row, full)
                line = builder.and_(builder.sub(tile_number, integer(1)), integer(_REGISTERS - 1))
                ahead = self._at(builder, stretch_weight, builder.mul(taken_pairs, pair_bytes))
                arguments = [
                    self._at(builder, row_x, builder.mul(pair, integer(_PAIR_BYTES))),
                    x_stride,
                    stretch_weight,
                    self._at(builder, ahead, builder.mul(line, integer(_LINE_BYTES))),
                    block_bias,
                    self._at(builder, block_y, builder.mul(row, y_stride)),
                    y_stride,
                    self._at(builder, scratch, builder.mul(row, row_bytes)),
                    taken_pairs,
                    lanes,
                    builder.icmp_signed("==", pair, integer(0)),
                    last,
                ]
                later = builder.icmp_signed(">", row, integer(0))
                kind = builder.select(later, integer(2), keep)
                done = builder.append_basic_block("tile_done")
                choice = builder.switch(builder.add(taken, builder.mul(kind, full)), done)
                for number, tile in enumerate((tile for hints in tiles for tile in hints), 1):
                    choice.add_case(integer(number), case := builder.append_basic_block(f"tile_{number}"))
                    builder.position_at_end(case)
                    builder.call(tile, arguments)
                    builder.branch(done)
                builder.position_at_end(done)
        builder.ret_void()
