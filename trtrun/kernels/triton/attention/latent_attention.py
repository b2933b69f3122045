"""Attention over latents that reads the paged store in place, on CUDA.

The method is that of paged_attention.py with one key for all heads, whose first numbers are the value: a tile has the
heads of some queries of a row, and long contexts are split over programs. Shares are the same whoever computes them, so
a query has the same bits in a round, in a prompt and in any company. It knows tensors; it does not know when Triton can
be used (see trtrun.attention.latents).
"""

from __future__ import annotations

from functools import cache

import torch
import triton

from trtrun.kernels.arguments import LatentCall
from trtrun.kernels.triton.attention.attention_steps import combine_kernel
from trtrun.kernels.triton.attention.attention_tiles import LARGEST_TILE, MOST_LATENT_BYTES
from trtrun.kernels.triton.attention.kv_codes import PLAIN, KeptNumbers
from trtrun.kernels.triton.attention.latent_kernels import attend_latents_kernel, write_kernel
from trtrun.kernels.triton.attention.paged_store import copy_tokens
from trtrun.kernels.triton.early_launch import early
from trtrun.kernels.triton.support import multiprocessors, shared_bytes
from trtrun.kvcache.formats import PLAIN as PLAIN_KV
from trtrun.kvcache.formats import KVFormat
from trtrun.kvcache.segments import AttentionSegment

_SHARE = 128
"""Keys of a share: few, as one row has few tiles, and each multiprocessor reads only so fast."""

_KEYS, _STAGES = 64, 2
"""Keys of one step of a program, at most; steps that are loaded at once."""

_TILE, _LEAST_TILE = 32, 16
"""Queries of a program, heads counted: more of them have no registers for what is gathered, twice."""

_PROGRAMS = 4
"""Programs of a multiprocessor, at most, that shares are dealt out to."""

_MOST_HEADS = 16
"""Heads of a program that turns queries."""

_LEAST_WIDTH = 16
"""Fewer numbers than that a matrix unit does not add up."""


class PagedLatents:
    """A LatentBackend that copies no context."""

    tile: int | None = LARGEST_TILE

    def __init__(self, kv_format: KVFormat = PLAIN_KV) -> None:
        """Read and write a store of this format, one that kernels of GPUs know, without scales of layers."""
        self._format = kv_format

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        for part in self._format.parts(store):
            copy_tokens(part, source, target, offset)

    def forward(self, call: LatentCall) -> torch.Tensor:
        kept = KeptNumbers.of(self._format, call.store_layer, None)
        query, turned = call.query.contiguous(), call.turned_query.new_empty(call.turned_query.shape)
        output = torch.empty_like(query)
        for segment in call.batch.segments:
            _write(call, segment, turned, kept)
        for segment in call.batch.segments:
            places = slice(segment.start, segment.stop)
            _attend(call, segment, query[places], turned[places], output[places], kept)
        return output


def _write(call: LatentCall, segment: AttentionSegment, turned: torch.Tensor, kept: KeptNumbers) -> None:
    """Keep the latents of a segment's places; `turned` [places of the batch, heads, rotated] gets their queries'."""
    places = slice(segment.start, segment.stop)
    query, latent, key = call.turned_query[places], call.latent[places], call.turned_key[places]
    cosine, sine = (table[places] for table in call.angles)
    count, heads, width = query.shape
    rank = latent.shape[1]
    at_once = min(_MOST_HEADS, _padded(heads))
    write_kernel[(count, triton.cdiv(heads, at_once) + 1)](
        query, latent, key, cosine, sine, segment.positions, segment.block_tables, call.store_layer, kept.token_scales,
        turned[places],
        query.stride(0), query.stride(1), latent.stride(0), key.stride(0),
        segment.positions.stride(0), segment.positions.stride(1), segment.block_tables.stride(0),
        count, segment.queries, heads,
        BLOCK_SIZE=call.store_layer.shape[3], RANK=rank, RANK_PADDED=_padded(rank), TURNED=width,
        TURNED_PADDED=_padded(width), HEADS=at_once, INTERLEAVED=call.interleaved,
        CODES=kept.codes, num_warps=2, **early(query),
    )  # fmt: skip


