"""The code of the product in matmul.py, as LLVM IR.

It knows instructions, registers and caches. It does not know tensors, nor which processor this is. How the weight lies,
and in which order the products are added, is told in matmul.py. Weights of fewer bits build on it
(byte_matmul_code.py).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trtrun.kernels.cpu.emitter import LANES, PAIR_BYTES, REGISTER_BYTES, Emitter, count
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, NEON

if TYPE_CHECKING:
    from llvmlite import ir

    Place = tuple[ir.Value, int, int, ir.Value]
    """Sixteen sums of a tile: where they are, their row, their part of the block, where they are kept in between."""

KERNEL = "matmul"
STRETCH = 1024
"""Pairs of input features that several tiles go through together: 256 KiB of a wide block, so that this stretch and the
next, which is on its way, fit a second-level cache of 1 MiB."""
FLOAT32_STRETCH = 512
"""Input features of float32 that are added up by themselves, for any number of rows. One chain of 4,096 had an error
nine times as large as torch's products; sums of sums of 512 have the same."""


class Form(NamedTuple):
    """How a kind of processor multiplies.

    Attributes:
        multiplies_bfloat16: whether activations are bfloat16, of which an instruction takes pairs; else they come as
            float32, and weights of bfloat16 are widened in registers.
        registers: of sixteen sums, that a row has of a block.
        rows: of a tile, which are computed together.
        is_float32: whether weights and results are float32; else they are bfloat16.
    """

    multiplies_bfloat16: bool
    registers: int
    rows: int
    is_float32: bool = False

    @property
    def block(self) -> int:
        """Output features of a block."""
        return self.registers * LANES

    @property
    def stretch(self) -> int:
        """Pairs of input features, or single ones of float32, that several tiles go through together."""
        return FLOAT32_STRETCH if self.is_float32 else STRETCH


FORMS = {
    MULTIPLIES_BFLOAT16: Form(True, 4, 6),
    "avx512": Form(False, 4, 5),
    "avx2": Form(False, 1, 5),
    NEON: Form(False, 1, 4),
}
"""By kinds of processors (machine.py). Of 32 registers 24 or 20 are then accumulators, of AVX2's 16, half as wide, 10,
of NEON's 32, a quarter as wide, 16; the others hold weights and what is broadcast. With one row more LLVM keeps sums on
the stack: half as fast."""

FLOAT32_FORMS = {
    MULTIPLIES_BFLOAT16: Form(False, 4, 6, True),
    "avx512": Form(False, 4, 6, True),
    "avx2": Form(False, 1, 6, True),
    NEON: Form(False, 1, 6, True),
}
"""The same for weights of float32, which nothing widens: so registers are left for a row more."""

REGISTERS, BLOCK = FORMS[MULTIPLIES_BFLOAT16].registers, FORMS[MULTIPLIES_BFLOAT16].block
LINE_BYTES = REGISTER_BYTES
BLOCK_PAIR_BYTES = BLOCK * PAIR_BYTES
"""Bytes of a block for one pair of input features."""
TO_SECOND_LEVEL = 2
_PAIRS_FROM_A_CACHE = 4
"""Pairs between two turns of the loop where weights are at hand: 5 to 8 % at 32 rows, nothing where memory decides."""


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
    return Prefetch(6144, 0) if processor.startswith("znver") else Prefetch(8192, TO_SECOND_LEVEL)


class Source(NamedTuple):
    """Where tiles find their weights: bytes of a block for one pair of input features, and how they ask for more.

    Without `prefetch` the weights are in a cache already.
    """

    name: str
    pair_bytes: int
    prefetch: Prefetch | None


