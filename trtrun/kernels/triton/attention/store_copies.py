"""Copying blocks and tokens within the paged KV store, of all layers in one Triton kernel for CUDA.

A store may have more numbers than 32 bits count. Torch's indexing then runs once for every part that has fewer: sixty
kernels where one does. It knows tensors; it does not know who owns a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
        store: [layers, 2, blocks, kv_heads, block, width] of any dtype, contiguous; the last three dimensions have a
            multiple of four bytes.
        source: [n] int64 blocks.
        target: [n] int64 blocks, none twice; one that is a source, too, is its own.
    """
    layers, _, blocks = store.shape[:3]
    words = store.view(-1).view(torch.int32)
    block_words = len(words) // (layers * 2 * blocks)
    if len(source):
        _copy_kernel[(len(source), 2 * layers, triton.cdiv(block_words, _WORDS))](
            words, source.contiguous(), target.contiguous(), source, blocks * block_words, block_words, 0, 0,
            HAS_OFFSET=False, WORDS=_WORDS, num_warps=4,
        )  # fmt: skip


def copy_tokens(store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
    """Copy all layers' keys and values of single tokens.

    Args:
        store: [layers, 2, blocks, kv_heads, block, width] of any dtype, where a tile has one token behind the other;
            its first dimensions are contiguous, and so is the last, as in views of parts of tiles.
        source: [n] int64 blocks.
        target: [n] int64 blocks, each with its offset at most once.
        offset: [n] int64: places in a block, the same in both.
    """
    if not len(source):
        return
    words = store.view(next(dtype for dtype in _WORD_DTYPES if _divides(store, dtype.itemsize)))
    layers, _, _, kv_heads, _, width = words.shape
    _, plane, block, head, token, _ = words.stride()
    assert token == width, "a token's numbers lie one behind the other"
    _copy_kernel[(len(source), 2 * layers, kv_heads)](
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
