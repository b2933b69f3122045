"""The code of products with weights of a byte each, as LLVM IR: integers of 8 bits, and what fp8_matmul_code.py shares
with them.

It knows that bytes become bfloat16 on the way, once for all rows, and how integers do; the rest is the product of
bfloat16 (matmul_code.py). It does not know tensors, nor where scales come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtrun.kernels.cpu.emitter import count
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16
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

if TYPE_CHECKING:
    from llvmlite import ir

    from trtrun.kernels.cpu.matmul_code import Place
from typing import TYPE_CHECKING

from trtrun.kernels.cpu.emitter import LANES

if TYPE_CHECKING:
    from llvmlite import ir

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
        """For more rows than a tile takes: widen the stretch into `room`."""
        with builder.if_then(builder.not_(alone)):
            builder.call(self._unpack, [weight, room, pairs])
        return builder.select(alone, weight, room)

    def choose_tiles(self, builder: ir.IRBuilder, row: ir.Value, alone: ir.Value, is_cached: ir.Value) -> ir.Value:
        """Of the lists [from memory, from a cache, from the buffer]."""
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
