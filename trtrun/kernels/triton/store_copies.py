"""Copying blocks and tokens within the paged KV store, of all layers in one Triton kernel for CUDA.

A store may have more numbers than 32 bits count. Torch's indexing then runs once for every part that has fewer: sixty
kernels where one does. It knows tensors; it does not know who owns a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 2048
"""32-bit words that a program copies at a time."""


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
    words = _as_words(store)
    layers, _, _, kv_heads, block_size, width = words.shape
    block_words = kv_heads * block_size * width
    if len(source):
        _copy_kernel[(len(source), 2 * layers, triton.cdiv(block_words, _WORDS))](
            words, source.contiguous(), target.contiguous(), source, words.stride(1), block_words, 0, 0,
            HAS_OFFSET=False, WORDS=_WORDS, num_warps=4,
        )  # fmt: skip


def copy_tokens(store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
    """Copy all layers' keys and values of single tokens, where a tile has one token behind the other.

    Args:
        store: as in `copy_blocks`; a head of a token has a multiple of four bytes.
        source: [n] int64 blocks.
        target: [n] int64 blocks, each with its offset at most once.
        offset: [n] int64: places in a block, the same in both.
    """
    words = _as_words(store)
    layers, _, _, kv_heads, block_size, width = words.shape
    if len(source):
        _copy_kernel[(len(source), 2 * layers, kv_heads)](
            words, source.contiguous(), target.contiguous(), offset.contiguous(), words.stride(1),
            kv_heads * block_size * width, block_size * width, width,
            HAS_OFFSET=True, WORDS=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


def takes_store(store: torch.Tensor) -> bool:
    """Whether heads of tokens are whole words."""
    return store.shape[-1] * store.element_size() % 4 == 0


def _as_words(store: torch.Tensor) -> torch.Tensor:
    return store.view(torch.int32)
