"""Experts on the CPU: a chosen one's weights are read once, for all tokens that chose it, and a layer's experts are one
work that threads share.

Pairs of a token and an expert that it chose are sorted by expert, and the rows of each expert are a product of their
own (matmul.py): tiles, and the order in which they add, are those of any other product. So a token's bits are those of
a product with its row alone. Threads share out the blocks of all products by what these take, so that they wait for
each other once for all experts, not once for each.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from typing_extensions import override

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.experts_code import GROUPED, GroupedArguments, grouped_matmul_module
from trtrun.kernels.cpu.machine import Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul import CACHED_NUMBERS, MULTIPLY_NS, READ_NS, BlockedMatmul
from trtrun.kernels.cpu.matmul_code import Arguments, Form, prefetch_for
from trtrun.kernels.torch.experts import Choice, Experts, Product

_PLACES = {name: getattr(Arguments, name).offset // 8 for name, *_ in Arguments._fields_}
"""Columns of the fields, which are all of 8 bytes."""


_ROWS_AT_ONCE = 256
"""About as many rows go through both products before others do, so that what is between them stays in caches: 8 % at
2,048 rows of 64 small experts."""


class _Groups(NamedTuple):
    """Rows that are sorted by expert.

    Attributes:
        experts: int64 [groups], which have rows.
        counts: int64 [groups], rows of each.
        starts: int64 [groups], the first row of each.
    """

    experts: np.ndarray
    counts: np.ndarray
    starts: np.ndarray


def _sort(chosen: np.ndarray) -> Iterator[tuple[torch.Tensor, _Groups]]:
    """Sort pairs by expert, chosen int64 [pairs], but for those of -1. Yields int64 [rows], which pairs they are, and
    the groups of the rows, for some experts at a time."""
    order = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
    every = np.bincount(chosen[order]) if len(order) else np.zeros(0, np.int64)
    experts = every.nonzero()[0]
    counts = every[experts]
    starts = np.cumsum(counts) - counts
    bounds = [0, *(np.diff(starts // _ROWS_AT_ONCE).nonzero()[0] + 1), len(experts)]
    for first, last in pairwise(bounds if len(experts) else ()):
        begin, own = starts[first], slice(first, last)
        rows = order[begin : begin + counts[own].sum()]
        yield torch.from_numpy(rows), _Groups(experts[own], counts[own], starts[own] - begin)


class _Products:
    """The products with one matrix of each expert.

    Args:
        products: of the experts, of one shape and dtype.
    """

    def __init__(self, products: Sequence[BlockedMatmul]) -> None:
        first = products[0]
        self._form, self._products, self._kernel = first.form, products, _kernel(first.form)
        self._features, self._pairs = first.arguments.features, first.arguments.pairs
        self._table = np.stack([np.frombuffer(bytes(product.arguments), np.int64) for product in products])
        self._block_numbers = self._pairs * self._form.block * (1 if self._form.is_float32 else 2)
        self._blocks = -(-self._features // self._form.block)
        self._table[:, _PLACES["is_cached"]] = len(products) * self._blocks * self._block_numbers <= CACHED_NUMBERS

    def __call__(self, x: torch.Tensor, groups: _Groups) -> torch.Tensor:
        """x [rows, in], sorted by expert → [rows, out]; float32 where the form wants it so."""
        form = self._form
        y = torch.empty(len(x), self._features, dtype=torch.float32 if form.is_float32 else torch.bfloat16)
        table = self._table[groups.experts]
        for name, rows in (("x", x), ("y", y)):
            table[:, _PLACES[name]] = rows.data_ptr() + groups.starts * (rows.stride(0) * rows.itemsize)
        table[:, _PLACES["x_stride"]], table[:, _PLACES["rows"]] = x.stride(0) * x.itemsize, groups.counts
        costs = (READ_NS + groups.counts * MULTIPLY_NS) * self._block_numbers
        threads = machine.team(float(costs.sum()) * self._blocks, len(costs) * self._blocks)
        starts = _share_out(costs, self._blocks, threads)
        most = int(groups.counts.max())
        needs_room = self._pairs > form.stretch and (most > form.rows or form.is_float32)
        room = most * form.block * 4 if needs_room else 0
        scratch = torch.empty(threads, room, dtype=torch.uint8)
        arguments = GroupedArguments(table.ctypes.data, starts.ctypes.data, scratch.data_ptr(), threads, room)
        self._kernel(ctypes.addressof(arguments), threads)
        return y


def _share_out(costs: np.ndarray, blocks: int, shares: int) -> np.ndarray:
    """Where shares of about the same cost begin, and the last ends, int64 [shares + 1], among the blocks of products
    of which each has so many, at a cost each."""
    if shares == 1:
        return np.array([0, len(costs) * blocks])
    ends = np.cumsum(costs) * blocks
    wanted = ends[-1] * np.arange(1, shares) / shares
    products = np.searchsorted(ends, wanted, side="right")
    within = blocks - (ends[products] - wanted) / costs[products]
    inner = products * blocks + np.clip(within, 0, blocks).astype(np.int64)
    return np.concatenate(([0], inner, [len(costs) * blocks])).astype(np.int64)


@functools.cache
def _kernel(form: Form) -> Kernel:
    return load_kernels(grouped_matmul_module, prefetch_for(processor_name()), form, names=(GROUPED,))[GROUPED]


class NativeExperts(Experts):
    """Experts whose weights lie in blocks.

    Args:
        gate_up: of each expert, hidden to gate features, then as many up features.
        down: of each expert, back to hidden.
        activate: gates and factors [rows, 2 * features] → [rows, features].
    """

    def __init__(
        self,
        gate_up: Sequence[BlockedMatmul],
        down: Sequence[BlockedMatmul],
        activate: Product,
    ) -> None:
        self._gate_up, self._down, self._activate = _Products(gate_up), _Products(down), activate
        self._widens = not gate_up[0].form.multiplies_bfloat16

    @override
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        made, num_chosen = x.new_empty((*choice.experts.shape, x.shape[1])), choice.experts.shape[1]
        flat, wide = made.view(-1, x.shape[1]), self._wide(x)
        for pairs, groups in _sort(choice.experts.numpy().ravel()):
            rows = wide.index_select(0, pairs // num_chosen)
            rows = self._wide(self._activate(self._gate_up(rows, groups)))
            flat.index_copy_(0, pairs, self._down(rows, groups))
        return made

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() if self._widens else x


def takes(products: Sequence[Product]) -> TypeGuard[Sequence[BlockedMatmul]]:
    """Whether `NativeExperts` takes the products with one matrix of each expert."""
    return all(isinstance(product, BlockedMatmul) for product in products)
