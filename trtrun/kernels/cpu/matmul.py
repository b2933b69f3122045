"""y = x @ weight.T + bias on the CPU, for few rows at the speed at which the weight comes out of memory: weights in
bfloat16 or float32, or of a byte each with scales.

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

Weights of a byte, y = x @ (codes * scale).T + bias, lie the same way, so that half as much comes out of memory. They
are widened in registers (for more than six rows once a stretch, into a buffer) and multiplied as bfloat16 weights are,
in the same order; a feature's scale multiplies its finished sum. An integer of 8 bits and every number of E4M3 is a
bfloat16 without loss, and products of two of E4M3 are exact in float32. Activations that are rounded to E4M3 are passed
on as bfloat16 with the row's scale behind them.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.nn import functional

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.byte_matmul_code import (
    ROUND_ROWS,
    ROW_SCALE_BYTES,
    UNPACKED_BYTES,
    RoundingArguments,
    fp8_matmul_module,
    int8_matmul_module,
    rounding_module,
)
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul_code import (
    FLOAT32_FORMS,
    FORMS,
    KERNEL,
    Arguments,
    Form,
    matmul_module,
    prefetch_for,
)
from trtrun.kernels.torch.fp8 import round_activations

READ_NS, MULTIPLY_NS = 0.16, 0.02
"""Nanoseconds that one thread needs for a weight's number: to read it, and for each row; about, on a Xeon, with AVX-512
and with AVX2."""

CACHED_NUMBERS = 2**19
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

    Attributes:
        form: that the kernel was compiled for.
        arguments: what the kernel gets, of which a call sets what is of its rows.
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
        self.form = form
        self._blocks = blocks
        self._features = features
        self._per_feature = per_feature
        self._kernel = kernel
        self._unpacked_bytes = unpacked_bytes
        pairs = blocks.shape[1]
        self._dtype = torch.float32 if form.is_float32 else torch.bfloat16
        self._needs_scratch = pairs > form.stretch or unpacked_bytes > 0
        self.arguments = Arguments(
            weight=blocks.data_ptr(),
            bias=None if per_feature is None else per_feature.data_ptr(),
            pairs=pairs,
            features=features,
            is_cached=blocks.numel() <= CACHED_NUMBERS,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out], in the product's dtype."""
        if not self.form.multiplies_bfloat16:
            x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        threads = machine.team(self._blocks.numel() * (READ_NS + rows * MULTIPLY_NS), self._blocks.shape[0])
        y = torch.empty(rows, self._features, dtype=self._dtype)
        arguments = self.arguments
        if self._needs_scratch and (rows > self.form.rows or self.form.is_float32):
            scratch = torch.empty(threads, rows * self.form.block * 4 + self._unpacked_bytes, dtype=torch.uint8)
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


class BlockedByteMatmul(BlockedProduct):
    """The product with one weight of a byte a number, which it keeps in blocks.

    Args:
        codes: [out, in] of a dtype of one byte on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
        kernel: compiled for what the bytes stand for.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel) -> None:
        features, form = codes.shape[0], FORMS[MULTIPLIES_BFLOAT16]
        blocks = -(-features // form.block)
        per_feature = torch.zeros(2, blocks * form.block)
        per_feature[0, :features] = scale
        if bias is not None:
            per_feature[1, :features] = bias
        of_blocks = per_feature.view(2, blocks, form.block).transpose(0, 1).contiguous()
        packed = pack_blocks(codes.view(torch.int8), form.block)
        super().__init__(packed, features, of_blocks, kernel, form, UNPACKED_BYTES)


class BlockedInt8Matmul(BlockedByteMatmul):
    """The product with one weight of 8 bits, which it keeps in blocks.

    Args:
        codes: [out, in] int8 on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(codes, scale, bias, _int8_kernel())


@functools.cache
def _int8_kernel() -> Kernel:
    return load_kernels(int8_matmul_module, prefetch_for(processor_name()), names=(KERNEL,))[KERNEL]


_ALONE = 16 * 1024
"""Numbers up to which one thread rounds faster than several wake (as in fused.py)."""


class BlockedFp8Matmul(BlockedByteMatmul):
    """The product with one weight of 8 bits, which it keeps in blocks.

    Args:
        codes: [out, in] E4M3 on the CPU, none of them NaN; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
        rounds_activations: whether each row of x is rounded to E4M3, too.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> None:
        super().__init__(codes, scale, bias, _fp8_kernel(rounds_activations))
        self._rounds_activations = rounds_activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] bfloat16 → [rows, out] bfloat16."""
        return super().__call__(_with_scales(x) if self._rounds_activations else x)


def _with_scales(x: torch.Tensor) -> torch.Tensor:
    """x [rows, in], `in` even → [rows, in + 2] bfloat16: each row rounded to E4M3, then its scale as a float32."""
    rows, inputs = x.shape
    result = torch.empty((rows, inputs + ROW_SCALE_BYTES // 2), dtype=torch.bfloat16)
    if inputs % LANES:
        values, scale = round_activations(x)
        result[:, :inputs] = values
        result.view(torch.float32)[:, inputs // 2] = scale
        return result
    if x.stride(1) != 1:
        x = x.contiguous()
    arguments = RoundingArguments(
        x=x.data_ptr(),
        output=result.data_ptr(),
        x_stride=x.stride(0) * x.itemsize,
        output_stride=result.stride(0) * result.itemsize,
        rows=rows,
        size=inputs,
    )
    _rounding()(ctypes.addressof(arguments), 1 if x.numel() <= _ALONE else torch.get_num_threads())
    return result


@functools.cache
def _fp8_kernel(scales_rows: bool) -> Kernel:
    prefetch = prefetch_for(processor_name())
    return load_kernels(fp8_matmul_module, prefetch, scales_rows=scales_rows, names=(KERNEL,))[KERNEL]


@functools.cache
def _rounding() -> Kernel:
    return load_kernels(rounding_module, names=(ROUND_ROWS,))[ROUND_ROWS]
