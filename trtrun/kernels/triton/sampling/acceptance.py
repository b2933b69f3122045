"""Acceptance of draft tokens in Triton for CUDA: by token, and by the ratio of probabilities; and the verdict's way to
the host.

What is decided is speculation/verify.py's; by probability it is decided from lines of logits, without a table of the
target's probabilities: a program for each row looks at the draft tokens alone, and the one position behind the
accepted ones is read over the vocabulary. It knows lines, drafts and keyed noise. It does not know where drafts come
from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.compile_processes import settle_keys
from trtrun.kernels.triton.sampling import columns
from trtrun.kernels.triton.sampling.lines import (
    LOG_MIN_P,
    NUM_INTEGERS,
    NUM_NUMBERS,
    PIECE,
    SMALL,
    TEMPERATURE,
    Lines,
    distances,
    is_kept,
    line_of,
    peak_of,
)
from trtrun.kernels.triton.sampling.token_choice import (
    best_of,
    inverse_total,
    key_of,
    log_exponentials,
    sum_weights,
    to_uniform,
)

_SEED = tl.constexpr(columns.SEED)


@triton.jit(
    do_not_specialize=["draft_stride", "draft_len"],
    do_not_specialize_on_alignment=["target_tokens", "draft_tokens", "draft_lens", "num_tokens", "tokens"],
)
def _accept_by_token_kernel(
    target_tokens, draft_tokens, draft_stride, draft_lens, num_tokens, tokens, draft_len, PADDED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, PADDED)
    target = tl.load(target_tokens + row * (draft_len + 1) + step, mask=step <= draft_len, other=-1)
    draft = tl.load(draft_tokens + row * draft_stride + step, mask=step < draft_len, other=-1)
    is_accepted = (draft == target) & (step < draft_len) & (step < tl.load(draft_lens + row))
    accepted = tl.min(tl.where(is_accepted, PADDED, step))
    tl.store(num_tokens + row, (accepted + 1).to(tl.int64))
    tl.store(tokens + row * (draft_len + 1) + step, tl.where(step <= accepted, target, -1), mask=step <= draft_len)


def accept_by_token(
    target_tokens: torch.Tensor, draft_tokens: torch.Tensor, draft_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept by token as speculation/verify.py does; `target_tokens` and each row of `draft_tokens` [R, K] are
    contiguous."""
    draft_lens = draft_lens.contiguous()
    count, draft_len = draft_tokens.shape
    num_tokens, tokens = torch.empty_like(draft_lens), torch.empty_like(target_tokens)
    if count:
        _accept_by_token_kernel[(count,)](
            target_tokens, draft_tokens, draft_tokens.stride(0), draft_lens, num_tokens, tokens, draft_len,
            PADDED=triton.next_power_of_2(draft_len + 1), num_warps=1,
        )  # fmt: skip
    return num_tokens, tokens


_WORDS = 16
"""Tokens of a row that a verdict is packed with, padding counted, unless it has more: few sizes make few kernels."""


@triton.jit(
    do_not_specialize=["token_stride", "logit_stride", "width", "num_found"],
    do_not_specialize_on_alignment=["num_tokens", "draft_lens", "tokens", "logits", "found", "packed"],
)
def _pack_verdict_kernel(
    num_tokens, draft_lens, tokens, token_stride, logits, logit_stride, found, num_found, packed, width,
    HAS_FOUND: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WORDS)
    line = packed + row * ((3 if HAS_FOUND else 2) + 2 * width)
    tl.store(line, tl.load(num_tokens + row))
    tl.store(line + 1, tl.load(draft_lens + row))
    token = tl.load(tokens + row * token_stride + step, mask=step < width)
    tl.store(line + 2 + step, token, mask=step < width)
    logit = tl.load(logits + row * logit_stride + step, mask=step < width)
    tl.store(line + 2 + width + step, logit.to(tl.int32, bitcast=True).to(tl.int64), mask=step < width)
    if HAS_FOUND:
        tl.store(line + 2 + 2 * width, tl.load(found + row, mask=row < num_found, other=0))


