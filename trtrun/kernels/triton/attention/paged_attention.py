"""Attention that reads the paged KV store in place, as Triton kernels for CUDA.

The method is FlashAttention's online softmax (arXiv:2205.14135) over blocks found through the block table
(PagedAttention, arXiv:2309.06180), with long contexts split over programs whose partial results are combined
(Flash-Decoding). Grids follow from shapes that the host knows, so a forward can become a CUDA graph; how far each row
reaches is read from the positions on the device. It knows tensors; it does not know when Triton can be used (see
trtrun.attention.backend).
"""

from __future__ import annotations

from functools import cache

import torch

from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.triton.attention.attend_kernel import attend_kernel
from trtrun.kernels.triton.attention.attention_steps import combine_kernel
from trtrun.kernels.triton.attention.attention_tiles import (
    LARGEST_TILE,
    MOST_PARTIAL_BYTES,
    MOST_SPLIT,
    SHARE,
    choose_tiling,
    tiling_of_codes,
)
from trtrun.kernels.triton.attention.kv_codes import PLAIN, KeptNumbers
from trtrun.kernels.triton.attention.paged_store import copy_tokens, rotate_and_write
from trtrun.kernels.triton.attention.prompt_suitability import is_chosen
from trtrun.kernels.triton.early_launch import early
from trtrun.kernels.triton.support import multiprocessors, shared_bytes
from trtrun.kvcache.formats import PLAIN as PLAIN_KV
from trtrun.kvcache.formats import KVFormat
from trtrun.kvcache.segments import AttentionSegment

_KEYS, _WIDE_KEYS, _STAGES = 128, 64, 2
"""Keys of one step of a program, and of one in float32, which takes twice the room; steps that are loaded at once."""

_PROGRAMS = 8
"""Programs of a multiprocessor, at most, that shares are dealt out to: a table may be much wider than a row's context,
and programs that find nothing to do take their time, too."""

_SMALLEST_TILE = 16

_WIDE_HEAD, _MOST_OF_WIDE = 256, 32
"""Numbers of a head beyond which registers hold what fewer queries gather, and queries of the largest tile then."""


