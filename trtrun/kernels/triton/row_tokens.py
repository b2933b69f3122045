"""What rounds read from rows' tokens and write to them, each in one Triton kernel for CUDA.

A round of a small model takes a millisecond, and every kernel between its forwards two or three microseconds. It knows
tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["ids_stride", "token_stride", "width"],
    do_not_specialize_on_alignment=["rows", "num_tokens", "tokens"],
)
def _advance_kernel(
    token_ids, ids_stride, lengths, rows, num_tokens, tokens, token_stride, width, PADDED: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    length = tl.load(lengths + row)
    step = tl.arange(0, PADDED)
    token = tl.load(tokens + place * token_stride + step, mask=step < width)
    tl.store(token_ids + row * ids_stride + length + step, token.to(token_ids.dtype.element_ty), mask=step < width)
    tl.store(lengths + row, length + tl.load(num_tokens + place))


def advance(
    token_ids: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Append tokens to rows, in place.

    Args:
        token_ids: [max_rows, max_seq_len] int32.
        lengths: [max_rows] int64.
        rows: [R] int64, each row once.
        num_tokens: [R] int64: by how much the rows become longer.
        tokens: [R, width] int64: what is written behind each row, all of it.
    """
    width = tokens.shape[1]
    if len(rows) and width:
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        _advance_kernel[(len(rows),)](
            token_ids, token_ids.stride(0), lengths, rows, num_tokens.contiguous(), tokens, tokens.stride(0), width,
            PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["ids_stride", "draft_stride", "queries"],
    do_not_specialize_on_alignment=["rows", "draft_tokens", "draft_lens", "tokens", "positions"],
)
def _with_drafts_kernel(
    token_ids, ids_stride, lengths, rows, draft_tokens, draft_stride, draft_lens, tokens, positions, queries,
    PADDED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    newest = tl.load(lengths + row) - 1
    step = tl.arange(0, PADDED)
    inside = step < queries
    first = tl.load(token_ids + row * ids_stride + newest).to(tl.int64)
    draft = tl.load(draft_tokens + place * draft_stride + step - 1, mask=inside & (step > 0), other=0)
    most = tl.maximum(tl.load(draft_lens + place), 0)
    tl.store(tokens + place * queries + step, tl.where(step == 0, first, draft), mask=inside)
    tl.store(positions + place * queries + step, tl.where(step <= most, newest + step, -1), mask=inside)


def with_drafts(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The newest token of each row, and its draft behind it.

    Args:
        token_ids: [max_rows, max_seq_len] int32.
        lengths: [max_rows] int64, at least 1.
        rows: [R] int64.
        draft_tokens: [R, K] int64; K may be 0.
        draft_lens: [R] int64; below 1 where a row has no draft.

    Returns:
        tokens and positions, [R, K + 1] int64 each; positions behind a row's draft are -1.
    """
    count, draft_len = draft_tokens.shape
    tokens, positions = rows.new_empty((2, count, draft_len + 1)).unbind()
    if count:
        draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
        _with_drafts_kernel[(count,)](
            token_ids, token_ids.stride(0), lengths, rows, draft_tokens, draft_tokens.stride(0),
            draft_lens.contiguous(), tokens, positions, draft_len + 1,
            PADDED=triton.next_power_of_2(draft_len + 1), num_warps=1,
        )  # fmt: skip
    return tokens, positions
