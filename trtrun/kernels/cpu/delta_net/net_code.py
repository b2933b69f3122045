"""The code of the recurrence in net.py, as LLVM IR."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trtrun.kernels.cpu.emitter import LANES, REGISTER_BYTES, Emitter, count
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16

if TYPE_CHECKING:
    from llvmlite import ir

CARRY_ON = "carry_on"


class Line(ctypes.Structure):
    """A row: the place of its state, how many tokens go through it, behind how many of them it is written back, which
    snapshot is taken, and behind how many tokens; -1 for none."""

    _fields_: ClassVar = [
        ("slot", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("settled", ctypes.c_int64),
        ("snapshot", ctypes.c_int64),
        ("saved", ctypes.c_int64),
    ]


class Arguments(ctypes.Structure):
    """What the kernel gets, for `rows` rows with room for `most` tokens each, without gaps.

    `lines` are Lines. `query` and `key` are float32 [rows * most, keys, key_dim], `value` and `read` [rows * most,
    values, value_dim], `factors` [rows * most, values, 2]: what of its matrix a head keeps, and how much it corrects.
    `key_of_value` is int64 [values]. `matrices` and `snapshots` are [places, values, key_dim, value_dim] of the form.
    `scratch` has key_dim times the form's registers for each thread.
    """

    _fields_: ClassVar = [
        ("lines", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("key_of_value", ctypes.c_void_p),
        ("matrices", ctypes.c_void_p),
        ("snapshots", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
    ]


class Form(NamedTuple):
    """How matrices are gone through.

    Attributes:
        registers: of sixteen columns that tokens go through before others do; bits do not depend on it.
        is_whole: whether rows of a matrix are a multiple of so many; otherwise `registers` is 1.
        dtype: of matrices in memory: "float32", "float16" or "bfloat16", to which each token rounds.
        kind: of processor, as `machine.KINDS` has them.
    """

    registers: int
    is_whole: bool
    dtype: str
    kind: str


def delta_net_module(form: Form) -> ir.Module:
    """A module whose function CARRY_ON takes Arguments."""
    code = _DeltaNetCode(form)
    code.emit_shares(code.emit_unit())
    return code.module


class _DeltaNetCode(Emitter):
    """Emits the kernel."""

    def __init__(self, form: Form) -> None:
        super().__init__(CARRY_ON, form.kind == MULTIPLIES_BFLOAT16)
        self._form = form
        self._item_bytes = 4 if form.dtype == "float32" else 2
        self._columns = form.registers * LANES

    def emit_shares(self, unit: ir.Function) -> None:
        """Emit the loop over this thread's share of the columns of all matrices."""
        integer = self.integer
        builder, (pointer,) = self.define(CARRY_ON, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread, threads = self.emit_thread(builder)
        units = builder.mul(builder.mul(field["rows"], field["values"]), self._count_blocks(builder, field))
        start = builder.sdiv(builder.mul(thread, units), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), units), threads)
        room_bytes = builder.mul(field["key_dim"], integer(self._form.registers * REGISTER_BYTES))
        room = self.at(builder, field["scratch"], builder.mul(thread, room_bytes))
        with count(builder, start, stop, 1) as number:
            builder.call(unit, [pointer, number, room])
        builder.ret_void()

    def emit_unit(self) -> ir.Function:
        """Emit a function of the arguments, a number and room for some columns of a matrix: all tokens of its row go
        through them, one after the other."""
        builder, (pointer, number, room) = self.define("unit", self.pointer, self.integer, self.pointer)
        integer, field = self.integer, self.read(builder, pointer, Arguments)
        matrix, block = self._divide(builder, number, self._count_blocks(builder, field))
        row, head = self._divide(builder, matrix, field["values"])
        column = builder.mul(block, integer(self._columns))
        line_at = self.at(builder, field["lines"], builder.mul(row, integer(ctypes.sizeof(Line))))
        line = self.read(builder, line_at, Line)
        key_head = builder.load(self.at(builder, field["key_of_value"], builder.mul(head, integer(8))), typ=integer)
        first = builder.mul(row, field["most"])
        tokens = _Tokens(self, builder, field, first, head, key_head, column)
        mask = self._mask(builder, field, column)
        places = [
            self._matrix_at(builder, field, name, line[of_line], head, column)
            for name, of_line in (("matrices", "slot"), ("snapshots", "snapshot"))
        ]
        known = [self.room(builder) for _ in range(self._form.registers)]
        self._load(builder, field, (places[0], room), tokens.vector("key", integer(0)), known, mask)

        def keep(passed: ir.Value) -> None:
            for place, when in zip(places, ("settled", "saved"), strict=True):
                with builder.if_then(builder.icmp_signed("==", passed, line[when])):
                    self._store(builder, field, (room, place), mask)

        keep(integer(0))
        with count(builder, integer(0), line["tokens"], 1) as token:
            self._go_through(builder, field, (tokens, token, line["tokens"]), room, known, mask)
            keep(builder.add(token, integer(1)))
        builder.ret_void()
        return builder.function

    def _go_through(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        which: tuple[_Tokens, ir.Value, ir.Value],
        room: ir.Value,
        known: list[ir.Value],
        mask: ir.Value | None,
    ) -> None:
        """Have one token change the columns in `room`, of which `known` has the sums that its key makes; and leave
        there the sums that the next one's makes."""
        (tokens, token, number), integer = which, self.integer
        behind = builder.add(token, integer(1))
        following = builder.select(builder.icmp_signed("<", behind, number), behind, token)
        keeps, corrects = (self.spread_number(builder, place) for place in tokens.factors(token))
        value, changes = tokens.vector("value", token), []
        for register, place in enumerate(known):
            told = self._load_numbers(builder, self.at(builder, value, register * REGISTER_BYTES), mask)
            left = builder.fmul(keeps, builder.load(place, typ=self.floats))
            changes.append(builder.fmul(builder.fsub(told, left), corrects))
        answers = [self.room(builder) for _ in known]
        for place in (*known, *answers):
            builder.store(self.zeros(), place)
        vectors = [tokens.vector("query", token), tokens.vector("key", token), tokens.vector("key", following)]
        with count(builder, integer(0), field["key_dim"], 1) as index:
            offset = builder.mul(index, integer(4))
            query, key, next_key = (self.spread_number(builder, self.at(builder, at, offset)) for at in vectors)
            own = self.at(builder, room, builder.mul(index, integer(self._form.registers * REGISTER_BYTES)))
            for register, change in enumerate(changes):
                place = self.at(builder, own, register * REGISTER_BYTES)
                faded = builder.fmul(keeps, builder.load(place, typ=self.floats, align=4))
                state = self._rounded(builder, self.multiply_and_add(builder, key, change, faded))
                builder.store(state, place, align=4)
                self.add_product(builder, answers[register], query, state)
                self.add_product(builder, known[register], next_key, state)
        read = tokens.vector("read", token)
        for register, place in enumerate(answers):
            answer, at = builder.load(place, typ=self.floats), self.at(builder, read, register * REGISTER_BYTES)
            self._store_numbers(builder, answer, at, mask)

    def _load(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        places: tuple[ir.Value, ir.Value],
        key: ir.Value,
        known: list[ir.Value],
        mask: ir.Value | None,
    ) -> None:
        """Load columns from the first place to the second, and leave in `known` the sums that a key makes."""
        for place in known:
            builder.store(self.zeros(), place)
        with count(builder, self.integer(0), field["key_dim"], 1) as index:
            factor = self.spread_number(builder, self.at(builder, key, builder.mul(index, self.integer(4))))
            source, target = self._row_at(builder, field, index, places[0]), self._own_at(builder, index, places[1])
            for register, total in enumerate(known):
                at = self.at(builder, source, register * LANES * self._item_bytes)
                state = self._widened(builder, at, mask)
                builder.store(state, self.at(builder, target, register * REGISTER_BYTES), align=4)
                self.add_product(builder, total, factor, state)

    def _store(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        places: tuple[ir.Value, ir.Value],
        mask: ir.Value | None,
    ) -> None:
        """Store columns at the first place to the second."""
        with count(builder, self.integer(0), field["key_dim"], 1) as index:
            source, target = self._own_at(builder, index, places[0]), self._row_at(builder, field, index, places[1])
            for register in range(self._form.registers):
                state = builder.load(
                    self.at(builder, source, register * REGISTER_BYTES), typ=self.floats, align=4
                )  # fmt: skip
                at = self.at(builder, target, register * LANES * self._item_bytes)
                if self._form.dtype == "float32":
                    self._store_numbers(builder, state, at, mask)
                else:
                    builder.store(self._narrow(builder, state), at, align=2)

    def _own_at(self, builder: ir.IRBuilder, index: ir.Value, room: ir.Value) -> ir.Value:
        return self.at(builder, room, builder.mul(index, self.integer(self._form.registers * REGISTER_BYTES)))

    def _row_at(self, builder: ir.IRBuilder, field: dict[str, ir.Value], index: ir.Value, matrix: ir.Value) -> ir.Value:
        numbers = builder.mul(index, field["value_dim"])
        return self.at(builder, matrix, builder.mul(numbers, self.integer(self._item_bytes)))

    def _matrix_at(
        self,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        name: str,
        place: ir.Value,
        head: ir.Value,
        column: ir.Value,
    ) -> ir.Value:
        """Where a head's matrix has a column first."""
        matrix = builder.add(builder.mul(place, field["values"]), head)
        numbers = builder.mul(builder.mul(matrix, field["key_dim"]), field["value_dim"])
        offset = builder.mul(builder.add(numbers, column), self.integer(self._item_bytes))
        return self.at(builder, field[name], offset)

    def _count_blocks(self, builder: ir.IRBuilder, field: dict[str, ir.Value]) -> ir.Value:
        """How often a row of a matrix has so many columns as are gone through together."""
        rounded_up = builder.add(field["value_dim"], self.integer(self._columns - 1))
        return builder.sdiv(rounded_up, self.integer(self._columns))

    def _divide(self, builder: ir.IRBuilder, number: ir.Value, divisor: ir.Value) -> tuple[ir.Value, ir.Value]:
        return builder.sdiv(number, divisor), builder.srem(number, divisor)

    def _mask(self, builder: ir.IRBuilder, field: dict[str, ir.Value], column: ir.Value) -> ir.Value | None:
        """Which of sixteen columns there are; None where all are."""
        if self._form.is_whole:
            return None
        rest = builder.trunc(builder.sub(field["value_dim"], column), self.small)
        return builder.icmp_signed("<", self.numbers(range(LANES)), self.spread(builder, rest))

    def _load_numbers(self, builder: ir.IRBuilder, at: ir.Value, mask: ir.Value | None) -> ir.Value:
        if mask is not None:
            return self.load_some(builder, at, mask)
        return builder.load(at, typ=self.floats, align=4)

    def _store_numbers(self, builder: ir.IRBuilder, value: ir.Value, at: ir.Value, mask: ir.Value | None) -> None:
        if mask is not None:
            self.store_some(builder, value, at, mask)
        else:
            builder.store(value, at, align=4)

    def _widened(self, builder: ir.IRBuilder, at: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Sixteen numbers of a matrix in memory, as float32."""
        if self._form.dtype == "float32":
            return self._load_numbers(builder, at, mask)
        if self._form.dtype == "bfloat16":
            return self.load_halves(builder, at, self.integer(0))
        return builder.fpext(builder.load(at, typ=self.float16s, align=2), self.floats)

    def _narrow(self, builder: ir.IRBuilder, state: ir.Value) -> ir.Value:
        """Sixteen float32 in the dtype of matrices in memory, of two bytes."""
        if self._form.dtype == "bfloat16":
            return self.round(builder, state)
        return builder.fptrunc(state, self.float16s)

    def _rounded(self, builder: ir.IRBuilder, state: ir.Value) -> ir.Value:
        """Sixteen float32, rounded to the dtype of matrices in memory."""
        if self._form.dtype == "float32":
            return state
        narrow = self._narrow(builder, state)
        if self._form.dtype == "bfloat16":
            return self.extend(builder, narrow)
        return builder.fpext(narrow, self.floats)


class _Tokens:
    """Where the vectors of a row's tokens lie, of one head and from one of its columns on."""

    def __init__(
        self,
        code: Emitter,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        first: ir.Value,
        head: ir.Value,
        key_head: ir.Value,
        column: ir.Value,
    ) -> None:
        self._code, self._builder = code, builder
        zero, four = code.integer(0), code.integer(4)
        self._starts: dict[str, ir.Value] = {}
        self._strides: dict[str, ir.Value] = {}
        for name, heads, own, size, inside in (
            ("query", "keys", key_head, field["key_dim"], zero),
            ("key", "keys", key_head, field["key_dim"], zero),
            ("value", "values", head, field["value_dim"], column),
            ("read", "values", head, field["value_dim"], column),
            ("factors", "values", head, code.integer(2), zero),
        ):
            number = builder.add(builder.mul(first, field[heads]), own)
            numbers = builder.add(builder.mul(number, size), inside)
            self._starts[name] = code.at(builder, field[name], builder.mul(numbers, four))
            self._strides[name] = builder.mul(builder.mul(field[heads], size), four)

    def vector(self, name: str, token: ir.Value) -> ir.Value:
        """The address of one of a token."""
        return self._code.at(self._builder, self._starts[name], self._builder.mul(token, self._strides[name]))

    def factors(self, token: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The addresses of what a head keeps as the token comes, and of how much it corrects."""
        at = self.vector("factors", token)
        return at, self._code.at(self._builder, at, 4)
