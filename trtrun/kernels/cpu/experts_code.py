"""The code of the products in experts.py, as LLVM IR: blocks of matmul_code.py, of several weights at once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from trtrun.kernels.cpu.emitter import count
from trtrun.kernels.cpu.matmul_code import Arguments, Form, MatmulCode, Prefetch, Source

if TYPE_CHECKING:
    from llvmlite import ir

GROUPED = "grouped_matmul"


class GroupedArguments(ctypes.Structure):
    """What the kernel gets.

    `products` are Arguments, one behind the other, of as many features and pairs each. Their blocks are numbered one
    after the other. Share s has those from starts[s] to starts[s + 1]; `starts` is int64 [shares + 1]. A thread takes
    every share whose number is its own, modulo threads. `scratch` has `room` bytes for each thread.
    """

    _fields_: ClassVar = [
        ("products", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("shares", ctypes.c_int64),
        ("room", ctypes.c_int64),
    ]


def grouped_matmul_module(prefetch: Prefetch, form: Form) -> ir.Module:
    """A module whose function GROUPED takes GroupedArguments."""
    code = _GroupedCode(GROUPED, form)
    sources = Source("streamed", code.weight_pair_bytes, prefetch), Source("cached", code.weight_pair_bytes, None)
    code.emit_shares(code.emit_block([code.emit_tiles(source) for source in sources]))
    return code.module


class _GroupedCode(MatmulCode):
    """Emits the kernel."""

    def emit_shares(self, block: ir.Function) -> None:
        """Emit the loops over shares of this thread, and their blocks."""
        integer = self.integer
        builder, (pointer,) = self.define(GROUPED, self.pointer)
        field = self.read(builder, pointer, GroupedArguments)
        thread, threads = self.emit_thread(builder)
        room = self.at(builder, field["scratch"], builder.mul(thread, field["room"]))
        blocks = self.count_blocks(builder, self.read(builder, field["products"], Arguments)["features"])
        with count(builder, thread, field["shares"], threads) as share:
            bound = self.at(builder, field["starts"], builder.mul(share, integer(8)))
            start, stop = (builder.load(self.at(builder, bound, place), typ=integer) for place in (0, 8))
            with count(builder, start, stop, 1) as number:
                product = builder.sdiv(number, blocks)
                own = self.at(builder, field["products"], builder.mul(product, integer(ctypes.sizeof(Arguments))))
                builder.call(block, [own, builder.sub(number, builder.mul(product, blocks)), room])
        builder.ret_void()