class Arguments(ctypes.Structure):
    """What the kernel gets.

    Strides are in bytes. `pairs` of float32 are single input features. scratch is [threads, rows, block] float32,
    needed with pairs > STRETCH for more rows than a tile's, and of float32 with pairs > FLOAT32_STRETCH for any.
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


def matmul_module(prefetch: Prefetch, form: Form) -> ir.Module:
    """A module whose function KERNEL takes Arguments and shares the blocks out over the threads that enter it."""
    code = MatmulCode(KERNEL, form)
    sources = Source("streamed", code.weight_pair_bytes, prefetch), Source("cached", code.weight_pair_bytes, None)
    code.emit_kernel([code.emit_tiles(source) for source in sources])
    return code.module


class MatmulCode(Emitter):
    """Emits the kernel and its tiles."""

    feature_bytes = 4
    """Bytes at `bias` for each output feature."""
    unpacked_bytes = 0
    """Room that each thread has in scratch, before the sums."""

    def __init__(self, name: str, form: Form) -> None:
        super().__init__(name, form.multiplies_bfloat16)
        self._form = form
        self._input_pair_bytes = PAIR_BYTES if form.multiplies_bfloat16 or form.is_float32 else 2 * PAIR_BYTES
        self._result_bytes = 4 if form.is_float32 else 2
        self._saved_bytes = form.block * 4
        self.weight_pair_bytes = form.block * PAIR_BYTES
        """Bytes of a block for one pair of input features, as the weight lies in memory."""

    def emit_tiles(self, source: Source) -> list[ir.Function]:
        """Tiles of one row and more, up to the form's."""
        return [self._emit_tile(rows, source) for rows in range(1, self._form.rows + 1)]

    def _emit_tile(self, rows: int, source: Source) -> ir.Function:
        """tile(x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last) for `rows` rows.

        `lanes` output features of the block exist. Accumulators start at zero in the `first` stretch, else in scratch
        (of float32 at zero in each, and scratch is added at its end), and end in y after the `last`, else in scratch.
        With every pair the tile prefetches what lies a bit ahead of its
        weight; where the source has no prefetch, as it is in a cache, one line at `ahead`.
        """
        integer, pointer, bit = self.integer, self.pointer, self.bit
        kinds = [pointer, integer, pointer, pointer, pointer, pointer, integer, pointer, integer, integer, bit, bit]
        builder, arguments = self.define(f"tile_{rows}_{source.name}", *kinds)
        x, x_stride, weight, ahead, bias, y, y_stride, scratch, pairs, lanes, first, last = arguments
        sums = [[self.room(builder) for _ in range(self._form.registers)] for _ in range(rows)]
        places: list[Place] = [
            (sums[row][part], row, part, self.at(builder, scratch, (row * self._form.registers + part) * LINE_BYTES))
            for row in range(rows)
            for part in range(self._form.registers)
        ]
        for place, *_ in places:
            builder.store(self.zeros(), place)
        if not self._form.is_float32:
            self._emit_saved(builder, places, first)
        inputs = [self.at(builder, x, builder.mul(x_stride, integer(row))) for row in range(rows)]
        self._emit_pairs(builder, sums, inputs, weight, ahead, pairs, source)
        if self._form.is_float32:
            self._emit_saved(builder, places, first)
        with builder.if_else(last) as (then, otherwise):
            with then:
                ends = [self.at(builder, row, builder.mul(pairs, integer(self._input_pair_bytes))) for row in inputs]
                self._emit_results(builder, places, bias, ends, y, y_stride, lanes)
            with otherwise:
                for place, _, _, saved in places:
                    builder.store(builder.load(place, typ=self.floats), saved, align=4)
        builder.ret_void()
        return builder.function

    def _emit_saved(self, builder: ir.IRBuilder, places: list[Place], first: ir.Value) -> None:
        """But in the `first` stretch, take what the one before has left: of float32 it is added."""
        with builder.if_then(builder.not_(first)):
            for place, _, _, saved in places:
                value = builder.load(saved, typ=self.floats, align=4)
                if self._form.is_float32:
                    value = builder.fadd(value, builder.load(place, typ=self.floats))
                builder.store(value, place)

    def _emit_pairs(
        self,
        builder: ir.IRBuilder,
        sums: list[list[ir.Value]],
        inputs: list[ir.Value],
        weight: ir.Value,
        ahead: ir.Value,
        pairs: ir.Value,
        source: Source,
    ) -> None:
        """All pairs of input features, one after the other."""
        integer = self.integer

        def add_pair(pair: ir.Value) -> None:
            line = self.at(builder, weight, builder.mul(pair, integer(source.pair_bytes)))
            if source.prefetch is None:
                place = self.at(builder, ahead, builder.mul(pair, integer(self._form.block * PAIR_BYTES)))
                self.prefetch(builder, place, TO_SECOND_LEVEL)
            else:
                for part in range(0, source.pair_bytes, LINE_BYTES):
                    place = self.at(builder, line, part + source.prefetch.distance)
                    self.prefetch(builder, place, source.prefetch.locality)
            self._add_products(builder, sums, inputs, self.load_weights(builder, line, source), pair)

        at_once = 1 if source.prefetch is not None else _PAIRS_FROM_A_CACHE
        most = builder.mul(builder.sdiv(pairs, integer(at_once)), integer(at_once))
        with count(builder, integer(0), most, at_once) as pair:
            for number in range(at_once):
                add_pair(builder.add(pair, integer(number)))
        with count(builder, most, pairs, 1) as pair:
            add_pair(pair)

    def load_weights(self, builder: ir.IRBuilder, line: ir.Value, source: Source) -> list[ir.Value]:
        """A block's pairs of bfloat16 weights at `line`, of one pair of input features."""
        kind = self.floats if self._form.is_float32 else self.pairs
        return [
            builder.load(self.at(builder, line, part * LINE_BYTES), typ=kind, align=64)
            for part in range(self._form.registers)
        ]

    def _add_products(
        self,
        builder: ir.IRBuilder,
        sums: list[list[ir.Value]],
        inputs: list[ir.Value],
        weights: list[ir.Value],
        pair: ir.Value,
    ) -> None:
        """Input features `pair` of every row times the block's pairs of weights, added to `sums`."""
        offset = builder.mul(pair, self.integer(self._input_pair_bytes))
        places = [self.at(builder, source, offset) for source in inputs]
        if self._form.multiplies_bfloat16:
            for row, place in enumerate(places):
                pairs = self.spread_pair(builder, place)
                for part, total in enumerate(sums[row]):
                    self.add_dot(builder, total, pairs, weights[part])
            return
        # One feature of the pair after the other: so few registers hold widened weights.
        for feature in range(1 if self._form.is_float32 else 2):
            wide = weights if self._form.is_float32 else [self.widen_one(builder, pairs, feature) for pairs in weights]
            for row, place in enumerate(places):
                number = self.spread_number(builder, self.at(builder, place, feature * PAIR_BYTES))
                for part, total in enumerate(sums[row]):
                    self.add_product(builder, total, number, wide[part])

    def _emit_results(
        self,
        builder: ir.IRBuilder,
        places: list[Place],
        bias: ir.Value,
        ends: list[ir.Value],
        y: ir.Value,
        y_stride: ir.Value,
        lanes: ir.Value,
    ) -> None:
        """Add the bias, round to bfloat16 and store the lanes that exist."""
        integer = self.integer
        self.finish(builder, places, bias, ends)
        limit = self.spread(builder, builder.trunc(lanes, self.small))
        is_whole = builder.icmp_signed(">=", lanes, integer(self._form.block))
        for place, row, part, _ in places:
            target = self.at(builder, y, builder.mul(y_stride, integer(row)))
            target = self.at(builder, target, part * LANES * self._result_bytes)
            rounded = builder.load(place, typ=self.floats)
            if not self._form.is_float32:
                rounded = self.round(builder, rounded)
            with builder.if_else(is_whole) as (then, otherwise):
                with then:
                    builder.store(rounded, target, align=self._result_bytes)
                with otherwise:
                    lane = self.numbers(range(part * LANES, (part + 1) * LANES))
                    self.store_some(builder, rounded, target, builder.icmp_signed("<", lane, limit))

    def finish(self, builder: ir.IRBuilder, places: list[Place], bias: ir.Value, ends: list[ir.Value]) -> None:
        """Turn sums into results: add the bias, where there is one. `ends`: addresses behind the rows' inputs."""
        with builder.if_then(builder.icmp_unsigned("!=", builder.ptrtoint(bias, self.integer), self.integer(0))):
            for place, _, part, _ in places:
                added = builder.load(self.at(builder, bias, part * LINE_BYTES), typ=self.floats, align=4)
                builder.store(builder.fadd(builder.load(place, typ=self.floats), added), place)

    def emit_kernel(self, tiles: list[list[ir.Function]]) -> ir.Function:
        """Emit the loop over blocks of this thread; returns what computes one."""
        integer, block = self.integer, self.emit_block(tiles)
        builder, (pointer,) = self.define(KERNEL, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread, threads = self.emit_thread(builder)
        blocks = self.count_blocks(builder, field["features"])
        start = builder.sdiv(builder.mul(thread, blocks), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), blocks), threads)
        room_bytes = builder.add(builder.mul(field["rows"], integer(self._saved_bytes)), integer(self.unpacked_bytes))
        room = self.at(builder, field["scratch"], builder.mul(thread, room_bytes))
        with count(builder, start, stop, 1) as number:
            builder.call(block, [pointer, number, room])
        builder.ret_void()
        return block

    def count_blocks(self, builder: ir.IRBuilder, features: ir.Value) -> ir.Value:
        """Blocks of so many output features."""
        return builder.sdiv(builder.add(features, self.integer(self._form.block - 1)), self.integer(self._form.block))

    def emit_block(self, tiles: list[list[ir.Function]]) -> ir.Function:
        """block(arguments, number, room): stretches of input features of a block, and tiles of rows. `room` is this
        thread's part of scratch."""
        integer, block = self.integer, self._form.block
        builder, (pointer, number, room) = self.define("block", self.pointer, integer, self.pointer)
        field = self.read(builder, pointer, Arguments)
        rows, pairs, features = field["rows"], field["pairs"], field["features"]
        y_stride = builder.mul(features, integer(self._result_bytes))
        alone = builder.icmp_signed("<=", rows, integer(self._form.rows))
        stretch = integer(self._form.stretch)
        if not self._form.is_float32:
            stretch = builder.select(alone, pairs, stretch)
        saved = self.at(builder, room, self.unpacked_bytes)
        has_bias = builder.icmp_unsigned("!=", builder.ptrtoint(field["bias"], integer), integer(0))
        block_bytes = builder.mul(pairs, integer(self.weight_pair_bytes))
        weight = self.at(builder, field["weight"], builder.mul(number, block_bytes))
        first_feature = builder.mul(number, integer(block))
        bias = self.at(builder, field["bias"], builder.mul(first_feature, integer(self.feature_bytes)))
        bias = builder.select(has_bias, bias, field["bias"])
        y = self.at(builder, field["y"], builder.mul(first_feature, integer(self._result_bytes)))
        lanes = builder.sub(features, first_feature)
        with count(builder, integer(0), pairs, stretch) as pair:
            remaining = builder.sub(pairs, pair)
            last = builder.icmp_signed("<=", remaining, stretch)
            taken = builder.select(last, remaining, stretch)
            packed = self.at(builder, weight, builder.mul(pair, integer(self.weight_pair_bytes)))
            source = self.begin_stretch(builder, packed, taken, room, alone)
            with count(builder, integer(0), rows, self._form.rows) as row:
                row_x = self.at(builder, field["x"], builder.mul(row, field["x_stride"]))
                arguments = [
                    self.at(builder, row_x, builder.mul(pair, integer(self._input_pair_bytes))),
                    field["x_stride"],
                    source,
                    self._ahead(builder, packed, taken, row),
                    bias,
                    self.at(builder, y, builder.mul(row, y_stride)),
                    y_stride,
                    self.at(builder, saved, builder.mul(row, integer(self._saved_bytes))),
                    taken,
                    lanes,
                    builder.icmp_signed("==", pair, integer(0)),
                    last,
                ]
                kind = self.choose_tiles(builder, row, alone, field["is_cached"])
                self._emit_choice(builder, tiles, builder.sub(rows, row), kind, arguments)
        builder.ret_void()
        return builder.function

    def begin_stretch(
        self, builder: ir.IRBuilder, weight: ir.Value, pairs: ir.Value, room: ir.Value, alone: ir.Value
    ) -> ir.Value:
        """Emit what comes before the tiles of a stretch of `pairs` pairs; returns where these find its weights."""
        return weight

    def choose_tiles(self, builder: ir.IRBuilder, row: ir.Value, alone: ir.Value, is_cached: ir.Value) -> ir.Value:
        """Choose which of the kernel's lists of tiles takes the rows from `row` on: [from memory, from a cache].

        `alone`: one tile takes all rows.
        """
        is_later = builder.icmp_signed(">", row, self.integer(0))
        return builder.select(is_later, self.integer(1), is_cached)

    def _ahead(self, builder: ir.IRBuilder, weight: ir.Value, pairs: ir.Value, row: ir.Value) -> ir.Value:
        """What a later tile asks for: tiles 1, 2, 3, 4, 5… line 0, 1, 2, 3, 0… of each pair of the next stretch."""
        tile = builder.sdiv(row, self.integer(self._form.rows))
        line = builder.and_(builder.sub(tile, self.integer(1)), self.integer(self._form.registers - 1))
        behind = self.at(builder, weight, builder.mul(pairs, self.integer(self.weight_pair_bytes)))
        return self.at(builder, behind, builder.mul(line, self.integer(LINE_BYTES)))

    def _emit_choice(
        self,
        builder: ir.IRBuilder,
        tiles: list[list[ir.Function]],
        left: ir.Value,
        kind: ir.Value,
        arguments: list[ir.Value],
    ) -> None:
        """Call the tile of list `kind` that takes the `left` rows, or the first of them."""
        full = self.integer(self._form.rows)
        taken = builder.select(builder.icmp_signed("<", left, full), left, full)
        number = builder.add(taken, builder.mul(kind, full))
        self.call_one(builder, number, [tile for hint in tiles for tile in hint], arguments)