def _attend(
    call: LatentCall,
    segment: AttentionSegment,
    query: torch.Tensor,
    turned: torch.Tensor,
    output: torch.Tensor,
    kept: KeptNumbers,
) -> None:
    """Attend for a segment's places. Shares have programs of their own where time, and memory, want it so.

    Args:
        call: of which the store and the scale count.
        segment: whose places.
        query, turned: of these, [places, heads, rank] and [places, heads, rotated], the latter rotated; contiguous.
        output: like `query`; gets what they attend.
        kept: how the store has latents.
    """
    heads, rank = query.shape[1:]
    shares = _count_shares(segment.block_tables, call.store_layer)
    tiles = -(-segment.queries * heads // _choose_tile(segment.queries * heads))
    row_bytes = segment.queries * heads * shares * (rank + 2) * 4
    is_few = segment.rows * tiles < multiprocessors(query.device)
    is_split = shares > 1 and is_few and row_bytes <= MOST_LATENT_BYTES
    step = max(1, MOST_LATENT_BYTES // row_bytes) if is_split else segment.rows
    for start in range(0, segment.rows, step):
        rows = slice(start, min(start + step, segment.rows))
        tokens = slice(rows.start * segment.queries, rows.stop * segment.queries)
        _attend_rows(
            call, segment.block_tables[rows], segment.positions[rows], query[tokens], turned[tokens], output[tokens],
            kept, is_split,
        )  # fmt: skip


def _attend_rows(
    call: LatentCall,
    tables: torch.Tensor,
    positions: torch.Tensor,
    query: torch.Tensor,
    turned: torch.Tensor,
    output: torch.Tensor,
    kept: KeptNumbers,
    is_split: bool,
) -> None:
    rows, queries = positions.shape
    tokens, heads, rank = query.shape
    width, store = turned.shape[2], call.store_layer
    shares = _count_shares(tables, store)
    tile = _choose_tile(queries * heads)
    tiles = -(-queries * heads // tile)
    slots, at_once = tokens * heads * shares if is_split else 0, 1
    if is_split:
        at_once = min(shares, max(1, _PROGRAMS * multiprocessors(query.device) // (rows * tiles)))
    sums, peaks = query.new_empty((2, slots), dtype=torch.float32)
    partial = query.new_empty((slots, rank), dtype=torch.float32)
    # Codes are dealt with in halves, and being half as many bytes they are loaded further ahead.
    least, stages = (_LEAST_WIDTH, _STAGES) if kept.codes == PLAIN.value else (2 * _LEAST_WIDTH, _STAGES + 1)
    rank_padded, width_padded = max(least, _padded(rank)), max(least, _padded(width))
    keys = _keys_of_step(rank_padded + width_padded, query.itemsize, shared_bytes(query.device))
    attend_latents_kernel[(rows, tiles * at_once)](
        query, turned, kept.numbers, kept.token_scales, tables, positions, output, sums, peaks, partial, call.scale,
        positions.stride(0), positions.stride(1), tables.stride(0), queries, heads, shares, tiles,
        BLOCK_SIZE=store.shape[3], RANK=rank, RANK_PADDED=rank_padded, TURNED=width, TURNED_PADDED=width_padded,
        TILE=tile, SHARE=_SHARE, KEYS=keys, IS_SPLIT=is_split,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        CODES=kept.codes, num_warps=8, num_stages=stages, **early(query),
    )  # fmt: skip
    if is_split:
        combine_kernel[(tokens * heads,)](
            sums, peaks, partial, positions, output, sums, positions.stride(0), positions.stride(1), queries, heads,
            shares, 1 << 30,
            SHARE=_SHARE, HEAD=rank, HEAD_PADDED=_padded(rank), AT_ONCE=8, HAS_SINKS=False, num_warps=4,
            **early(query),
        )  # fmt: skip


def _choose_tile(places: int) -> int:
    """Queries of a program, where a row has so many, heads counted."""
    return _TILE if places > _LEAST_TILE else _LEAST_TILE


@cache
def _keys_of_step(width: int, itemsize: int, shared: int) -> int:
    """Keys of a step that fit into so much shared memory beside queries, be they loaded as they are or as codes, which
    lie there in half the bytes and widened once. All programs of a device take the same number: peaks are found step by
    step, so it shows in the bits."""
    keys = _KEYS
    while keys > _LEAST_WIDTH and (_TILE + _STAGES * keys) * width * itemsize > shared:
        keys //= 2
    return keys


def _count_shares(tables: torch.Tensor, store: torch.Tensor) -> int:
    """Shares of the keys that rows with such block tables may have."""
    return -(-tables.shape[1] * store.shape[3] // _SHARE)


def _padded(size: int) -> int:
    return int(triton.next_power_of_2(size))
