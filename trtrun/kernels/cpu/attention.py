"""Attention over the paged KV store in bfloat16 or float32 on the CPU, reading the store where it lies.

It knows one layer's store, segments and threads. It does not know models. Written for AVX-512 BF16; processors
without it multiply bfloat16 as float32, which its numbers are.

A tile of the store is sixteen tokens of one KV head. Its keys lie as [head / 2, 16, 2], pairs of numbers behind one
another for sixteen tokens, and its values as [8, head, 2], pairs of tokens: so that scores of sixteen keys, and sixteen
numbers of an output, are lanes of VDPBF16PS (see matmul.py). Scores and their softmax are float32, over the keys that a
query sees; weights are rounded to bfloat16 for the product with the values and divided by their sum behind it, as in
FlashAttention (arXiv:2205.14135). In float32 single numbers and tokens stand where bfloat16 has pairs: keys lie as
[head, 16], values token by token, and no weight is rounded. A context that was gathered from a store of another format
is attended over as a store of its own, one block for each row. A head's sink is the first number of its queries' sums.

A query's scores, sums and outputs are added up in the order of its keys, whatever other queries, rows and threads there
are: its result is bit-equal in any company, which lossless verification rests on.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch.nn import functional

from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.attention_code import attention_module
from trtrun.kernels.cpu.attention_form import KERNEL, SCRATCH_BYTES_PER_KEY, TILE_TOKENS, Arguments, Form, form_for
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.fused import rotate
from trtrun.kernels.cpu.machine import Kernel, load_kernels

_NO_WINDOW = 1 << 30
_READ_NS, _MULTIPLY_NS = 0.4, 0.04
"""Nanoseconds that one thread needs for a key's number and its value's: to read them, and for each query; about, on a
Xeon."""


class NativeAttention:
    """The `AttentionBackend` of trtrun's own kernel, for heads of one size."""

    tile: int | None = None
    reads_forks = False
    normalises_heads = False

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        """Compile the kernel for heads of `head_dim` numbers of `dtype`, bfloat16 or float32."""
        kind = machine.processor_kind()
        assert kind is not None
        self._form = form_for(kind, is_float32=dtype is torch.float32)
        self._head_dim, self._kernel = head_dim, _kernel(head_dim, self._form)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(self, call: AttentionCall) -> torch.Tensor:
        """Attend over a store whose blocks `takes_blocks` accepts."""
        value, store_layer = call.value, call.store_layer
        kv_heads, block_size = store_layer.shape[2:4]
        query = key = rotate(call.query_key, *call.angles)
        if call.writes:
            query, key = query[:, :-kv_heads], query[:, -kv_heads:]
        output = torch.empty(query.shape, dtype=query.dtype)
        for segment in call.batch.segments:
            table, part = segment.block_tables, slice(segment.start, segment.stop)
            new_key, new_value = key[part], value[part]
            arguments = Arguments(
                key=new_key.data_ptr() if call.writes else None,
                value=new_value.data_ptr() if call.writes else None,
                store=store_layer.data_ptr(),
                tables=table.data_ptr(),
                key_stride=_row_bytes(key),
                value_stride=_row_bytes(value),
                values_offset=_row_bytes(store_layer),
                table_stride=_row_bytes(table),
                kv_heads=kv_heads,
                block_size=block_size,
                keys=table.shape[1] * block_size,
            )
            self._attend(arguments, query[part], output[part], segment.positions, call)
        return output

    def attend_gathered(
        self,
        query: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Attend over contexts that lie one token behind the other, and store nothing. For float32.

        Args:
            query: [rows, queries, heads, head], rotated; `head` is at most this object's.
            context: [2, rows, kv_heads, tokens, head]: keys, then values, from each row's first token on.
            positions: [rows, queries] int64; -1 is padding.
            call: of which what scores become and meet counts: scale, window, soft cap and sinks.

        Returns:
            [rows, queries, heads, head].
        """
        head = query.shape[-1]
        missing, padding = self._head_dim - head, -context.shape[3] % TILE_TOKENS
        if missing or padding:  # zeros change no score, and tokens that are not there are not seen
            context, query = functional.pad(context, (0, missing, 0, padding)), functional.pad(query, (0, missing))
        keys, values = context
        rows, kv_heads, tokens, _ = keys.shape
        tiles = keys.reshape(-1, TILE_TOKENS, self._head_dim).transpose(1, 2).contiguous()
        values, query, table = values.contiguous(), query.contiguous(), torch.arange(rows)
        arguments = Arguments(
            store=tiles.data_ptr(),
            tables=table.data_ptr(),
            values_offset=values.data_ptr() - tiles.data_ptr(),
            table_stride=table.itemsize,
            kv_heads=kv_heads,
            block_size=tokens,
            keys=tokens,
        )
        output = torch.empty_like(query)
        self._attend(arguments, query.flatten(0, 1), output.flatten(0, 1), positions, call)
        return output[..., :head]

    def _attend(
        self,
        arguments: Arguments,
        query: torch.Tensor,
        output: torch.Tensor,
        positions: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """Run the kernel for queries [tokens, heads, head] at positions [rows, queries]."""
        rows, queries = positions.shape
        arguments.query, arguments.query_stride = query.data_ptr(), _row_bytes(query)
        arguments.output, arguments.output_stride = output.data_ptr(), _row_bytes(output)
        arguments.positions, arguments.row_stride = positions.data_ptr(), _row_bytes(positions)
        arguments.position_stride = positions.stride(1) * positions.itemsize
        arguments.rows, arguments.queries = rows, queries
        arguments.group = group = query.shape[1] // arguments.kv_heads
        arguments.window, arguments.scale = _NO_WINDOW if call.window is None else call.window, call.scale
        items = rows * arguments.kv_heads * -(-queries * group // self._form.variants[-1])
        numbers = rows * arguments.kv_heads * arguments.keys * query.shape[2]
        threads = machine.team(numbers * (_READ_NS + queries * group * _MULTIPLY_NS), items)
        arguments.scratch = self._reserve(threads * arguments.keys * SCRATCH_BYTES_PER_KEY)
        kernel = self._kernel
        if call.soft_cap is not None or call.sinks is not None:
            form = self._form._replace(caps_scores=call.soft_cap is not None, has_sinks=call.sinks is not None)
            kernel = _kernel(self._head_dim, form)
        if call.soft_cap is not None:
            arguments.soft_cap = call.soft_cap
        if call.sinks is not None:
            arguments.sinks = call.sinks.data_ptr()
        kernel(ctypes.addressof(arguments), threads)

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Copy tokens, whose numbers lie scattered over their tiles."""
        layers, _, blocks, kv_heads, block_size, head = store.shape
        shape, together = (layers, 2, blocks, kv_heads, block_size // TILE_TOKENS), self._form.together
        keys = store.view(*shape, head // together, TILE_TOKENS, together)[:, 0]
        values = store.view(*shape, TILE_TOKENS // together, head, together)[:, 1]
        tile, token = offset // TILE_TOKENS, offset % TILE_TOKENS
        group, member = token // together, token % together
        keys[:, target, :, tile, :, token] = keys[:, source, :, tile, :, token]
        values[:, target, :, tile, group, :, member] = values[:, source, :, tile, group, :, member]

    def _reserve(self, size: int) -> int:
        """The address of `size` bytes, kept for the next call."""
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()


def takes_head(head_dim: int) -> bool:
    """Whether there is code for heads of `head_dim` numbers."""
    return head_dim % LANES == 0


def whole_head(head_dim: int) -> int:
    """The smallest head of at least `head_dim` numbers that there is code for."""
    return -(-head_dim // LANES) * LANES


def takes_blocks(block_size: int) -> bool:
    """Whether blocks of `block_size` tokens are whole tiles."""
    return block_size % TILE_TOKENS == 0


def _row_bytes(tensor: torch.Tensor) -> int:
    """Bytes from one row to the next."""
    return tensor.stride(0) * tensor.itemsize


@functools.cache
def _kernel(head_dim: int, form: Form) -> Kernel:
    return load_kernels(attention_module, head_dim, form, names=(KERNEL,))[KERNEL]
