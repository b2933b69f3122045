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
    """Emits the kernel.

    Attributes:
        form: of it.
        item_bytes: of a number of a matrix in memory.
    """

    def __init__(self, form: Form) -> None:
        super().__init__(CARRY_ON, form.kind == MULTIPLIES_BFLOAT16)
        self.form = form
        self.item_bytes = 4 if form.dtype == "float32" else 2

    def emit_shares(self, unit: ir.Function) -> None:
        """Emit the loop over this thread's share of the columns of all matrices."""
        integer = self.integer
        builder, (pointer,) = self.define(CARRY_ON, self.pointer)
        field = self.read(builder, pointer, Arguments)
        thread, threads = self.emit_thread(builder)
        units = builder.mul(builder.mul(field["rows"], field["values"]), self._count_blocks(builder, field))
        start = builder.sdiv(builder.mul(thread, units), threads)
        stop = builder.sdiv(builder.mul(builder.add(thread, integer(1)), units), threads)
        room_bytes = builder.mul(field["key_dim"], integer(self.form.registers * REGISTER_BYTES))
        room = self.at(builder, field["scratch"], builder.mul(thread, room_bytes))
        with count(builder, start, stop, 1) as number:
            builder.call(unit, [pointer, number, room])
        builder.ret_void()

    def emit_unit(self) -> ir.Function:
        """Emit a function of the arguments, a number and room for some columns of a matrix: all tokens of its row go
        through them, one after the other."""
        builder, (pointer, number, room) = self.define("unit", self.pointer, self.integer, self.pointer)
        integer, field = self.integer, self.read(builder, pointer, Arguments)
        blocks = self._count_blocks(builder, field)
        matrix, block = builder.sdiv(number, blocks), builder.srem(number, blocks)
        row, head = builder.sdiv(matrix, field["values"]), builder.srem(matrix, field["values"])
        line_at = self.at(builder, field["lines"], builder.mul(row, integer(ctypes.sizeof(Line))))
        line = self.read(builder, line_at, Line)
        columns = _Columns(self, builder, field, row, head, builder.mul(block, integer(self.form.registers * LANES)))
        state, snapshot = columns.matrix("matrices", line["slot"]), columns.matrix("snapshots", line["snapshot"])
        known = columns.load(state, room)

        def keep(passed: ir.Value) -> None:
            for place, when in ((state, "settled"), (snapshot, "saved")):
                with builder.if_then(builder.icmp_signed("==", passed, line[when])):
                    columns.store(room, place)

        keep(integer(0))
        with count(builder, integer(0), line["tokens"], 1) as token:
            behind = builder.add(token, integer(1))
            is_last = builder.icmp_signed("==", behind, line["tokens"])
            columns.go_through(room, known, token, builder.select(is_last, token, behind))
            keep(behind)
        builder.ret_void()
        return builder.function

    def _count_blocks(self, builder: ir.IRBuilder, field: dict[str, ir.Value]) -> ir.Value:
        """How often a row of a matrix has so many columns as are gone through together."""
        columns = self.form.registers * LANES
        return builder.sdiv(builder.add(field["value_dim"], self.integer(columns - 1)), self.integer(columns))

    def widen(self, builder: ir.IRBuilder, narrow: ir.Value) -> ir.Value:
        """Sixteen numbers of two bytes of a matrix in memory, as float32."""
        if self.form.dtype == "bfloat16":
            return self.extend(builder, narrow)
        return builder.fpext(narrow, self.floats)

    def narrow(self, builder: ir.IRBuilder, state: ir.Value) -> ir.Value:
        """Sixteen float32 in the dtype of matrices in memory, of two bytes."""
        return self.round(builder, state) if self.form.dtype == "bfloat16" else builder.fptrunc(state, self.float16s)


