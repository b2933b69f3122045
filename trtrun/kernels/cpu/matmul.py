"""y = x @ weight.T + bias in bfloat16 on the CPU, for few rows at the speed at which the weight comes out of memory.

It knows one product, its blocked weight and its threads. It does not know models.

The weight [out, in] lies in blocks of 64 output features; a block holds its input features in pairs, [in / 2, 64, 2],
as the instruction VDPBF16PS takes them: sixteen float32 accumulators each add the products of one pair. A tile of up to
six rows keeps its 6 x 64 accumulators in registers, reads the block once and asks for memory ahead of time. More rows
take the block again while it is in the second-level cache, a stretch of input features at a time, and ask for the next
stretch meanwhile.

Processors without that instruction get activations as float32, once for the whole product, and widen weights in
registers; with AVX2, whose registers are half as many and half as wide, blocks are 16 features wide (FORMS).

Every accumulator adds the pairs of input features one by one, in order, whatever the number of rows, of threads and of
stretches: a row's result is bit-equal in any company, which lossless verification rests on.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.nn import functional

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.machine import Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul_code import (
    FORMS,
    KERNEL,
    STRETCH,
    Arguments,
    Form,
    matmul_module,
    prefetch_for,
)

_READ_NS, _MULTIPLY_NS = 0.16, 0.02
"""That one thread needs for a weight's number: to read it, and for each row; about, on a Xeon, with AVX-512 and with
AVX2."""

_CACHED_NUMBERS = 2**19
"""Weights of up to so many numbers belong to models small enough to stay in the caches (the shipped pair: 20 MB)."""


class BlockedProduct:
    """A product with one weight in blocks, whatever its numbers are.

    Args:
        blocks: the weight, from `pack_blocks`.
        features: output features, of which the last block may hold fewer than the others.
        per_feature: float32, what the kernel reads for each output feature; None for nothing.
        kernel: compiled for such blocks.
        form: that it was compiled for.
        unpacked_bytes: what each thread needs beside its sums, for more rows than a tile takes.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        features: int,
        per_feature: torch.Tensor | None,
        kernel: Kernel,
        form: Form,
        unpacked_bytes: int = 0,
    ) -> None:
        self._form = form
        self._blocks = blocks
        self._features = features
        self._per_feature = per_feature
        self._kernel = kernel
        self._unpacked_bytes = unpacked_bytes
        pairs = blocks.shape[1]
        self._needs_scratch = pairs > STRETCH or unpacked_bytes > 0
        self._arguments = Arguments(
            weight=blocks.data_ptr(),
            bias=None if per_feature is None else per_feature.data_ptr(),
            pairs=pairs,
            features=features,
            is_cached=blocks.numel() <= _CACHED_NUMBERS,
        )
        self._address = ctypes.addressof(self._arguments)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] bfloat16 → [rows, out] bfloat16."""
        if not self._form.multiplies_bfloat16:
            x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        threads = machine.team(self._blocks.numel() * (_READ_NS + rows * _MULTIPLY_NS), self._blocks.shape[0])
        y = torch.empty(rows, self._features, dtype=torch.bfloat16)
        arguments = self._arguments
        if self._needs_scratch and rows > self._form.rows:
            scratch = torch.empty(threads, rows * self._form.block * 4 + self._unpacked_bytes, dtype=torch.uint8)
            arguments.scratch = scratch.data_ptr()
        arguments.x, arguments.y = x.data_ptr(), y.data_ptr()
        arguments.x_stride, arguments.rows = x.stride(0) * x.itemsize, rows
        self._kernel(self._address, threads)
        return y


class BlockedMatmul(BlockedProduct):
    """The product with one weight of bfloat16, which it keeps in blocks.

    Args:
        weight: [out, in] bfloat16 on the CPU; `in` is even. It is copied.
        bias: [out] bfloat16 or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kind = machine.processor_kind()
        assert kind is not None
        features, form = weight.shape[0], FORMS[kind]
        padded = None if bias is None else functional.pad(bias.float(), (0, -features % form.block))
        super().__init__(pack_blocks(weight, form.block), features, padded, _kernel(kind), form)


def pack_blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """weight [out, in] → a copy [blocks, in / 2, block, 2], the last block filled up with zeros."""
    features, inputs = weight.shape
    count = -(-features // block)
    blocks = torch.empty(count, inputs // 2, block, 2, dtype=weight.dtype)
    full = features // block
    pairs = weight[: full * block].view(full, block, inputs // 2, 2)
    blocks[:full].copy_(pairs.transpose(1, 2))
    if full < count:
        rest = functional.pad(weight[full * block :], (0, 0, 0, count * block - features))
        blocks[full].copy_(rest.view(block, inputs // 2, 2).transpose(0, 1))
    return blocks


def can_block(weight: torch.Tensor) -> bool:
    """Whether `BlockedMatmul` takes this weight [out, in], on a machine that has its kernel."""
    return weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0


@functools.cache
def _kernel(kind: str) -> Kernel:
    return load_kernels(matmul_module, prefetch_for(processor_name()), kind, names=(KERNEL,))[KERNEL]
