"""Penalties and masks of tokens in Triton for CUDA.

How often a row's tokens occurred is counted once for all of its positions. A row's counts are one int32 for each token:
how often the output has it, and a bit that says whether the prompt does. Draft tokens before a position are added in
registers. Sums of integers: the order does not matter. The arithmetic is sampling/penalties.py's, with the columns of
kernels/triton/sampling/columns.py. A mask copies logits, and what a bit forbids becomes -inf (sampling/row_steps.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.compile_processes import settle_keys
from trtrun.kernels.triton.sampling import columns
from trtrun.kernels.triton.sampling.lines import NUM_INTEGERS, NUM_NUMBERS, SMALL

_TOKENS = 1024
_PIECE = 2048
_IN_PROMPT = tl.constexpr(1 << 30)
_REPETITION = tl.constexpr(columns.REPETITION)
_PRESENCE = tl.constexpr(columns.PRESENCE)
_FREQUENCY = tl.constexpr(columns.FREQUENCY)
_NUM_PROMPT = tl.constexpr(columns.NUM_PROMPT)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=SMALL)
def _count_kernel(
    token_ids, token_stride, members, rows, lengths, integers, counts, vocabulary, width, TOKENS: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    member = tl.load(members + index)
    row = tl.load(rows + member)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = (place < tl.load(lengths + member)) & (place < width)
    token = tl.load(token_ids + row * token_stride + place, mask=inside, other=-1)
    inside &= (token >= 0) & (token < vocabulary)
    is_prompt = place < tl.load(integers + row * NUM_INTEGERS + _NUM_PROMPT)
    own = counts + index * vocabulary + token
    tl.atomic_or(own, _IN_PROMPT, mask=inside & is_prompt)
    tl.atomic_add(own, 1, mask=inside & ~is_prompt)


@triton.jit(do_not_specialize=["positions", "draft_stride"], do_not_specialize_on_alignment=SMALL)
def _penalise_kernel(
    logits, row_stride, position_stride, positions, vocabulary, members, rows, numbers, counts,
    draft_tokens, draft_stride, PIECE: tl.constexpr,
):  # fmt: skip
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index, position = line // positions, line % positions
    member = tl.load(members + index)
    row = tl.load(rows + member)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < vocabulary
    mark = tl.load(counts + index * vocabulary + token, mask=inside, other=0)
    for step in range(0, position.to(tl.int32)):
        mark += (token == tl.load(draft_tokens + member * draft_stride + step)).to(tl.int32)
    if tl.max(mark) > 0:  # few pieces have a token that occurred
        place = logits + member * row_stride + position * position_stride + token
        value = tl.load(place, mask=inside, other=0.0)
        repetition = tl.load(numbers + row * NUM_NUMBERS + _REPETITION)
        penalised = tl.where(value > 0.0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
        value = tl.where(mark > 0, penalised, value)
        count = (mark & (_IN_PROMPT - 1)).to(tl.float32)
        value -= count * tl.load(numbers + row * NUM_NUMBERS + _FREQUENCY)
        value -= tl.where(count > 0.0, tl.load(numbers + row * NUM_NUMBERS + _PRESENCE), 0.0)
        tl.store(place, value, mask=inside & (mark > 0))


def penalise_(
    logits: torch.Tensor,
    members: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    token_ids: torch.Tensor,
    width: int,
    draft_tokens: torch.Tensor | None,
    numbers: torch.Tensor,
    integers: torch.Tensor,
) -> None:
    """Repetition, presence and frequency penalties of some rows, in place.

    Args:
        logits: [R, P, V] float32, tokens contiguous.
        members: [n] int64 on the device: which of the R rows.
        rows: [R] int64: where each row stands in the tables and in `token_ids`.
        lengths: [R] int64: tokens of each row.
        token_ids: [max_rows, W] int32, valid below lengths; tokens outside [0, V) are not counted.
        width: upper bound of lengths, at most W.
        draft_tokens: [R, P - 1] int64, contiguous in each row; None when P is 1. At position i those before it count as
            output.
        numbers, integers: the tables.
    """
    count, (_, positions, vocabulary) = members.numel(), logits.shape
    counts = torch.zeros((count, vocabulary), dtype=torch.int32, device=logits.device)
    _count_kernel[(count, triton.cdiv(width, _TOKENS))](
        token_ids, token_ids.stride(0), members, rows, lengths, integers, counts, vocabulary, width,
        TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
    drafts = members if draft_tokens is None else draft_tokens
    _penalise_kernel[(count * positions, triton.cdiv(vocabulary, _PIECE))](
        logits, logits.stride(0), logits.stride(1), positions, vocabulary, members, rows, numbers, counts,
        drafts, drafts.stride(0), PIECE=_PIECE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocabulary", "words"], do_not_specialize_on_alignment=["places", "bits"])
def _mask_kernel(logits, places, bits, output, vocabulary, words, PIECE: tl.constexpr):
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < vocabulary
    value = tl.load(logits + line * vocabulary + token, mask=inside, other=0.0)
    place = tl.load(places + line).to(tl.int64)
    is_masked = (tl.zeros_like(token) + place) >= 0
    word = tl.load(bits + place * words + token // 32, mask=inside & is_masked, other=-1)
    is_allowed = ((word >> (token % 32)) & 1) == 1
    tl.store(output + line * vocabulary + token, tl.where(is_allowed, value, float("-inf")), mask=inside)


def mask_tokens(logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Mask tokens as `TorchOperations.mask_tokens` does."""
    logits, vocabulary = logits.contiguous(), logits.shape[-1]
    output = torch.empty_like(logits)
    lines = places.numel()
    if lines:
        _mask_kernel[(lines, triton.cdiv(vocabulary, _PIECE))](
            logits, places.contiguous(), bits, output, vocabulary, bits.shape[1], PIECE=_PIECE, num_warps=4
        )
    return output


settle_keys(globals())
