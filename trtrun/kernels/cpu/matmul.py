"""y = x @ weight.T + bias in bfloat16 or float32 on the CPU, for few rows at the speed at which the weight comes out of
memory.

It knows one product, its blocked weight and its threads. It does not know models.

The weight [out, in] lies in blocks of 64 output features; a block holds its input features in pairs, [in / 2, 64, 2],
as the instruction VDPBF16PS takes them: sixteen float32 accumulators each add the products of one pair. A tile of up to
six rows keeps its 6 x 64 accumulators in registers, reads the block once and asks for memory ahead of time. More rows
take the block again while it is in the second-level cache, a stretch of input features at a time, and ask for the next
stretch meanwhile.

Processors without that instruction get activations as float32, once for the whole product, and widen weights in
registers; with AVX2, whose registers are half as many and half as wide, blocks are 16 features wide (FORMS).

A weight of float32 lies the same way with single input features in place of pairs, [in, 64]: as many bytes.

Every accumulator adds the pairs of input features one by one, in order, whatever the number of rows, of threads and of
stretches; of float32 each 512 input features by themselves, and these sums in order. So a row's result is bit-equal in
any company, which lossless verification rests on.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.nn import functional

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.machine import Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul_code import (
    FLOAT32_FORMS,
    FORMS,
    KERNEL,
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
        self._dtype = torch.float32 if form.is_float32 else torch.bfloat16
        self._needs_scratch = pairs > form.stretch or unpacked_bytes > 0
        self._arguments = Arguments(
            weight=blocks.data_ptr(),
            bias=None if per_feature is None else per_feature.data_ptr(),
            pairs=pairs,
            features=features,
            is_cached=blocks.numel() <= _CACHED_NUMBERS,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out], in the product's dtype."""
        if not self._form.multiplies_bfloat16:
            x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        threads = machine.team(self._blocks.numel() * (_READ_NS + rows * _MULTIPLY_NS), self._blocks.shape[0])
        y = torch.empty(rows, self._features, dtype=self._dtype)
        arguments = self._arguments
        if self._needs_scratch and (rows > self._form.rows or self._form.is_float32):
            scratch = torch.empty(threads, rows * self._form.block * 4 + self._unpacked_bytes, dtype=torch.uint8)
            arguments.scratch = scratch.data_ptr()
        arguments.x, arguments.y = x.data_ptr(), y.data_ptr()
        arguments.x_stride, arguments.rows = x.stride(0) * x.itemsize, rows
        self._kernel(ctypes.addressof(arguments), threads)
        return y


class BlockedMatmul(BlockedProduct):
    """The product with one weight of bfloat16 or float32, which it keeps in blocks.

    Args:
        weight: [out, in] on the CPU; `in` is even in bfloat16. It is copied.
        bias: [out] of the same dtype, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kind = machine.processor_kind()
        assert kind is not None
        features, form = weight.shape[0], (FORMS if weight.dtype is torch.bfloat16 else FLOAT32_FORMS)[kind]
        padded = None if bias is None else functional.pad(bias.float(), (0, -features % form.block))
        super().__init__(pack_blocks(weight, form.block), features, padded, _kernel(form), form)


def pack_blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """weight [out, in] → a copy [blocks, in / 2, block, 2], of float32 [blocks, in, block, 1], the last block filled up
    with zeros."""
    features, inputs = weight.shape
    count, together = -(-features // block), 1 if weight.dtype is torch.float32 else 2
    # What lies together moves as one number: torch turns matrices over several times faster than other tensors.
    unit = {1: torch.int16, 2: torch.int32, 4: torch.float32}[weight.itemsize]
    blocks = torch.empty(count, inputs // together, block, dtype=unit)
    for number, turned in enumerate(blocks):
        part = weight[number * block : (number + 1) * block]
        if len(part) < block:
            part = functional.pad(part, (0, 0, 0, block - len(part)))
        turned.copy_(part.contiguous().view(unit).T)
    return blocks.view(weight.dtype).view(count, inputs // together, block, together)


def can_block(weight: torch.Tensor) -> bool:
    """Whether `BlockedMatmul` takes this weight [out, in], on a machine that has its kernel."""
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0)


@functools.cache
def _kernel(form: Form) -> Kernel:
    return load_kernels(matmul_module, prefetch_for(processor_name()), form, names=(KERNEL,))[KERNEL]
