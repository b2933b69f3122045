"""What paged attention in attention.py is compiled for, and what its kernel is called with.

It knows kinds of processors, numbers and addresses. It does not know instructions (attention_code.py).
"""

from __future__ import annotations

import ctypes
from typing import ClassVar, NamedTuple

from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, NEON

KERNEL = "attention"
TILE_TOKENS = LANES
"""Keys of a tile of the store: their scores are the lanes of one register."""
TILE_QUERIES = 6
"""Queries that go through a row's context together: with 64 numbers of a head, 24 of 32 registers are accumulators."""
SCRATCH_BYTES_PER_KEY = TILE_QUERIES * (4 + 2)
"""A float32 score and a bfloat16 weight for each query; weights of float32 take the place of their scores."""


class Form(NamedTuple):
    """How a kind of processor attends over a store.

    Attributes:
        multiplies_bfloat16: whether instructions for bfloat16 are used.
        is_float32: whether queries, store and outputs are float32; else they are bfloat16.
        variants: numbers of queries that there is code for; the last query is computed again to make up the next.
        chunk: numbers of a head that are accumulated at a time.
        caps_scores: whether scores become cap * tanh(score / cap).
        has_sinks: whether heads have sinks.
    """

    multiplies_bfloat16: bool
    is_float32: bool
    variants: tuple[int, ...] = (1, 2, TILE_QUERIES)
    chunk: int = 64
    caps_scores: bool = False
    has_sinks: bool = False

    @property
    def together(self) -> int:
        """Numbers that a lane takes at once: 4 bytes."""
        return 1 if self.is_float32 else 2

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return 4 // self.together


def form_for(kind: str, *, is_float32: bool) -> Form:
    """The form of a kind of processor (machine.py).

    Where registers are half as many and half as wide, and where bfloat16 is widened in them, fewer are accumulators:
    what does not fit goes to memory.
    """
    if is_float32:
        narrow = {"avx2": Form(False, True, (1, 2, 5), 32), NEON: Form(False, True, (1, 2, 4), 16)}
        return narrow.get(kind, Form(False, True))
    return Form(True, False) if kind == MULTIPLIES_BFLOAT16 else Form(False, False, (1, 3), 16)


class Arguments(ctypes.Structure):
    """What the kernel gets for one segment of `rows` rows with `queries` positions each. Strides are in bytes.

    Without `key` nothing is stored. `soft_cap` counts where the form caps scores, and `sinks` where it has some.
    """

    _fields_: ClassVar = [
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("store", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("values_offset", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("position_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    ]
