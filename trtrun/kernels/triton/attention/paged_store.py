"""Writing to the paged KV store and copying within it, as Triton kernels for CUDA.

New keys are normalised, where the layer does that, and rotated before they are written, and values normalised. Norms
have the bits of `normalise_heads`; rotation rounds where the torch operations of `trtrun.kernels.cpu.operations` round.
Copies of blocks and tokens take all layers in one kernel. A store may have more numbers than 32 bits count: torch's
indexing then runs once for every part that has fewer, sixty kernels where one does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.triton.attention.kv_codes import ALIGNED, PLAIN, SCALE_BYTES, KeptNumbers, as_scales, to_codes
from trtrun.kernels.triton.early_launch import early, fetch, launch_next, lines_of, wait_for_all
from trtrun.kernels.triton.row_functions import factor_of_heads, weigh_heads
from trtrun.kvcache.segments import AttentionSegment


@triton.jit
def _load_heads(start, weight, cosine, sine, place, mask, HEAD: tl.constexpr, HAS_NORM: tl.constexpr):
    """The heads that begin at `start` [TOKENS, 1], the other halves beside them, the numbers of the norm's weight for
    both, and the angles of their places: float32 of the shape of `mask`, [TOKENS, PADDED], each. All of it is asked for
    before any is waited for."""
    element = tl.arange(0, mask.shape[1])[None, :]
    other_half = (element + HEAD // 2) % HEAD
    own = tl.load(start + element, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(start + other_half, mask=mask, other=0.0).to(tl.float32)
    own_weight, partner_weight = own, partner
    if HAS_NORM:
        # For each token, as a load of other shape would be laid out by itself, and moved through shared memory.
        at, other_at = tl.broadcast_to(element, own.shape), tl.broadcast_to(other_half, own.shape)
        own_weight = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight + other_at, mask=mask, other=0.0).to(tl.float32)
    cosines = tl.load(cosine + place * HEAD + element, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(sine + place * HEAD + element, mask=mask, other=0.0).to(tl.float32)
    return own, partner, own_weight, partner_weight, cosines, sines


@triton.jit
def _rotated(
    loaded, epsilon, HEAD: tl.constexpr, PADDED: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    kind: tl.constexpr,
):  # fmt: skip
    """What `_load_heads` has loaded, normalised if at all, then rotated: [TOKENS, PADDED] of the dtype `kind`."""
    own, partner, own_weight, partner_weight, cosines, sines = loaded
    if HAS_NORM:
        factor = factor_of_heads(own, epsilon, HEAD, PADDED)
        own = weigh_heads(own, factor, own_weight, ROUNDS_FIRST, kind).to(tl.float32)
        partner = weigh_heads(partner, factor, partner_weight, ROUNDS_FIRST, kind).to(tl.float32)
    # Each product is rounded by itself: a compiler would make one of a product and the sum behind it.
    straight = tl.fma(own, cosines, tl.zeros_like(own)).to(kind).to(tl.float32)
    crossed = tl.fma(partner, sines, tl.zeros_like(own)).to(kind).to(tl.float32)
    return (straight + crossed).to(kind)


@triton.jit
def find_slot(
    positions, tables, place, known, queries, kv_heads, head, position_row, position_query, table_row,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Find in which tile of the store the keys of one head go of the tokens at some places, and where in it: both of
    `place`'s shape."""
    row, query = place // queries, place % queries
    position = tl.load(positions + row * position_row + query * position_query, mask=known, other=-1)
    at = tl.maximum(position, 0)
    block = tl.load(tables + row * table_row + at // BLOCK_SIZE, mask=position >= 0, other=0)
    # Padding goes to the null block.
    return block * kv_heads + head, at % BLOCK_SIZE


@triton.jit
def _put(
    made, plane, scales, known, tile, within, element, mask, layer_scale,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr,
):  # fmt: skip
    """Write one head of some tokens, [TOKENS, PADDED], to keys or values that begin at `plane`, and where scales are
    the tokens', these to `scales`, the same memory."""
    if CODES == PLAIN:
        tl.store(plane + (tile * BLOCK_SIZE + within) * HEAD + element, made, mask=mask)
    else:
        rows = tl.where(mask, made.to(tl.float32), 0.0)
        width: tl.constexpr = HEAD if HAS_LAYER_SCALES else (HEAD + ALIGNED - 1) // ALIGNED * ALIGNED
        tile_bytes: tl.constexpr = BLOCK_SIZE * (width + (0 if HAS_LAYER_SCALES else SCALE_BYTES))
        if HAS_LAYER_SCALES:
            scale = tl.broadcast_to(tl.load(layer_scale), (made.shape[0],))
        else:
            scale = as_scales(tl.max(tl.abs(rows), axis=1), CODES)
            place = scales + (tile * tile_bytes + BLOCK_SIZE * width) // SCALE_BYTES + within
            tl.store(place, scale[:, None], mask=known)
        tl.store(plane + tile * tile_bytes + within * width + element, to_codes(rows, scale, CODES), mask=mask)


# Numbers that change from round to round: Triton must not compile a kernel of its own for each kind of them.
@triton.jit(
    do_not_specialize=["places", "queries", "position_row", "position_query", "table_row"],
    do_not_specialize_on_alignment=["positions", "tables", "nodes"],
)
def _rotate_and_write_kernel(
    query_key, value, cosine, sine, positions, tables, nodes, store, scales, value_offset, layer_scales, rotated,
    weight, epsilon, value_weight, value_epsilon,
    query_token, query_head, value_token, value_head, position_row, position_query, table_row,
    places, queries, heads, kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, HAS_NODES: tl.constexpr,
    HAS_NORM: tl.constexpr, NORM_LINES: tl.constexpr, HAS_VALUE_NORM: tl.constexpr, CODES: tl.constexpr,
    HAS_LAYER_SCALES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of the tokens at TOKENS places: those of queries, of keys, and of values, in this order. Queries and
    keys are normalised by `weight`, where they have a norm, and values by `value_weight`."""
    head = tl.program_id(1)
    if HAS_NORM:
        weight += tl.where(head < heads + kv_heads, head, 0) * HEAD  # that of values is another
        fetch(weight, tl.zeros([1], tl.int64), HEAD, NORM_LINES, EARLY)
    wait_for_all(EARLY)  # first: attention reads where rows stand before it waits
    launch_next(EARLY)
    place = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    known = place < places
    token = place
    if HAS_NODES:
        token = tl.load(nodes + place, mask=known, other=0)
    element = tl.arange(0, PADDED)[None, :]
    mask = known & (element < HEAD)
    kind: tl.constexpr = query_key.dtype.element_ty
    rounds_first: tl.constexpr = weight.dtype.element_ty == kind
    kv_head = (head - heads) % kv_heads
    if head < heads + kv_heads:
        start = query_key + token * query_token + head * query_head
        loaded = _load_heads(start, weight, cosine, sine, place, mask, HEAD, HAS_NORM)
        if head < heads:
            made = _rotated(loaded, epsilon, HEAD, PADDED, HAS_NORM, rounds_first, kind)
            tl.store(rotated + (place * heads + head) * HEAD + element, made, mask=mask)
        else:
            tile, within = find_slot(
                positions, tables, place, known, queries, kv_heads, kv_head, position_row, position_query, table_row,
                BLOCK_SIZE,
            )  # fmt: skip
            made = _rotated(loaded, epsilon, HEAD, PADDED, HAS_NORM, rounds_first, kind)
            _put(
                made, store, scales, known, tile, within, element, mask, layer_scales + kv_head,
                BLOCK_SIZE, HEAD, CODES, HAS_LAYER_SCALES,
            )  # fmt: skip
    else:
        made = tl.load(value + token * value_token + kv_head * value_head + element, mask=mask, other=0.0)
        if HAS_VALUE_NORM:
            at = kv_head * HEAD + tl.broadcast_to(element, made.shape)
            own, of_weight = made.to(tl.float32), tl.load(value_weight + at, mask=mask, other=0.0).to(tl.float32)
            factor = factor_of_heads(own, value_epsilon, HEAD, PADDED)
            made = weigh_heads(own, factor, of_weight, value_weight.dtype.element_ty == kind, kind)
        tile, within = find_slot(
            positions, tables, place, known, queries, kv_heads, kv_head, position_row, position_query, table_row,
            BLOCK_SIZE,
        )  # fmt: skip
        _put(
            made, store + value_offset, scales + value_offset // SCALE_BYTES, known, tile, within, element, mask,
            layer_scales + kv_heads + kv_head, BLOCK_SIZE, HEAD, CODES, HAS_LAYER_SCALES,
        )  # fmt: skip


def rotate_and_write(call: AttentionCall, segment: AttentionSegment, rotated: torch.Tensor, kept: KeptNumbers) -> None:
    """Rotate queries and keys of the tokens at a segment's places; the keys go to the store with the values, where
    there are any. What the call brings norms for is normalised first.

    Args:
        call: what attention takes; queries, keys and values are of its batch's tokens.
        segment: whose places.
        rotated: [places of the batch, heads, head], contiguous: gets the rotated queries.
        kept: how the store has keys and values.
    """
    query_key, value, store_layer, forks = call.query_key, call.value, call.store_layer, call.batch.forks
    places = slice(segment.start, segment.stop)
    rotated = rotated[places]
    nodes = None
    if forks is None:
        query_key, value = query_key[places], value[places]
    else:
        nodes = forks.nodes[places]
    cosine, sine = (table[places] for table in call.angles)
    kv_heads, block_size = store_layer.shape[2:4]
    count, heads, head_dim = rotated.shape
    written = 2 * kv_heads if call.writes else 0
    at_once, norm, value_norm = _tokens_at_once(count * (heads + written)), call.head_norm, call.value_norm
    _rotate_and_write_kernel[(triton.cdiv(count, at_once), heads + written)](
        query_key, value if call.writes else query_key, cosine, sine, segment.positions, segment.block_tables,
        segment.positions if nodes is None else nodes, store_layer, kept.token_scales, store_layer.stride(0),
        kept.layer_scales, rotated, *(norm or (query_key, 0.0)), *(value_norm or (query_key, 0.0)),
        query_key.stride(0), query_key.stride(1), value.stride(0), value.stride(1),
        segment.positions.stride(0), segment.positions.stride(1), segment.block_tables.stride(0),
        count, segment.queries, heads, kv_heads,
        BLOCK_SIZE=block_size, HEAD=head_dim, PADDED=triton.next_power_of_2(head_dim), TOKENS=at_once,
        HAS_NODES=nodes is not None, HAS_NORM=norm is not None, NORM_LINES=0 if norm is None else lines_of(norm[0], 1),
        HAS_VALUE_NORM=value_norm is not None, CODES=kept.codes, HAS_LAYER_SCALES=kept.has_layer_scales,
        num_warps=max(1, at_once // 4), **early(query_key),
    )  # fmt: skip


def _tokens_at_once(heads: int) -> int:
    """Tokens of one program, for so many heads of all tokens: a device begins no more than a program a nanosecond."""
    return 1 << min(4, max(0, (heads // 768).bit_length() - 1))


_WORDS = 2048
"""Words that a program copies at a time: of 32 bits, or of as many as what is copied is a multiple of."""


@triton.jit(do_not_specialize_on_alignment=["source", "target", "offset"])
def _copy_kernel(
    store, source, target, offset, plane_words, block_words, head_words, token_words,
    HAS_OFFSET: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Part of one block of one layer's keys, or of its values: all of it, or one head of a token where there is an
    offset."""
    which = tl.program_id(0)
    plane = store + tl.program_id(1).to(tl.int64) * plane_words
    # Blocks of a store are more bytes than 32 bits count, too.
    read = plane + tl.load(source + which) * block_words
    write = plane + tl.load(target + which) * block_words
    if HAS_OFFSET:
        start = tl.program_id(2).to(tl.int64) * head_words + tl.load(offset + which) * token_words
        at = tl.arange(0, WORDS)
        known = at < token_words
    else:
        start = tl.program_id(2).to(tl.int64) * WORDS
        at = tl.arange(0, WORDS)
        known = start + at < block_words
    tl.store(write + start + at, tl.load(read + start + at, mask=known), mask=known)


def copy_blocks(store: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy all layers' keys and values of whole blocks.

    Args:
        store: [layers, 2 or 1, blocks, kv_heads, block, width] of any dtype, contiguous; the last three dimensions
            have a multiple of four bytes.
        source: [n] int64 blocks.
        target: [n] int64 blocks, none twice; one that is a source, too, is its own.
    """
    layers, parts, blocks = store.shape[:3]
    words = store.view(-1).view(torch.int32)
    block_words = len(words) // (layers * parts * blocks)
    if len(source):
        _copy_kernel[(len(source), parts * layers, triton.cdiv(block_words, _WORDS))](
            words, source.contiguous(), target.contiguous(), source, blocks * block_words, block_words, 0, 0,
            HAS_OFFSET=False, WORDS=_WORDS, num_warps=4,
        )  # fmt: skip


def copy_tokens(store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
    """Copy all layers' keys and values of single tokens.

    Args:
        store: [layers, 2 or 1, blocks, kv_heads, block, width] of any dtype, where a tile has one token behind the
            other; its first dimensions are contiguous, and so is the last, as in views of parts of tiles.
        source: [n] int64 blocks.
        target: [n] int64 blocks, each with its offset at most once.
        offset: [n] int64: places in a block, the same in both.
    """
    if not len(source):
        return
    words = store.view(next(dtype for dtype in _WORD_DTYPES if _divides(store, dtype.itemsize)))
    layers, parts, _, kv_heads, _, width = words.shape
    _, plane, block, head, token, _ = words.stride()
    assert token == width, "a token's numbers lie one behind the other"
    _copy_kernel[(len(source), parts * layers, kv_heads)](
        words, source.contiguous(), target.contiguous(), offset.contiguous(), plane, block, head, token,
        HAS_OFFSET=True, WORDS=triton.next_power_of_2(token), num_warps=1,
    )  # fmt: skip


_WORD_DTYPES = (torch.int32, torch.int16, torch.int8)


def _divides(store: torch.Tensor, size: int) -> bool:
    counts = (store.shape[-1], store.storage_offset(), *store.stride()[:-1])
    return all(count * store.element_size() % size == 0 for count in counts)


def takes_blocks(store: torch.Tensor) -> bool:
    """Whether blocks of all heads are whole words."""
    kv_heads, block_size, width = store.shape[3:]
    return kv_heads * block_size * width * store.element_size() % 4 == 0
