"""Writing keys and values to the paged KV store, as Triton kernels for CUDA, with the rotation before it.

Rotation rounds where the torch operations of `trtrun.kernels.cpu.operations` round. It knows tensors; it does not know
who attends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kvcache.segments import AttentionSegment


@triton.jit
def _rotated(start, cosine, sine, place, known, HEAD: tl.constexpr, PADDED: tl.constexpr):
    """The heads that begin at `start` [TOKENS, 1], rotated by the angles of their places: [TOKENS, PADDED]."""
    element = tl.arange(0, PADDED)[None, :]
    mask = known & (element < HEAD)
    kind = start.dtype.element_ty
    own = tl.load(start + element, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(start + (element + HEAD // 2) % HEAD, mask=mask, other=0.0).to(tl.float32)
    # Each product is rounded by itself: a compiler would make one of a product and the sum behind it.
    nothing = tl.zeros_like(own)
    straight = tl.fma(own, tl.load(cosine + place * HEAD + element, mask=mask, other=0.0).to(tl.float32), nothing)
    crossed = tl.fma(partner, tl.load(sine + place * HEAD + element, mask=mask, other=0.0).to(tl.float32), nothing)
    return (straight.to(kind).to(tl.float32) + crossed.to(kind).to(tl.float32)).to(kind)


@triton.jit
def _slot(
    positions, tables, place, known, queries, kv_heads, head, position_row, position_query, table_row,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where in the store the keys of one head go of the tokens at some places, counted in heads: of `place`'s shape."""
    row, query = place // queries, place % queries
    position = tl.load(positions + row * position_row + query * position_query, mask=known, other=-1)
    at = tl.maximum(position, 0)
    block = tl.load(tables + row * table_row + at // BLOCK_SIZE, mask=position >= 0, other=0)
    # Padding goes to the null block.
    return (block * kv_heads + head) * BLOCK_SIZE + at % BLOCK_SIZE


# Numbers that change from round to round: Triton must not compile a kernel of its own for each kind of them.
@triton.jit(
    do_not_specialize=["places", "queries", "position_row", "position_query", "table_row"],
    do_not_specialize_on_alignment=["positions", "tables", "nodes"],
)
def _rotate_and_write_kernel(
    query_key, value, cosine, sine, positions, tables, nodes, store, value_offset, rotated,
    query_token, query_head, value_token, value_head, position_row, position_query, table_row,
    places, queries, heads, kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, HAS_NODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One head of the tokens at TOKENS places: those of queries, of keys, and of values, in this order."""
    begin(EARLY)
    head = tl.program_id(1)
    place = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    known = place < places
    token = place
    if HAS_NODES:
        token = tl.load(nodes + place, mask=known, other=0)
    element = tl.arange(0, PADDED)[None, :]
    mask = known & (element < HEAD)
    if head < heads:
        start = query_key + token * query_token + head * query_head
        made = _rotated(start, cosine, sine, place, known, HEAD, PADDED)
        tl.store(rotated + (place * heads + head) * HEAD + element, made, mask=mask)
    else:
        kv_head = (head - heads) % kv_heads
        slot = _slot(
            positions, tables, place, known, queries, kv_heads, kv_head, position_row, position_query, table_row,
            BLOCK_SIZE,
        )  # fmt: skip
        target = store + slot * HEAD + element
        if head < heads + kv_heads:
            start = query_key + token * query_token + head * query_head
            tl.store(target, _rotated(start, cosine, sine, place, known, HEAD, PADDED), mask=mask)
        else:
            start = value + token * value_token + kv_head * value_head
            tl.store(target + value_offset, tl.load(start + element, mask=mask), mask=mask)


def rotate_and_write(
    query_key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    store_layer: torch.Tensor,
    segment: AttentionSegment,
    rotated: torch.Tensor,
    nodes: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys of the tokens at a segment's places; the keys go to the store with the values.

    Args:
        query_key: [tokens of the batch, heads + kv_heads, head].
        value: [tokens of the batch, kv_heads, head].
        angles: cosines and signed sines, [places of the batch, 1, head] each; see RotaryEmbedding.
        store_layer: [2, blocks, kv_heads, block, head].
        segment: whose places.
        rotated: [places of the batch, heads, head], contiguous: gets the rotated queries.
        nodes: [places of the batch] int64: the token at each place; None where each is its token's own.
    """
    places = slice(segment.start, segment.stop)
    rotated = rotated[places]
    if nodes is None:
        query_key, value = query_key[places], value[places]
    else:
        nodes = nodes[places]
    cosine, sine = (table[places] for table in angles)
    _, num_blocks, kv_heads, block_size, head_dim = store_layer.shape
    count, heads = rotated.shape[:2]
    at_once = _tokens_at_once(count * (heads + 2 * kv_heads))
    _rotate_and_write_kernel[(triton.cdiv(count, at_once), heads + 2 * kv_heads)](
        query_key, value, cosine, sine, segment.positions, segment.block_tables,
        segment.positions if nodes is None else nodes, store_layer,
        num_blocks * kv_heads * block_size * head_dim, rotated,
        query_key.stride(0), query_key.stride(1), value.stride(0), value.stride(1),
        segment.positions.stride(0), segment.positions.stride(1), segment.block_tables.stride(0),
        count, segment.queries, heads, kv_heads,
        BLOCK_SIZE=block_size, HEAD=head_dim, PADDED=triton.next_power_of_2(head_dim), TOKENS=at_once,
        HAS_NODES=nodes is not None, num_warps=max(1, at_once // 4), **early(value),
    )  # fmt: skip


def _tokens_at_once(heads: int) -> int:
    """Tokens of one program, for so many heads of all tokens: a device begins no more than a program a nanosecond."""
    return 1 << min(4, max(0, (heads // 768).bit_length() - 1))
