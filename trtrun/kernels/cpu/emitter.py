"""What kernels are written with: types, addresses and instructions, over llvmlite's IRBuilder.

It knows LLVM IR. It does not know what a kernel computes or how it is run (machine.py).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trtrun.kernels.cpu.machine import NUM_THREADS, THREAD_NUMBER

if TYPE_CHECKING:
    from llvmlite import ir

LANES = 16
"""Numbers of 32 bits in a register."""
REGISTER_BYTES = 64
PAIR_BYTES = 4
"""Two bfloat16, what one lane of a dot product takes."""

_LOG2_E = math.log2(math.e)
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194440e-4
_EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""exp on [-ln 2 / 2, ln 2 / 2] as in the Cephes library (expf); ln 2 in two parts that subtract without error."""
_SMALLEST_EXPONENT = -87.0


class Emitter:
    """Types and instructions in one module."""

    def __init__(self, name: str, multiplies_bfloat16: bool = True) -> None:
        """Start a module `name`: for processors with AVX-512 BF16, or for those that do not multiply bfloat16. Where
        registers are half as wide LLVM makes two of one."""
        from llvmlite import ir

        class BFloat(ir.Type):  # type: ignore[misc]
            """LLVM's bfloat, which llvmlite has no class for."""

            intrinsic_name = "bf16"

            def _to_string(self) -> str:
                return "bfloat"

        self._ir = ir
        self.module = ir.Module(name=name)
        self.integer, self.small, self.bit, self.byte = (ir.IntType(bits) for bits in (64, 32, 1, 8))
        self.pointer, self.void = ir.PointerType(), ir.VoidType()
        self.floats = ir.VectorType(ir.FloatType(), LANES)
        # Without the instructions bfloat16 is an integer of 16 bits: LLVM would call a library for each bfloat.
        half = BFloat() if multiplies_bfloat16 else ir.IntType(16)
        self.halves, self.pairs = ir.VectorType(half, LANES), ir.VectorType(half, 2 * LANES)
        self.float16s = ir.VectorType(ir.HalfType(), LANES)
        self.lanes = ir.VectorType(self.small, LANES)
        floats, small = self.floats, self.small
        self._dot: ir.Function | None = None
        self._round: ir.Function | None = None
        if multiplies_bfloat16:
            self._dot = self.declare("llvm.x86.avx512bf16.dpbf16ps.512", floats, floats, self.pairs, self.pairs)
            self._round = self.declare("llvm.x86.avx512bf16.cvtneps2bf16.512", self.halves, floats)
        self._fma = self.declare("llvm.fma.v16f32", floats, floats, floats, floats)
        self._nearest = self.declare("llvm.rint.v16f32", floats, floats)
        self._masked_load: ir.Function | None = None
        self._stores: dict[ir.Type, ir.Function] = {}
        self._prefetch = self.declare("llvm.prefetch.p0", self.void, self.pointer, small, small, small)

    def declare(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        """A function defined elsewhere: an intrinsic, or a symbol that `machine.compile_kernels` binds."""
        return self._ir.Function(self.module, self._ir.FunctionType(result, arguments), name)

    def define(self, name: str, *arguments: ir.Type) -> tuple[ir.IRBuilder, Sequence[ir.Value]]:
        """Start a function without a result: where to emit its body, and its arguments."""
        function = self._ir.Function(self.module, self._ir.FunctionType(self.void, arguments), name)
        return self._ir.IRBuilder(function.append_basic_block("entry")), function.args

    def emit_thread(self, builder: ir.IRBuilder) -> tuple[ir.Value, ir.Value]:
        """This thread's number, and how many there are."""
        functions = self.module.globals
        kinds = (
            functions[name] if name in functions else self.declare(name, self.small)
            for name in (THREAD_NUMBER, NUM_THREADS)
        )
        thread, threads = (builder.zext(builder.call(function, []), self.integer) for function in kinds)
        return thread, threads

    def read(self, builder: ir.IRBuilder, pointer: ir.Value, layout: type[ctypes.Structure]) -> dict[str, ir.Value]:
        """Load every field of a structure at `pointer`: pointers, int64, and float32 as a float."""
        kinds = {ctypes.c_void_p: self.pointer, ctypes.c_int64: self.integer, ctypes.c_float: self._ir.FloatType()}
        fields = {}
        for name, kind in layout._fields_:  # type: ignore[misc]
            place = self.at(builder, pointer, getattr(layout, name).offset)
            fields[name] = builder.load(place, typ=kinds[kind], name=name)
        return fields

    def room(self, builder: ir.IRBuilder) -> ir.Value:
        """Room for sixteen float32, which becomes a register: in the entry block, where LLVM looks for such, and where
        loops do not take it again and again."""
        with builder.goto_entry_block():
            return builder.alloca(self.floats)

    def at(self, builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """`pointer` plus `offset` bytes."""
        if isinstance(offset, int):
            offset = self.integer(offset)
        return builder.gep(pointer, [offset], source_etype=self.byte)

    def zeros(self) -> ir.Value:
        """Sixteen float32 zeros."""
        return self._ir.Constant(self.floats, None)

    def numbers(self, values: Sequence[int]) -> ir.Value:
        """Sixteen constant int32."""
        return self._ir.Constant(self.lanes, list(values))

    def spread(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """A float32 or int32 in all sixteen lanes."""
        kind = self._ir.VectorType(value.type, LANES)
        undefined = self._ir.Constant(kind, self._ir.Undefined)
        first = builder.insert_element(undefined, value, self.small(0))
        return builder.shuffle_vector(first, undefined, self._ir.Constant(self.lanes, None))

    def spread_constant(self, value: float) -> ir.Value:
        """A constant float32 in all sixteen lanes."""
        return self._ir.Constant(self.floats, [value] * LANES)

    def spread_pair(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """Two bfloat16 at `address` in all sixteen lanes."""
        value = builder.load(address, typ=self.small, align=2)
        return builder.bitcast(self.spread(builder, value), self.pairs)

    def spread_number(self, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """The float32 at `address` in all sixteen lanes."""
        return self.spread(builder, builder.load(address, typ=self.floats.element, align=4))

    def multiply_and_add(self, builder: ir.IRBuilder, left: ir.Value, right: ir.Value, added: ir.Value) -> ir.Value:
        """The products of two times sixteen float32 plus sixteen others, rounded once."""
        return builder.call(self._fma, [left, right, added])

    def add_product(self, builder: ir.IRBuilder, place: ir.Value, left: ir.Value, right: ir.Value) -> None:
        """Add to the sixteen float32 at `place` the products of two times sixteen."""
        builder.store(self.multiply_and_add(builder, left, right, builder.load(place, typ=self.floats)), place)

    def add_dot(self, builder: ir.IRBuilder, place: ir.Value, left: ir.Value, right: ir.Value) -> None:
        """Add to the sixteen float32 at `place`, lane by lane, the products of two pairs of bfloat16."""
        if self._dot is None:
            for number in range(2):
                one, other = (self.widen_one(builder, pairs, number) for pairs in (left, right))
                self.add_product(builder, place, one, other)
            return
        builder.store(builder.call(self._dot, [builder.load(place, typ=self.floats), left, right]), place)

    def widen_one(self, builder: ir.IRBuilder, pairs: ir.Value, number: int) -> ir.Value:
        """The first (0) or the second (1) of sixteen pairs of bfloat16, as float32."""
        bits = builder.bitcast(pairs, self.lanes)
        if number:
            wide = builder.and_(bits, self.numbers([-(1 << 16)] * LANES))
        else:
            wide = builder.shl(bits, self.numbers([16] * LANES))
        return builder.bitcast(wide, self.floats)

    def round(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """Sixteen float32 → sixteen bfloat16, to nearest even."""
        if self._round is not None:
            return builder.call(self._round, [value])
        bits, half = builder.bitcast(value, self.lanes), self.numbers([16] * LANES)
        is_odd = builder.and_(builder.lshr(bits, half), self.numbers([1] * LANES))
        rounded = builder.lshr(builder.add(bits, builder.add(is_odd, self.numbers([0x7FFF] * LANES))), half)
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), self.numbers([0x7FC0] * LANES), rounded)
        return builder.bitcast(builder.trunc(rounded, self._ir.VectorType(self._ir.IntType(16), LANES)), self.halves)

    def exp(self, builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """exp of sixteen numbers of at most 0, to 2 units in the last place; 0 where it would be less than 1e-37."""
        constant = self.spread_constant
        power, rest, result = self._split_exponent(builder, x)
        square = builder.fmul(rest, rest)
        result = builder.call(self._fma, [result, square, builder.fadd(rest, constant(1.0))])
        exponent = builder.shl(builder.fptosi(power, self.lanes), self.numbers([23] * LANES))
        result = builder.bitcast(builder.add(builder.bitcast(result, self.lanes), exponent), self.floats)
        return builder.select(builder.fcmp_ordered(">", x, constant(_SMALLEST_EXPONENT)), result, self.zeros())

    def exp_less_one(self, builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """exp(x) - 1 of sixteen numbers of at most 0, to a few units in the last place."""
        constant = self.spread_constant
        power, rest, result = self._split_exponent(builder, x)
        less_one = builder.call(self._fma, [result, builder.fmul(rest, rest), rest])
        exponent = builder.add(builder.fptosi(power, self.lanes), self.numbers([127] * LANES))
        scale = builder.bitcast(builder.shl(exponent, self.numbers([23] * LANES)), self.floats)
        result = builder.call(self._fma, [less_one, scale, builder.fsub(scale, constant(1.0))])
        return builder.select(builder.fcmp_ordered(">", x, constant(_SMALLEST_EXPONENT)), result, constant(-1.0))

    def _split_exponent(self, builder: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The power of 2 in exp of sixteen numbers of at most 0, what r is left of each, and (exp(r) - 1 - r) / r²."""
        constant = self.spread_constant
        power = builder.call(self._nearest, [builder.fmul(x, constant(_LOG2_E))])
        power = builder.select(builder.fcmp_ordered(">", x, constant(_SMALLEST_EXPONENT)), power, self.zeros())
        rest = builder.call(self._fma, [power, constant(-_LN_2_HIGH), x])
        rest = builder.call(self._fma, [power, constant(-_LN_2_LOW), rest])
        result = constant(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            result = builder.call(self._fma, [result, rest, constant(coefficient)])
        return power, rest, result

    def extend(self, builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
        """Sixteen bfloat16 → sixteen float32."""
        bits = builder.bitcast(halves, self._ir.VectorType(self._ir.IntType(16), LANES))
        shifted = builder.shl(builder.zext(bits, self.lanes), self.numbers([16] * LANES))
        return builder.bitcast(shifted, self.floats)

    def load_halves(self, builder: ir.IRBuilder, base: ir.Value, offset: ir.Value) -> ir.Value:
        """Sixteen bfloat16 at `base` plus `offset` bytes, as float32."""
        return self.extend(builder, builder.load(self.at(builder, base, offset), typ=self.halves, align=2))

    def prefetch(self, builder: ir.IRBuilder, address: ir.Value, locality: int) -> None:
        """Ask for the cache line at `address`; locality as in LLVM's prefetch, 0 for use once to 3 for keep."""
        read, data = self.small(0), self.small(1)
        builder.call(self._prefetch, [address, read, self.small(locality), data])

    def load_some(self, builder: ir.IRBuilder, address: ir.Value, mask: ir.Value) -> ir.Value:
        """Load those of sixteen float32 whose bit of `mask` is set, zeros for the others; no other bytes are read."""
        if self._masked_load is None:
            name, kind = "llvm.masked.load.v16f32.p0", self.floats
            self._masked_load = self.declare(name, kind, self.pointer, self.small, mask.type, kind)
        return builder.call(self._masked_load, [address, self.small(4), mask, self.zeros()])

    def store_some(self, builder: ir.IRBuilder, value: ir.Value, address: ir.Value, mask: ir.Value) -> None:
        """Store those of sixteen bfloat16 or float32 whose bit of `mask` is set."""
        kind = value.type
        bytes_each = 4 if kind == self.floats else 2
        if kind not in self._stores:
            name = f"llvm.masked.store.v16{kind.element.intrinsic_name}.p0"
            self._stores[kind] = self.declare(name, self.void, kind, self.pointer, self.small, mask.type)
        builder.call(self._stores[kind], [value, address, self.small(bytes_each), mask])

    def call_one(
        self, builder: ir.IRBuilder, number: ir.Value, functions: Sequence[ir.Function], arguments: Sequence[ir.Value]
    ) -> None:
        """Call the first of `functions` where `number` is 1, the second where it is 2, and so on."""
        done = builder.append_basic_block("called")
        choice = builder.switch(number, done)
        for case, function in enumerate(functions, 1):
            block = builder.append_basic_block(function.name)
            choice.add_case(number.type(case), block)
            builder.position_at_end(block)
            builder.call(function, arguments)
            builder.branch(done)
        builder.position_at_end(done)


@contextmanager
def count(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: ir.Value | int) -> Iterator[ir.Value]:
    """Emit `for (index = start; index < stop; index += step)` around what the body emits; yields the index, int64."""
    before = builder.block
    head, body = builder.append_basic_block("head"), builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(start.type)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
    builder.position_at_end(body)
    yield index
    stride = start.type(step) if isinstance(step, int) else step
    index.add_incoming(builder.add(index, stride), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