class PagedAttention:
    """An AttentionBackend that copies no context: each program follows the block table."""

    tile: int | None = LARGEST_TILE
    reads_forks = True
    normalises_heads = True

    def __init__(self, kv_format: KVFormat = PLAIN_KV) -> None:
        """Read and write a store of this format, one that kernels of GPUs know."""
        self._format = kv_format

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        for part in self._format.parts(store):
            copy_tokens(part, source, target, offset)

    def forward(self, call: AttentionCall) -> torch.Tensor:
        batch = call.batch
        kv_heads, head_dim = call.value.shape[1:]
        kept = KeptNumbers.of(self._format, call.store_layer, call.kv_scales)
        query = call.query_key.new_empty((batch.segments[-1].stop, call.query_key.shape[1] - kv_heads, head_dim))
        for segment in batch.segments:
            rotate_and_write(call, segment, query, kept)
        output = torch.empty_like(query)
        for segment in batch.segments:
            self._attend(call, segment, query, output, kept)
        return output

    @staticmethod
    def _attend(
        call: AttentionCall, segment: AttentionSegment, query: torch.Tensor, output: torch.Tensor, kept: KeptNumbers
    ) -> None:
        store_layer, scale, window = call.store_layer, call.scale, call.window
        query, output = query[segment.start : segment.stop], output[segment.start : segment.stop]
        heads, head_dim = query.shape[1:]
        kv_heads, block_size = store_layer.shape[2:4]
        shares = -(-segment.block_tables.shape[1] * block_size // SHARE)
        places, lines = segment.queries * (heads // kv_heads), segment.rows * kv_heads
        units = multiprocessors(query.device)
        if kept.codes == PLAIN.value:
            knows = call.soft_cap is None  # that kernel knows none
            suits = knows and is_chosen(store_layer, call.sinks is not None, _attend_rows)
            tiling = choose_tiling(places, lines, shares, units, suits)
        else:
            tiling = tiling_of_codes(places, lines, shares, units)
        tile, is_split = tiling
        reach = 1 << 30 if window is None else window
        if tile is None:
            from trtrun.kernels.triton.attention.prompt_attention import attend

            tables, positions = segment.block_tables, segment.positions
            attend(query, store_layer, tables, positions, scale, reach, output, sinks=call.sinks)
            return
        for rows in _split_rows(segment, heads * (head_dim + 2) * 4 * shares if is_split else 0):
            tokens = slice(rows.start * segment.queries, rows.stop * segment.queries)
            tables, positions = segment.block_tables[rows], segment.positions[rows]
            out = output[tokens]
            _attend_rows(
                query[tokens], store_layer, tables, positions, scale, reach, out, tile, is_split, kept,
                call.soft_cap, call.sinks, looks=True,
            )  # fmt: skip


def _split_rows(segment: AttentionSegment, partial_bytes: int) -> list[slice]:
    """The rows of a segment in slices whose partial results, of `partial_bytes` a token, may exist at once."""
    step = segment.rows if not partial_bytes else max(1, MOST_PARTIAL_BYTES // (partial_bytes * segment.queries))
    return [slice(start, min(start + step, segment.rows)) for start in range(0, segment.rows, max(1, step))]


def _attend_rows(
    query: torch.Tensor,
    store_layer: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    output: torch.Tensor,
    tile: int = LARGEST_TILE,
    is_split: bool = False,
    kept: KeptNumbers | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    *,
    looks: bool = False,
) -> None:
    """Attend for some rows; see `prompt_attention.attend`. A program has at most `tile` queries of a KV head, heads
    counted. With `is_split` shares have programs of their own. The store has keys and values as `kept` says; None: as
    they are. For `soft_cap` and `sinks` see AttentionCall: each cap has a kernel of its own. It `looks` where rows
    stand before the kernels in front of it have ended, if `rotate_and_write` is one of them."""
    kept = kept or KeptNumbers.of(PLAIN_KV, store_layer, None)
    kv_heads, block_size = store_layer.shape[2:4]
    rows, queries = positions.shape
    tokens, heads, head_dim = query.shape
    group, shares = heads // kv_heads, -(-tables.shape[1] * block_size // SHARE)
    is_wide = query.dtype is torch.float32
    head_padded = max(16 if kept.codes == PLAIN.value else 32, _padded(head_dim))
    keys, largest = _sizes(head_padded, query.itemsize, shared_bytes(query.device))
    if kept.codes != PLAIN.value:  # which a larger one has no registers for
        largest = min(largest, MOST_SPLIT)
    tile = min(tile, largest, max(16, _padded(queries * group)))
    tiles = -(-queries * group // tile)
    slots, at_once = tokens * heads * shares if is_split else 0, 1
    if is_split:
        at_once = min(shares, max(1, _PROGRAMS * multiprocessors(query.device) // (rows * kv_heads * tiles)))
    sums, peaks = query.new_empty((2, slots), dtype=torch.float32)
    partial = query.new_empty((slots, head_dim), dtype=torch.float32)
    attend_kernel[(rows, kv_heads, tiles * at_once)](
        query, kept.numbers, kept.token_scales, store_layer.stride(0), kept.layer_scales,
        tables, positions, output, sums, peaks, partial, sums if sinks is None else sinks, scale,
        query.stride(0), query.stride(1),
        positions.stride(0), positions.stride(1), tables.stride(0),
        queries, kv_heads, group, window, shares, tiles,
        BLOCK_SIZE=block_size, HEAD=head_dim, HEAD_PADDED=head_padded, TILE=tile, SHARE=SHARE,
        KEYS=keys, IS_SPLIT=is_split, PRECISION="ieee" if is_wide else "tf32", CODES=kept.codes,
        HAS_LAYER_SCALES=kept.has_layer_scales, SOFT_CAP=soft_cap,
        HAS_SINKS=sinks is not None, LOOKS=looks, **_options(tile, kept.codes, head_padded), **early(query),
    )  # fmt: skip
    if is_split:
        combine_kernel[(tokens * heads,)](
            sums, peaks, partial, positions, output, sums if sinks is None else sinks,
            positions.stride(0), positions.stride(1), queries, heads, shares, window,
            SHARE=SHARE, HEAD=head_dim, HEAD_PADDED=_padded(head_dim), AT_ONCE=8,
            HAS_SINKS=sinks is not None, num_warps=1 if head_padded <= _WIDE_HEAD else 2, **early(query),
        )  # fmt: skip


def _options(tile: int, codes: int, head: int) -> dict[str, int]:
    """Options of a launch: how many threads a program has, of which size, and how far ahead it reads."""
    if head > _WIDE_HEAD:
        return {"num_warps": 4 if tile == _SMALLEST_TILE else 8, "num_stages": _STAGES}
    if codes == PLAIN.value:
        return {"num_warps": 8 if tile == LARGEST_TILE else 4, "num_stages": _STAGES}
    if tile == _SMALLEST_TILE:  # small programs, of which some widen while others wait
        return {"num_warps": 2, "num_stages": _STAGES + 1}
    return {"num_warps": 4, "num_stages": _STAGES + 1}


@cache
def _sizes(head: int, itemsize: int, shared: int) -> tuple[int, int]:
    """Keys of a step, and queries of the largest tile, that fit into so much shared memory. All programs of a device
    take the same number of keys: peaks are found step by step, so it shows in the bits."""

    def fits(tile: int, keys: int) -> bool:
        return (tile + 2 * _STAGES * keys) * head * itemsize <= shared

    keys, least = (_WIDE_KEYS if itemsize == 4 else _KEYS), MOST_SPLIT if head <= _WIDE_HEAD else _MOST_OF_WIDE
    while keys > 16 and not fits(least, keys):
        keys //= 2
    is_large = itemsize < 4 and head <= _WIDE_HEAD and fits(LARGEST_TILE, keys)
    return keys, LARGEST_TILE if is_large else least


def _padded(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()
