"""Attention that reads the paged KV store in place, as Triton kernels for CUDA.

The method is FlashAttention's online softmax (arXiv:2205.14135) over blocks found through the block table
(PagedAttention, arXiv:2309.06180), with long contexts split over programs whose partial results are combined
(Flash-Decoding). Grids follow from shapes that the host knows, so a forward can become a CUDA graph; how far each row
reaches is read from the positions on the device. It knows tensors; it does not know when Triton can be used (see
trtrun.attention.backend).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import copy_plain_tokens

_SPLIT_TOKENS = 256
"""Keys that one program works through where a context is split."""

_MOST_SPLITS = 64

PARTIAL_BYTES = 64 << 20
"""Partial results of split contexts that exist at once: 64 rows of 6 queries, 32 heads and 16k tokens have 400 MB."""

_KEYS = 64
"""Keys of one step of a program."""

_VARYING = ["queries", "position_row", "position_query", "table_row"]
"""Numbers that change from round to round: Triton must not compile a kernel of its own for each kind of them."""


@triton.jit(do_not_specialize=_VARYING)
def _write_kernel(
    key, value, positions, tables, store, value_offset,
    key_token, key_head, value_token, value_head, position_row, position_query, table_row,
    queries, kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """One token's key and value of one head to their place in the store."""
    token, head = tl.program_id(0), tl.program_id(1)
    row, query = token // queries, token % queries
    position = tl.load(positions + row * position_row + query * position_query)
    place = tl.maximum(position, 0)
    block = tl.load(tables + row * table_row + place // BLOCK_SIZE)
    block = tl.where(position < 0, 0, block)  # padding goes to the null block
    element = tl.arange(0, HEAD_PADDED)
    inside = element < HEAD
    target = ((block * kv_heads + head) * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD + element
    tl.store(store + target, tl.load(key + token * key_token + head * key_head + element, mask=inside), mask=inside)
    fresh = tl.load(value + token * value_token + head * value_head + element, mask=inside)
    tl.store(store + value_offset + target, fresh, mask=inside)


@triton.jit(do_not_specialize=[*_VARYING, "blocks", "splits"])
def _attend_kernel(
    query, store, value_offset, tables, positions, output, partial_sum, partial_peak, partial_output, scale,
    query_token, query_head, position_row, position_query, table_row,
    queries, kv_heads, group, blocks, window, splits,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row and KV head over one share of the row's context."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    tile, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    place = tile * TILE + tl.arange(0, TILE)
    index, head = place // group, kv_head * group + place % group
    real = index < queries
    own = tl.load(positions + row * position_row + index * position_query, mask=real, other=0)
    own = tl.maximum(own, 0)  # padding sees key 0 alone
    token = row * queries + index
    element = tl.arange(0, HEAD_PADDED)
    inside = element < HEAD
    mask = real[:, None] & inside[None, :]
    rotated = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + element[None, :], mask=mask, other=0.0
    )

    # Shares are multiples of KEYS: as many for every program as the table's width asks for, known to the host.
    share = tl.cdiv(tl.cdiv(blocks * BLOCK_SIZE, splits), KEYS) * KEYS
    start = split * share
    stop = tl.minimum(start + share, tl.max(own) + 1)
    oldest = tl.min(tl.where(real, own, tl.max(own))) - window + 1
    start = tl.maximum(start, tl.maximum(oldest, 0) // KEYS * KEYS)

    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    gathered = tl.zeros([TILE, HEAD_PADDED], tl.float32)
    for first in range(start, stop, KEYS):
        at = first + tl.arange(0, KEYS)
        known = at < stop
        block = tl.load(tables + row * table_row + at // BLOCK_SIZE, mask=known, other=0)
        base = ((block * kv_heads + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE) * HEAD
        keys = tl.load(store + base[None, :] + element[:, None], mask=known[None, :] & inside[:, None], other=0.0)
        # exp2 is the faster one: the factor of scale is log2(e).
        scores = tl.dot(rotated, keys, input_precision=PRECISION) * (scale * 1.4426950408889634)
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window) & known[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(peak - safe)
        values = tl.load(
            store + value_offset + base[:, None] + element[None, :], mask=known[:, None] & inside[None, :], other=0.0
        )
        total = total * fade + tl.sum(weights, axis=1)
        gathered = gathered * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        peak = higher

    heads = kv_heads * group
    result = token * heads + head
    if IS_SPLIT:
        slot = result * splits + split
        tl.store(partial_peak + slot, peak, mask=real)
        tl.store(partial_sum + slot, total, mask=real)
        tl.store(partial_output + slot[:, None] * HEAD + element[None, :], gathered, mask=mask)
    else:
        gathered = gathered / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + result[:, None] * HEAD + element[None, :], gathered.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_sum, partial_peak, partial_output, output, splits,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one token: its shares weighted by their sums."""
    slot = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST_SPLITS)
    real = split < splits
    element = tl.arange(0, HEAD_PADDED)
    inside = element < HEAD
    peaks = tl.load(partial_peak + slot * splits + split, mask=real, other=float("-inf"))
    factors = tl.exp2(peaks - tl.max(peaks, axis=0))
    total = tl.sum(factors * tl.load(partial_sum + slot * splits + split, mask=real, other=0.0), axis=0)
    parts = tl.load(
        partial_output + (slot * splits + split)[:, None] * HEAD + element[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    combined = tl.sum(parts * factors[:, None], axis=0) / total
    tl.store(output + slot * HEAD + element, combined.to(output.dtype.element_ty), mask=inside)


class PagedAttention:
    """An AttentionBackend that copies no context: each program follows the block table."""

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        copy_plain_tokens(store, source, target, offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        store_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for segment in batch.segments:
            self._write(key, value, store_layer, segment)
        for segment in batch.segments:
            self._attend(query, store_layer, segment, scale, window, output)
        return output

    @staticmethod
    def _write(key: torch.Tensor, value: torch.Tensor, store_layer: torch.Tensor, segment: AttentionSegment) -> None:
        key, value = key[segment.start : segment.stop], value[segment.start : segment.stop]
        _, num_blocks, kv_heads, block_size, head_dim = store_layer.shape
        _write_kernel[(key.shape[0], kv_heads)](
            key, value, segment.positions, segment.block_tables, store_layer,
            num_blocks * kv_heads * block_size * head_dim,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            segment.positions.stride(0), segment.positions.stride(1), segment.block_tables.stride(0),
            segment.queries, kv_heads,
            BLOCK_SIZE=block_size, HEAD=head_dim, HEAD_PADDED=_padded(head_dim), num_warps=1,
        )  # fmt: skip

    @staticmethod
    def _attend(
        query: torch.Tensor,
        store_layer: torch.Tensor,
        segment: AttentionSegment,
        scale: float,
        window: int | None,
        output: torch.Tensor,
    ) -> None:
        query, output = query[segment.start : segment.stop], output[segment.start : segment.stop]
        heads, kv_heads = query.shape[1], store_layer.shape[2]
        block_size, head_dim = store_layer.shape[3:]
        context = segment.block_tables.shape[1] * block_size
        is_split = segment.queries * (heads // kv_heads) <= 64
        # From the table's width alone: how a row's context is split must not depend on its company.
        splits = min(_MOST_SPLITS, -(-context // _SPLIT_TOKENS)) if is_split else 1
        for rows in _split_rows(segment, heads * (head_dim + 2) * 4 * splits if splits > 1 else 0):
            tokens = slice(rows.start * segment.queries, rows.stop * segment.queries)
            tables, positions = segment.block_tables[rows], segment.positions[rows]
            _attend_rows(query[tokens], store_layer, tables, positions, scale, window, splits, output[tokens])


def _split_rows(segment: AttentionSegment, partial_bytes: int) -> list[slice]:
    """The rows of a segment in slices whose partial results, of `partial_bytes` a token, may exist at once."""
    step = segment.rows if not partial_bytes else max(1, PARTIAL_BYTES // (partial_bytes * segment.queries))
    return [slice(start, min(start + step, segment.rows)) for start in range(0, segment.rows, max(1, step))]


def _attend_rows(
    query: torch.Tensor,
    store_layer: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None,
    splits: int,
    output: torch.Tensor,
) -> None:
    """Attend for some rows: query and output [rows * queries, heads, head], tables [rows, blocks], positions
    [rows, queries]."""
    _, num_blocks, kv_heads, block_size, head_dim = store_layer.shape
    rows, queries = positions.shape
    tokens, heads, _ = query.shape
    group = heads // kv_heads
    tile = min(64, max(16, _padded(queries * group)))
    tiles = -(-queries * group // tile)
    split_heads = tokens * heads * splits if splits > 1 else 0
    sums, peaks = query.new_empty((2, split_heads), dtype=torch.float32)
    partial = query.new_empty((split_heads, head_dim), dtype=torch.float32)
    _attend_kernel[(rows, kv_heads, tiles * splits)](
        query, store_layer, num_blocks * kv_heads * block_size * head_dim,
        tables, positions, output, sums, peaks, partial, scale,
        query.stride(0), query.stride(1),
        positions.stride(0), positions.stride(1), tables.stride(0),
        queries, kv_heads, group, tables.shape[1], 1 << 30 if window is None else window, splits,
        BLOCK_SIZE=block_size, HEAD=head_dim, HEAD_PADDED=max(16, _padded(head_dim)), TILE=tile, KEYS=_KEYS,
        IS_SPLIT=splits > 1, PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(tokens * heads,)](
            sums, peaks, partial, output, splits,
            HEAD=head_dim, HEAD_PADDED=_padded(head_dim), MOST_SPLITS=_MOST_SPLITS, num_warps=2,
        )  # fmt: skip


def _padded(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()
