"""Attention over the paged KV store in bfloat16 on the CPU, reading the store where it lies.

It knows one layer's store, segments and threads. It does not know models. Written for AVX-512 BF16; processors
without it multiply bfloat16 as float32, which its numbers are.

A tile of the store is sixteen tokens of one KV head. Its keys lie as [head / 2, 16, 2], pairs of numbers behind one
another for sixteen tokens, and its values as [8, head, 2], pairs of tokens: so that scores of sixteen keys, and sixteen
numbers of an output, are lanes of VDPBF16PS (see matmul.py). Scores and their softmax are float32, over the keys that a
query sees; weights are rounded to bfloat16 for the product with the values and divided by their sum behind it, as in
FlashAttention (arXiv:2205.14135).

A query's scores, sums and outputs are added up in the order of its keys, whatever other queries, rows and threads there
are: its result is bit-equal in any company, which lossless verification rests on.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.attention_code import (
    KERNEL,
    SCRATCH_BYTES_PER_KEY,
    TILE_TOKENS,
    Arguments,
    attention_module,
    tile_queries,
)
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, Kernel, load_kernels
from trtrun.kernels.cpu.rotation import rotate
from trtrun.kvcache.segments import AttentionBatch

_NO_WINDOW = 1 << 30
_READ_NS, _MULTIPLY_NS = 0.4, 0.04
"""That one thread needs for a key's number and its value's: to read them, and for each query; about, on a Xeon."""


class NativeAttention:
    """Paged attention for heads of one size; see `AttentionBackend`."""

    tile: int | None = None
    reads_forks = False

    def __init__(self, head_dim: int) -> None:
        """Compile the kernel for heads of `head_dim` numbers."""
        multiplies_bfloat16 = machine.processor_kind() == MULTIPLIES_BFLOAT16
        self._kernel = _kernel(head_dim, multiplies_bfloat16)
        self._tile = tile_queries(multiplies_bfloat16)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        store_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`; for blocks that `takes_blocks` takes."""
        kv_heads, block_size = store_layer.shape[2:4]
        rotated = rotate(query_key, *angles)
        query, key = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
        output = torch.empty(query.shape, dtype=query.dtype)
        for segment in batch.segments:
            table = segment.block_tables
            arguments = Arguments(
                store=store_layer.data_ptr(),
                tables=table.data_ptr(),
                positions=segment.positions.data_ptr(),
                query_stride=query.stride(0) * 2,
                key_stride=key.stride(0) * 2,
                value_stride=value.stride(0) * 2,
                output_stride=output.stride(0) * 2,
                values_offset=store_layer.stride(0) * 2,
                table_stride=table.stride(0) * 8,
                row_stride=segment.positions.stride(0) * 8,
                position_stride=segment.positions.stride(1) * 8,
                rows=segment.rows,
                queries=segment.queries,
                kv_heads=kv_heads,
                group=query.shape[1] // kv_heads,
                block_size=block_size,
                keys=table.shape[1] * block_size,
                window=_NO_WINDOW if window is None else window,
                scale=scale,
            )
            start = segment.start
            arguments.query = query.data_ptr() + start * arguments.query_stride
            arguments.key = key.data_ptr() + start * arguments.key_stride
            arguments.value = value.data_ptr() + start * arguments.value_stride
            arguments.output = output.data_ptr() + start * arguments.output_stride
            items = segment.rows * kv_heads * -(-segment.queries * arguments.group // self._tile)
            numbers = segment.rows * kv_heads * arguments.keys * query.shape[2]
            threads = machine.team(numbers * (_READ_NS + segment.queries * arguments.group * _MULTIPLY_NS), items)
            arguments.scratch = self._reserve(threads * arguments.keys * SCRATCH_BYTES_PER_KEY)
            self._kernel(ctypes.addressof(arguments), threads)
        return output

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See `AttentionBackend`: a token's numbers lie scattered over its tile."""
        layers, _, blocks, kv_heads, block_size, head = store.shape
        shape = (layers, 2, blocks, kv_heads, block_size // TILE_TOKENS)
        keys = store.view(*shape, head // 2, TILE_TOKENS, 2)[:, 0]
        values = store.view(*shape, TILE_TOKENS // 2, head, 2)[:, 1]
        tile, token = offset // TILE_TOKENS, offset % TILE_TOKENS
        pair, half = token // 2, token % 2
        keys[:, target, :, tile, :, token] = keys[:, source, :, tile, :, token]
        values[:, target, :, tile, pair, :, half] = values[:, source, :, tile, pair, :, half]

    def _reserve(self, size: int) -> int:
        """The address of `size` bytes, kept for the next call."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()


def takes_head(head_dim: int) -> bool:
    """Whether there is code for heads of `head_dim` numbers."""
    return head_dim % LANES == 0


def takes_blocks(block_size: int) -> bool:
    """Whether blocks of `block_size` tokens are whole tiles."""
    return block_size % TILE_TOKENS == 0


@functools.cache
def _kernel(head_dim: int, multiplies_bfloat16: bool) -> Kernel:
    return load_kernels(attention_module, head_dim, multiplies_bfloat16, names=(KERNEL,))[KERNEL]