class _Columns:
    """Some columns of a head's matrix, and what tokens of its row bring to them.

    Args:
        code: what is emitted to.
        builder: where.
        field: of Arguments.
        row, head, column: of the matrix, and the first of the columns.
    """

    def __init__(
        self,
        code: _DeltaNetCode,
        builder: ir.IRBuilder,
        field: dict[str, ir.Value],
        row: ir.Value,
        head: ir.Value,
        column: ir.Value,
    ) -> None:
        self._code, self._builder, self._field, self._head, self._column = code, builder, field, head, column
        self._narrows, self._registers = code.form.dtype != "float32", range(code.form.registers)
        self._mask: ir.Value | None = None
        if not code.form.is_whole:
            rest = builder.trunc(builder.sub(field["value_dim"], column), code.small)
            self._mask = builder.icmp_signed("<", code.numbers(range(LANES)), code.spread(builder, rest))
        of_key = code.at(builder, field["key_of_value"], builder.mul(head, code.integer(8)))
        key_head, zero = builder.load(of_key, typ=code.integer), code.integer(0)
        first = builder.mul(row, field["most"])
        self._vectors: dict[str, tuple[ir.Value, ir.Value]] = {}
        for name, heads, own, size, inside in (
            ("query", "keys", key_head, field["key_dim"], zero),
            ("key", "keys", key_head, field["key_dim"], zero),
            ("value", "values", head, field["value_dim"], column),
            ("read", "values", head, field["value_dim"], column),
            ("factors", "values", head, code.integer(2), zero),
        ):
            number = builder.add(builder.mul(first, field[heads]), own)
            start = self._numbers_at(field[name], builder.add(builder.mul(number, size), inside))
            self._vectors[name] = start, builder.mul(field[heads], size)

    def matrix(self, name: str, place: ir.Value) -> ir.Value:
        """The address of the columns in one of the places of `matrices` or `snapshots`."""
        builder, field = self._builder, self._field
        number = builder.add(builder.mul(place, field["values"]), self._head)
        first = builder.mul(builder.mul(number, field["key_dim"]), field["value_dim"])
        offset = builder.mul(builder.add(first, self._column), self._code.integer(self._code.item_bytes))
        return self._code.at(builder, field[name], offset)

    def load(self, matrix: ir.Value, room: ir.Value) -> list[ir.Value]:
        """Load the columns from memory to `room`; returns where the sums are that the first token's key makes."""
        code, builder = self._code, self._builder
        known = self._zeros()
        key = self._vector("key", code.integer(0))
        with count(builder, code.integer(0), self._field["key_dim"], 1) as index:
            factor = code.spread_number(builder, self._numbers_at(key, index))
            for register, (there, own) in enumerate(self._row(index, matrix, room)):
                if self._narrows:
                    kind = code.halves if code.form.dtype == "bfloat16" else code.float16s
                    state = code.widen(builder, builder.load(there, typ=kind, align=2))
                else:
                    state = self._load(there)
                builder.store(state, own, align=4)
                code.add_product(builder, known[register], factor, state)
        return known

    def store(self, room: ir.Value, matrix: ir.Value) -> None:
        """Store the columns from `room` to memory."""
        code, builder = self._code, self._builder
        with count(builder, code.integer(0), self._field["key_dim"], 1) as index:
            for there, own in self._row(index, matrix, room):
                state = builder.load(own, typ=code.floats, align=4)
                if self._narrows:
                    builder.store(code.narrow(builder, state), there, align=2)
                else:
                    self._store(state, there)

    def go_through(self, room: ir.Value, known: list[ir.Value], token: ir.Value, following: ir.Value) -> None:
        """Have a token change the columns in `room`, of which `known` has the sums that its key makes; and leave there
        the sums that the next one's makes."""
        code, builder = self._code, self._builder
        of_factors, value = self._vector("factors", token), self._vector("value", token)
        keeps, corrects = (code.spread_number(builder, code.at(builder, of_factors, at)) for at in (0, 4))
        changes = []
        for register, place in enumerate(known):
            told = self._load(code.at(builder, value, register * REGISTER_BYTES))
            left = builder.fmul(keeps, builder.load(place, typ=code.floats))
            changes.append(builder.fmul(builder.fsub(told, left), corrects))
            builder.store(code.zeros(), place)
        answers = self._zeros()
        vectors = [self._vector("query", token), self._vector("key", token), self._vector("key", following)]
        with count(builder, code.integer(0), self._field["key_dim"], 1) as index:
            query, key, next_key = (code.spread_number(builder, self._numbers_at(at, index)) for at in vectors)
            for register, (_, own) in enumerate(self._row(index, room, room)):
                faded = builder.fmul(keeps, builder.load(own, typ=code.floats, align=4))
                state = code.multiply_and_add(builder, key, changes[register], faded)
                if self._narrows:
                    state = code.widen(builder, code.narrow(builder, state))
                builder.store(state, own, align=4)
                code.add_product(builder, answers[register], query, state)
                code.add_product(builder, known[register], next_key, state)
        read = self._vector("read", token)
        for register, place in enumerate(answers):
            self._store(builder.load(place, typ=code.floats), code.at(builder, read, register * REGISTER_BYTES))

    def _zeros(self) -> list[ir.Value]:
        """Room for a sum of each column."""
        places = [self._code.room(self._builder) for _ in self._registers]
        for place in places:
            self._builder.store(self._code.zeros(), place)
        return places

    def _row(self, index: ir.Value, matrix: ir.Value, room: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """The addresses of a row's registers in memory and in `room`."""
        code, builder, registers = self._code, self._builder, self._code.form.registers
        numbers = builder.mul(index, self._field["value_dim"])
        there = code.at(builder, matrix, builder.mul(numbers, code.integer(code.item_bytes)))
        own = code.at(builder, room, builder.mul(index, code.integer(registers * REGISTER_BYTES)))
        steps = LANES * code.item_bytes, REGISTER_BYTES
        return [
            (code.at(builder, there, register * steps[0]), code.at(builder, own, register * steps[1]))
            for register in self._registers
        ]

    def _vector(self, name: str, token: ir.Value) -> ir.Value:
        """The address of a vector of a token."""
        start, stride = self._vectors[name]
        return self._numbers_at(start, self._builder.mul(token, stride))

    def _numbers_at(self, start: ir.Value, numbers: ir.Value) -> ir.Value:
        """The address so many float32 behind another."""
        return self._code.at(self._builder, start, self._builder.mul(numbers, self._code.integer(4)))

    def _load(self, at: ir.Value) -> ir.Value:
        """Sixteen float32, those of the columns that there are."""
        if self._mask is not None:
            return self._code.load_some(self._builder, at, self._mask)
        return self._builder.load(at, typ=self._code.floats, align=4)

    def _store(self, value: ir.Value, at: ir.Value) -> None:
        """Sixteen float32, likewise."""
        if self._mask is not None:
            self._code.store_some(self._builder, value, at, self._mask)
        else:
            self._builder.store(value, at, align=4)