def pack_verdict(
    num_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    tokens: torch.Tensor,
    chosen_logits: torch.Tensor,
    found: torch.Tensor | None,
) -> torch.Tensor:
    """Have a verdict on the host as torch's operations do. The kernel writes to the host's memory itself: a copy by the
    engines for these takes as long, and before and after it the device does nothing for 6 and 11 to 17 µs (H200)."""
    count, width = tokens.shape
    packed = torch.empty((count, 2 + 2 * width + (found is not None)), dtype=torch.int64, pin_memory=tokens.is_cuda)
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    chosen_logits = chosen_logits if chosen_logits.stride(1) == 1 else chosen_logits.contiguous()
    more = num_tokens if found is None else found.contiguous()
    if count:
        _pack_verdict_kernel[(count,)](
            num_tokens.contiguous(), draft_lens.contiguous(), tokens, tokens.stride(0),
            chosen_logits, chosen_logits.stride(0), more, len(more), packed, width,
            HAS_FOUND=found is not None, WORDS=max(_WORDS, triton.next_power_of_2(width)), num_warps=1,
        )  # fmt: skip
    return packed


@triton.jit(do_not_specialize=["positions", "draft_stride"], do_not_specialize_on_alignment=SMALL)
def _accept_by_probability_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, picks, lengths, numbers, integers,
    peaks, limits, lasts, sums, draft_probs, probs_row_stride, probs_position_stride,
    draft_tokens, draft_stride, draft_lens, num_accepted, pieces, stream, PADDED: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    pick = tl.load(picks + member)
    row = tl.load(rows + pick)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
    log_min_p = tl.load(numbers + row * NUM_NUMBERS + LOG_MIN_P)
    seed, length = tl.load(integers + row * NUM_INTEGERS + _SEED), tl.load(lengths + pick)
    draft_len = tl.minimum(tl.load(draft_lens + pick), positions - 1).to(tl.int32)
    accepted = tl.full((), 0, tl.int32)
    goes_on = draft_len > 0
    step = tl.full((), 0, tl.int32)
    lane = tl.arange(0, 16)  # one token in all lanes: what a line computes is written for tensors
    while goes_on:
        source = pick * positions + step
        token = tl.load(draft_tokens + pick * draft_stride + step)
        is_token = (token >= 0) & (token < vocabulary)
        known = tl.where(is_token, token, 0)
        peak = peak_of(peaks, source, pieces, PADDED)
        begin = line_of(logits, row_stride, position_stride, positions, source)
        distance = distances(begin, known + lane * 0, vocabulary, peak, temperature)
        kept = is_kept(distance, known + lane * 0, tl.load(limits + source), tl.load(lasts + source), log_min_p)
        weight = tl.max(tl.where(kept, tl.exp(-distance), 0.0))
        target = weight * inverse_total(sums, member * positions + step, pieces, PADDED)
        draft = tl.load(draft_probs + member * probs_row_stride + step * probs_position_stride + known)
        number = to_uniform(key_of(seed, length + step, stream))
        # A draft without a distribution, whose logits were not finite, has nobody's tokens.
        is_accepted = is_token & (draft > 0.0) & (number * draft < target)
        accepted += is_accepted.to(tl.int32)
        step += 1
        goes_on = is_accepted & (step < draft_len)
    tl.store(num_accepted + member, accepted)


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _last_scores_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, picks, lengths, numbers, integers,
    peaks, limits, lasts, sums, draft_probs, probs_row_stride, probs_position_stride, draft_lens, num_accepted,
    best, places, target_stream, recover_stream, PIECE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    member, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    pick = tl.load(picks + member)
    row = tl.load(rows + pick)
    accepted = tl.load(num_accepted + member)
    is_full = accepted >= tl.load(draft_lens + pick)
    source = pick * positions + accepted
    peak = peak_of(peaks, source, pieces, PADDED)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
    log_min_p = tl.load(numbers + row * NUM_NUMBERS + LOG_MIN_P)
    token = piece * PIECE + tl.arange(0, PIECE)
    begin = line_of(logits, row_stride, position_stride, positions, source)
    distance = distances(begin, token, vocabulary, peak, temperature)
    kept = is_kept(distance, token, tl.load(limits + source), tl.load(lasts + source), log_min_p)
    whole = tl.full((PIECE,), float("-inf"), tl.float32)
    residual = tl.full((PIECE,), float("-inf"), tl.float32)
    if tl.max(kept.to(tl.int32)) > 0:
        stream = tl.where(is_full, target_stream, recover_stream)
        position = tl.load(lengths + pick) + accepted
        noise = log_exponentials(key_of(tl.load(integers + row * NUM_INTEGERS + _SEED), position, stream), token)
        whole = tl.where(kept, 0.0 - distance - noise, float("-inf"))
        if not is_full:
            scale = inverse_total(sums, member * positions + accepted, pieces, PADDED)
            place = draft_probs + member * probs_row_stride + accepted * probs_position_stride
            draft = tl.load(place + token, mask=token < vocabulary, other=0.0)
            excess = tl.where(kept, tl.exp(-distance) * scale - draft, 0.0)
            left = tl.where(excess > 0.0, excess, 1.0)
            residual = tl.where(excess > 0.0, tl.log(left) - noise, float("-inf"))
    at = member * 2 * pieces + piece
    largest, lane = tl.max(residual, axis=0, return_indices=True)
    tl.store(best + at, largest)
    tl.store(places + at, piece * PIECE + lane)
    largest, lane = tl.max(whole, axis=0, return_indices=True)
    tl.store(best + at + pieces, largest)
    tl.store(places + at + pieces, piece * PIECE + lane)


