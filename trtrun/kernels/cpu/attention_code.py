"""The code of paged attention in attention.py, as LLVM IR.

It knows instructions and how the store's tiles lie, which is told in attention.py. It does not know tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtrun.kernels.cpu.attention_form import (
    KERNEL,
    SCRATCH_BYTES_PER_KEY,
    TILE_QUERIES,
    TILE_TOKENS,
    Arguments,
    Form,
)
from trtrun.kernels.cpu.emitter import LANES, PAIR_BYTES, REGISTER_BYTES, Emitter, count
from trtrun.kernels.cpu.machine import BARRIER, NUM_THREADS, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

_LOWEST = -3.0e38


def attention_module(head_dim: int, form: Form) -> ir.Module:
    """A module whose function KERNEL takes Arguments, for heads of `head_dim` numbers, a multiple of 16."""
    code = _AttentionCode(head_dim, form)
    code.emit_kernel()
    return code.module


@dataclass
class _Query:
    """One query of a tile: its vector, where its output goes, the keys in (low, position] that it sees, and the sink of
    its head, sixteen times, where the form has sinks."""

    vector: ir.Value
    output: ir.Value
    position: ir.Value
    low: ir.Value
    sink: ir.Value | None


class _AttentionCode(Emitter):
    """Emits the kernel and its tiles for one head size."""

    def __init__(self, head_dim: int, form: Form) -> None:
        super().__init__(KERNEL, form.multiplies_bfloat16)
        self._head_dim, self._form = head_dim, form
        self._tile_bytes = TILE_TOKENS * head_dim * form.item_bytes
        floats = self.floats
        number = floats.element
        self._largest = self.declare("llvm.vector.reduce.fmax.v16f32", number, floats)
        self._sum = self.declare("llvm.vector.reduce.fadd.v16f32", number, number, floats)

    # --- the kernel: store the new keys and values, wait, then share rows, heads and queries out over the threads

    def emit_kernel(self) -> None:
        """Emit the function that the threads enter, and its tiles."""
        integer, small, most = self.integer, self.small, self._form.variants[-1]
        tiles = [self.emit_tile(queries) for queries in self._form.variants]
        thread_number, num_threads = self.declare(THREAD_NUMBER, small), self.declare(NUM_THREADS, small)
        barrier = self.declare(BARRIER, self.void)
        builder, (pointer,) = self.define(KERNEL, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread = builder.zext(builder.call(thread_number, []), integer)
        threads = builder.zext(builder.call(num_threads, []), integer)
        with builder.if_then(builder.icmp_unsigned("!=", builder.ptrtoint(field["key"], integer), integer(0))):
            self._emit_writes(builder, field, thread, threads)
            builder.call(barrier, [])
        vectors = builder.mul(field["queries"], field["group"])
        per_head = builder.sdiv(builder.add(vectors, integer(most - 1)), integer(most))
        per_row = builder.mul(per_head, field["kv_heads"])
        scratch_bytes = builder.mul(field["keys"], integer(SCRATCH_BYTES_PER_KEY))
        scratch = self.at(builder, field["scratch"], builder.mul(thread, scratch_bytes))
        with count(builder, thread, builder.mul(per_row, field["rows"]), threads) as item:
            row, rest = builder.sdiv(item, per_row), builder.srem(item, per_row)
            head = builder.sdiv(rest, per_head)
            first = builder.mul(builder.srem(rest, per_head), integer(most))
            left = builder.sub(vectors, first)
            number = integer(1)
            for queries in self._form.variants[:-1]:
                number = builder.add(number, builder.zext(builder.icmp_signed(">", left, integer(queries)), integer))
            self.call_one(builder, number, tiles, [pointer, row, head, first, scratch])
        builder.ret_void()

    def _emit_writes(
        self, builder: ir.IRBuilder, field: dict[str, ir.Value], thread: ir.Value, threads: ir.Value
    ) -> None:
        """Store this thread's share of the new keys and values.

        A token's numbers touch every cache line of its tile, so a run of tokens of one head goes to one thread: token
        by token, threads would take the lines from each other (six tokens of eight heads took 58 us, now 19).
        """
        integer = self.integer
        run = integer(TILE_TOKENS)
        per_head = builder.sdiv(builder.add(field["queries"], integer(TILE_TOKENS - 1)), run)
        per_row = builder.mul(per_head, field["kv_heads"])
        with count(builder, thread, builder.mul(per_row, field["rows"]), threads) as item:
            row, rest = builder.sdiv(item, per_row), builder.srem(item, per_row)
            head, start = builder.sdiv(rest, per_head), builder.mul(builder.srem(rest, per_head), run)
            stop = builder.add(start, run)
            stop = builder.select(builder.icmp_signed("<", stop, field["queries"]), stop, field["queries"])
            with count(builder, start, stop, 1) as query:
                position = self._position(builder, field, row, query)
                with builder.if_then(builder.icmp_signed(">=", position, integer(0))):
                    token = builder.add(builder.mul(row, field["queries"]), query)
                    self._emit_write(builder, field, token, row, head, position)

    def _position(self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value, query: ir.Value) -> ir.Value:
        offset = builder.add(builder.mul(row, field["row_stride"]), builder.mul(query, field["position_stride"]))
        return builder.load(self.at(builder, field["positions"], offset), typ=self.integer)

    def _tile_address(
        self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value, head: ir.Value, position: ir.Value
    ) -> ir.Value:
        """Where the tile of keys lies that holds `position` of a row."""
        integer = self.integer
        entry = builder.mul(builder.sdiv(position, field["block_size"]), integer(8))
        entry = builder.add(entry, builder.mul(row, field["table_stride"]))
        block = builder.load(self.at(builder, field["tables"], entry), typ=integer)
        place = builder.add(builder.mul(block, field["kv_heads"]), head)
        tiles_per_block = builder.sdiv(field["block_size"], integer(TILE_TOKENS))
        inside = builder.sdiv(builder.srem(position, field["block_size"]), integer(TILE_TOKENS))
        tile = builder.add(builder.mul(place, tiles_per_block), inside)
        return self.at(builder, field["store"], builder.mul(tile, integer(self._tile_bytes)))

    def _emit_write(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        token: ir.Value,
        row: ir.Value,
        head: ir.Value,
        position: ir.Value,
    ) -> None:
        """Put a token's key and value of one head into their tiles."""
        integer, form = self.integer, self._form
        tile = self._tile_address(builder, field, row, head, position)
        slot = builder.srem(position, integer(TILE_TOKENS))
        head_offset = builder.mul(head, integer(self._head_dim * form.item_bytes))
        source = self.at(builder, field["key"], builder.mul(token, field["key_stride"]))
        source = self.at(builder, source, head_offset)
        target = self.at(builder, tile, builder.mul(slot, integer(PAIR_BYTES)))
        with count(builder, integer(0), integer(self._head_dim // form.together), 1) as pair:
            value = builder.load(
                self.at(builder, source, builder.mul(pair, integer(PAIR_BYTES))), typ=self.small, align=form.item_bytes
            )
            builder.store(
                value, self.at(builder, target, builder.mul(pair, integer(TILE_TOKENS * PAIR_BYTES))), align=4
            )
        source = self.at(builder, field["value"], builder.mul(token, field["value_stride"]))
        source = self.at(builder, source, head_offset)
        group, member = builder.sdiv(slot, integer(form.together)), builder.srem(slot, integer(form.together))
        offset = builder.mul(group, integer(self._head_dim * PAIR_BYTES))
        offset = builder.add(offset, builder.mul(member, integer(form.item_bytes)))
        target = self.at(builder, self.at(builder, tile, field["values_offset"]), offset)
        kind = self._ir.IntType(8 * form.item_bytes)
        with count(builder, integer(0), integer(self._head_dim), 1) as number:
            place = self.at(builder, source, builder.mul(number, integer(form.item_bytes)))
            value = builder.load(place, typ=kind, align=form.item_bytes)
            place = self.at(builder, target, builder.mul(number, integer(PAIR_BYTES)))
            builder.store(value, place, align=form.item_bytes)

    # --- a tile: queries [first, first + n) of one row and KV head over the keys that any of them sees

    def emit_tile(self, queries: int) -> ir.Function:
        """tile(arguments, row, head, first, scratch) for `queries` queries; those past the last repeat it."""
        integer = self.integer
        builder, (pointer, row, head, first, scratch) = self.define(
            f"tile_{queries}", self.pointer, integer, integer, integer, self.pointer
        )
        builder.function.linkage = "internal"
        field = self.read(builder, pointer, Arguments)
        members = [self._query(builder, field, row, head, builder.add(first, integer(n))) for n in range(queries)]
        last, low = members[0].position, members[0].low
        for member in members[1:]:
            last = builder.select(builder.icmp_signed(">", member.position, last), member.position, last)
            low = builder.select(builder.icmp_signed("<", member.low, low), member.low, low)
        begin = builder.add(low, integer(1))
        begin = builder.select(builder.icmp_signed("<", begin, integer(0)), integer(0), begin)
        begin = builder.sub(begin, builder.srem(begin, integer(TILE_TOKENS)))
        end = builder.add(last, integer(1))
        weights = scratch
        if not self._form.is_float32:
            weights = self.at(builder, scratch, builder.mul(field["keys"], integer(4 * TILE_QUERIES)))
        highest = [self.room(builder) for _ in members]
        for member, place in zip(members, highest, strict=True):
            builder.store(self.spread_constant(_LOWEST) if member.sink is None else member.sink, place)
        sums = [self.room(builder) for _ in members]
        with count(builder, begin, end, TILE_TOKENS) as key:
            tile = self._tile_address(builder, field, row, head, key)
            for place in sums:
                builder.store(self.zeros(), place)
            self._emit_scores(builder, members, sums, tile)
            for number, member in enumerate(members):
                score = builder.fmul(builder.load(sums[number], typ=self.floats), self.spread(builder, field["scale"]))
                if self._form.caps_scores:
                    score = self._cap(builder, score, field["soft_cap"])
                score = self._hide(builder, score, member, key)
                builder.store(score, self._lane(builder, scratch, field["keys"], number, key, 4), align=4)
                old = builder.load(highest[number], typ=self.floats)
                builder.store(builder.select(builder.fcmp_ordered(">", score, old), score, old), highest[number])
        factors = [
            self._emit_softmax(
                builder, field["keys"], scratch, weights, number, (begin, end), highest[number], member.sink
            )
            for number, member in enumerate(members)
        ]
        for start in range(0, self._head_dim, self._form.chunk):
            self._emit_outputs(builder, field, members, factors, weights, row, head, (begin, end), start)
        builder.ret_void()
        return builder.function

    def _query(
        self, builder: ir.IRBuilder, field: dict[str, ir.Value], row: ir.Value, head: ir.Value, index: ir.Value
    ) -> _Query:
        """Query `index` of a row and KV head: positions first, the heads of the group within a position."""
        integer = self.integer
        final = builder.sub(builder.mul(field["queries"], field["group"]), integer(1))
        index = builder.select(builder.icmp_signed("<", index, final), index, final)
        query, member = builder.sdiv(index, field["group"]), builder.srem(index, field["group"])
        token = builder.add(builder.mul(row, field["queries"]), query)
        query_head = builder.add(builder.mul(head, field["group"]), member)
        offset = builder.mul(query_head, integer(self._head_dim * self._form.item_bytes))
        sink = None
        if self._form.has_sinks:
            place = self.at(builder, field["sinks"], builder.mul(query_head, integer(4)))
            sink = self.spread_number(builder, place)
        position = self._position(builder, field, row, query)
        # Padding sees key 0 alone: its output has no meaning, but must be a number.
        position = builder.select(builder.icmp_signed("<", position, integer(0)), integer(0), position)
        vector = self.at(builder, field["query"], builder.mul(token, field["query_stride"]))
        output = self.at(builder, field["output"], builder.mul(token, field["output_stride"]))
        low = builder.sub(position, field["window"])
        return _Query(self.at(builder, vector, offset), self.at(builder, output, offset), position, low, sink)

    def _lane(
        self, builder: ir.IRBuilder, base: ir.Value, keys: ir.Value, number: int, key: ir.Value, size: int
    ) -> ir.Value:
        """Where the score or weight (`size` bytes) of query `number` for `key` lies, [queries, keys]."""
        index = builder.add(builder.mul(keys, self.integer(number)), key)
        return self.at(builder, base, builder.mul(index, self.integer(size)))

    def _emit_scores(self, builder: ir.IRBuilder, members: list[_Query], sums: list[ir.Value], tile: ir.Value) -> None:
        """Add to `sums` the products of the queries with the sixteen keys of a tile."""
        integer = self.integer
        with count(builder, integer(0), integer(self._head_dim // self._form.together), 1) as pair:
            line = self.at(builder, tile, builder.mul(pair, integer(TILE_TOKENS * PAIR_BYTES)))
            keys = self._load(builder, line)
            offset = builder.mul(pair, integer(PAIR_BYTES))
            for member, place in zip(members, sums, strict=True):
                self._add(builder, place, self.at(builder, member.vector, offset), keys)

    def _load(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """Sixteen pairs of bfloat16, or sixteen float32."""
        return builder.load(address, typ=self.floats if self._form.is_float32 else self.pairs, align=16)

    def _add(self, builder: ir.IRBuilder, place: ir.Value, address: ir.Value, others: ir.Value) -> None:
        """Add to the sixteen sums at `place` the pair or number at `address` times `others`, from `_load`."""
        if self._form.is_float32:
            self.add_product(builder, place, self.spread_number(builder, address), others)
        else:
            self.add_dot(builder, place, self.spread_pair(builder, address), others)

    def _cap(self, builder: ir.IRBuilder, score: ir.Value, cap: ir.Value) -> ir.Value:
        """cap * tanh(score / cap) of sixteen scores: (1 - e) / (1 + e) with e = exp(-2 |score| / cap), and their
        sign."""
        one, sign = self.spread_constant(1.0), self.numbers([-(1 << 31)] * LANES)
        steepness = builder.fdiv(self._ir.Constant(cap.type, -2.0), cap)
        bits = builder.bitcast(score, self.lanes)
        size = builder.bitcast(builder.and_(bits, builder.not_(sign)), self.floats)
        power = self.exp(builder, builder.fmul(size, self.spread(builder, steepness)))
        quotient = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        capped = builder.bitcast(builder.fmul(quotient, self.spread(builder, cap)), self.lanes)
        return builder.bitcast(builder.or_(capped, builder.and_(bits, sign)), self.floats)

    def _hide(self, builder: ir.IRBuilder, score: ir.Value, member: _Query, key: ir.Value) -> ir.Value:
        """The scores of sixteen keys from `key` on, lowest where the query does not see the key."""
        small = self.small
        numbers = builder.add(self.spread(builder, builder.trunc(key, small)), self.numbers(range(LANES)))
        position = self.spread(builder, builder.trunc(member.position, small))
        low = self.spread(builder, builder.trunc(member.low, small))
        seen = builder.and_(builder.icmp_signed("<=", numbers, position), builder.icmp_signed(">", numbers, low))
        return builder.select(seen, score, self.spread_constant(_LOWEST))

    def _emit_softmax(
        self,
        builder: ir.IRBuilder,
        keys: ir.Value,
        scratch: ir.Value,
        weights: ir.Value,
        number: int,
        seen: tuple[ir.Value, ir.Value],
        highest: ir.Value,
        sink: ir.Value | None,
    ) -> ir.Value:
        """exp(score - highest) of query `number` into `weights`, in the store's dtype; returns one over their float32
        sum, which begins with the sink's."""
        float_type = self.floats.element
        top = self.spread(builder, builder.call(self._largest, [builder.load(highest, typ=self.floats)]))
        total = self.room(builder)
        builder.store(self.zeros(), total)
        with count(builder, *seen, TILE_TOKENS) as key:
            score = builder.load(self._lane(builder, scratch, keys, number, key, 4), typ=self.floats, align=4)
            weight = self.exp(builder, builder.fsub(score, top))
            builder.store(builder.fadd(builder.load(total, typ=self.floats), weight), total)
            size = self._form.item_bytes
            rounded = weight if self._form.is_float32 else self.round(builder, weight)
            builder.store(rounded, self._lane(builder, weights, keys, number, key, size), align=size)
        first = self._ir.Constant(float_type, 0.0)
        if sink is not None:
            first = builder.extract_element(self.exp(builder, builder.fsub(sink, top)), self.small(0))
        added = builder.call(self._sum, [first, builder.load(total, typ=self.floats)])
        return self.spread(builder, builder.fdiv(self._ir.Constant(float_type, 1.0), added))

    def _emit_outputs(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        members: list[_Query],
        factors: list[ir.Value],
        weights: ir.Value,
        row: ir.Value,
        head: ir.Value,
        keys: tuple[ir.Value, ir.Value],
        start: int,
    ) -> None:
        """Numbers from `start` on of every query's output: the weighted sum of values, times its factor."""
        integer, form = self.integer, self._form
        registers = min(form.chunk, self._head_dim - start) // LANES
        sums = [[self.room(builder) for _ in range(registers)] for _ in members]
        for place in (place for places in sums for place in places):
            builder.store(self.zeros(), place)
        with count(builder, *keys, TILE_TOKENS) as key:
            tile = self.at(builder, self._tile_address(builder, field, row, head, key), field["values_offset"])
            size = form.item_bytes
            sources = [self._lane(builder, weights, field["keys"], number, key, size) for number in range(len(members))]
            with count(builder, integer(0), integer(TILE_TOKENS // form.together), 1) as pair:
                line = self.at(builder, tile, builder.mul(pair, integer(self._head_dim * PAIR_BYTES)))
                values = [
                    self._load(builder, self.at(builder, line, start * PAIR_BYTES + part * REGISTER_BYTES))
                    for part in range(registers)
                ]
                offset = builder.mul(pair, integer(PAIR_BYTES))
                for source, places in zip(sources, sums, strict=True):
                    for place, value in zip(places, values, strict=True):
                        self._add(builder, place, self.at(builder, source, offset), value)
        for member, places, factor in zip(members, sums, factors, strict=True):
            for part, place in enumerate(places):
                result = builder.fmul(builder.load(place, typ=self.floats), factor)
                target = self.at(builder, member.output, (start + part * LANES) * form.item_bytes)
                rounded = result if form.is_float32 else self.round(builder, result)
                builder.store(rounded, target, align=form.item_bytes)