@triton.jit(do_not_specialize=["positions", "draft_stride"], do_not_specialize_on_alignment=SMALL)
def _gain_kernel(
    picks, best, places, draft_tokens, draft_stride, num_accepted, num_tokens, tokens, positions, pieces,
    PADDED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    pick = tl.load(picks + member)
    accepted = tl.load(num_accepted + member)
    piece = tl.arange(0, PADDED)
    residual = tl.load(best + member * 2 * pieces + piece, mask=piece < pieces, other=float("-inf"))
    # No residual after full acceptance, or where two distributions are equal to the last bit: the target's own then.
    line = member * 2 + (tl.max(residual) == float("-inf")).to(tl.int64)
    last = best_of(best, places, line, pieces, PADDED).to(tl.int64)
    step = tl.arange(0, STEPS)
    draft = tl.load(draft_tokens + pick * draft_stride + step, mask=step < positions - 1, other=-1)
    gained = tl.where(step < accepted, draft, tl.where(step == accepted, last, -1))
    tl.store(num_tokens + pick, (accepted + 1).to(tl.int64))
    tl.store(tokens + pick * positions + step, gained, mask=step < positions)


def accept_by_probability(
    lines: Lines,
    picks: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    streams: tuple[int, int, int],
    num_tokens: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Speculative sampling of some rows; see speculation/verify.py.

    Args:
        lines: of R rows at K + 1 positions, cut.
        picks: [S] int64 on the device: which rows; all sampled.
        draft_probs: [S, K, V] float32, tokens contiguous.
        draft_tokens: [R, K] int64, contiguous in each row.
        draft_lens: [R] int64.
        streams: what noise is for: accepting, the target's own token, and the one that replaces a rejected token.
        num_tokens: [R] int64, written at `picks`.
        tokens: [R, K + 1] int64, contiguous, written at `picks`.
    """
    count, pieces, padded, device = picks.numel(), lines.pieces, lines.padded_pieces, lines.logits.device
    if not count:
        return
    draft_lens = draft_lens.contiguous()
    sums = sum_weights(lines, picks)
    num_accepted = torch.empty(count, dtype=torch.int32, device=device)
    best = torch.empty((count, 2, pieces), dtype=torch.float32, device=device)
    places = torch.empty((count, 2, pieces), dtype=torch.int32, device=device)
    own = (*lines.place, lines.rows, picks, lines.lengths, lines.numbers, lines.integers)
    probs = (lines.peaks, lines.limits, lines.lasts, sums, draft_probs, draft_probs.stride(0), draft_probs.stride(1))
    accept, target, recover = streams
    _accept_by_probability_kernel[(count,)](
        *own, *probs, draft_tokens, draft_tokens.stride(0), draft_lens, num_accepted, pieces, accept,
        PADDED=padded, num_warps=1,
    )  # fmt: skip
    _last_scores_kernel[(count, pieces)](
        *own, *probs, draft_lens, num_accepted, best, places, target, recover, PIECE=PIECE, PADDED=padded, num_warps=8
    )
    _gain_kernel[(count,)](
        picks, best, places, draft_tokens, draft_tokens.stride(0), num_accepted, num_tokens, tokens,
        lines.positions, pieces, PADDED=padded, STEPS=triton.next_power_of_2(lines.positions), num_warps=1,
    )  # fmt: skip


settle_keys(globals())
