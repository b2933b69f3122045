"""top_k and top_p without a sort: the distance at which a line is cut, in Triton for CUDA.

Both ask for a threshold: the least distance up to which the tokens' amounts reach a target. An amount is 1 for top_k;
for top_p it is the token's weight exp(-distance) in units of 2**-40, an integer, so that sums are exact in any order
(tokens 2**41 times less likely than the likeliest weigh nothing, and no top_p below 1 keeps them).
A pass over the vocabulary sums below 15 pivots at once; a second one does so between two neighbouring pivots of the
first; what then lies between two pivots, usually some hundred tokens, is gathered and searched bit by bit. Pivots are
multiples of powers of two: every kernel computes them exactly. Where tokens tie at the threshold the lower ids stay.

Where more than `CANDIDATES` lie between two pivots (thousands of equal logits, or a huge temperature), the last search
reads the vocabulary itself: slower, and the same result.

Sorting-free search by pivots: FlashInfer (Ye et al. 2025, arXiv:2501.01005) and Qrita (Park et al.). It knows lines and
their rows' parameters alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.compile_processes import settle_keys
from trtrun.kernels.triton.sampling import columns
from trtrun.kernels.triton.sampling.lines import (
    IMPOSSIBLE,
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

CANDIDATES = 8192
"""Tokens that the last search holds in registers."""

_PIVOTS = tl.constexpr(16)
"""Columns of sums: below 15 pivots, and of all."""

_UNIT = tl.constexpr(2.0**40)
_FARTHEST_COUNTED = tl.constexpr(64.0)
_FARTHEST_WEIGHED = tl.constexpr(32.0)
"""Up to where pivots are laid; what is farther away falls behind the last one. Weights end at 27.7."""

_TOP_P = tl.constexpr(columns.TOP_P)
_TOP_K = tl.constexpr(columns.TOP_K)


@triton.jit
def _wanted(numbers, integers, row, BY_COUNT: tl.constexpr):
    """Whether a row has the filter."""
    sampled = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE) > 0.0
    if BY_COUNT:
        return sampled & (tl.load(integers + row * NUM_INTEGERS + _TOP_K) > 0)
    else:
        return sampled & (tl.load(numbers + row * NUM_NUMBERS + _TOP_P) < 1.0)


@triton.jit
def _amounts(distance, kept, BY_COUNT: tl.constexpr):
    """int64 amounts of tokens, 0 where not kept."""
    if BY_COUNT:
        return kept.to(tl.int64)
    else:
        return tl.where(kept, tl.exp(-distance) * _UNIT, 0.0).to(tl.int64)


@triton.jit
def _first_width(lows, line, pieces, peak, temperature, PADDED: tl.constexpr, BY_COUNT: tl.constexpr):
    """A sixteenth of the farthest distance that matters, rounded up to a power of two."""
    piece = tl.arange(0, PADDED)
    low = tl.min(tl.load(lows + line * pieces + piece, mask=piece < pieces, other=float("inf")))
    farthest = tl.div_rn(peak - tl.minimum(low, peak), temperature)
    farthest = tl.minimum(farthest, _FARTHEST_COUNTED if BY_COUNT else _FARTHEST_WEIGHED)
    bits = tl.maximum(farthest, 2.0**-40).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True) * (1.0 / 16.0)


@triton.jit
def _sums_of_line(sums, line, pieces, PADDED: tl.constexpr):
    """[16] int64: the sums of all pieces."""
    piece, column = tl.arange(0, PADDED)[:, None], tl.arange(0, _PIVOTS)[None, :]
    place = sums + (line * pieces + piece) * _PIVOTS + column
    return tl.sum(tl.load(place, mask=piece < pieces, other=0), axis=0)


@triton.jit
def _target(numbers, integers, row, total, BY_COUNT: tl.constexpr):
    """The amount to reach, at least 1 and so that the likeliest token is always kept."""
    if BY_COUNT:
        return tl.load(integers + row * NUM_INTEGERS + _TOP_K)
    else:
        share = tl.load(numbers + row * NUM_NUMBERS + _TOP_P).to(tl.float64)
        return tl.maximum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _pick(of_line, target):
    """Between which pivots the target lies, 0 to 15, and the amount below them."""
    column = tl.arange(0, _PIVOTS)
    is_below = (of_line < target) & (column < _PIVOTS - 1)
    return tl.sum(is_below.to(tl.int32)), tl.max(tl.where(is_below, of_line, 0))


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _sum_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, numbers, integers, peaks, lows, limits, lasts,
    sums, finer_sums, starts, belows, targets, counts,
    PIECE: tl.constexpr, PADDED: tl.constexpr, BY_COUNT: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    line, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + line // positions)
    if _wanted(numbers, integers, row, BY_COUNT):
        peak = peak_of(peaks, line, pieces, PADDED)
        temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
        width = _first_width(lows, line, pieces, peak, temperature, PADDED, BY_COUNT)
        start = 0.0
        if FINER:
            of_line = _sums_of_line(sums, line, pieces, PADDED)
            total = tl.max(of_line)
            target = _target(numbers, integers, row, total, BY_COUNT)
            chosen, below = _pick(of_line, target)
            start = chosen.to(tl.float32) * width
            width = width * (1.0 / 16.0)
            if piece == 0:
                tl.store(starts + line, start)
                tl.store(belows + line, below)
                tl.store(targets + line, target)
                tl.store(counts + line, 0)
        token = piece * PIECE + tl.arange(0, PIECE)
        begin = line_of(logits, row_stride, position_stride, positions, line)
        distance = distances(begin, token, vocabulary, peak, temperature)
        kept = is_kept(distance, token, tl.load(limits + line), tl.load(lasts + line), float("-inf"))
        amount = _amounts(distance, kept & (distance >= start), BY_COUNT)
        place = (finer_sums if FINER else sums) + (line * pieces + piece) * _PIVOTS
        for pivot in tl.static_range(1, _PIVOTS):
            tl.store(place + pivot - 1, tl.sum(tl.where(distance < start + width * pivot, amount, 0)))
        tl.store(place + _PIVOTS - 1, tl.sum(amount))


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _gather_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, numbers, integers, peaks, lows, limits, lasts,
    finer_sums, starts, belows, finer_belows, targets, counts, stops, keys, tokens,
    PIECE: tl.constexpr, PADDED: tl.constexpr, BY_COUNT: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    line, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + line // positions)
    if _wanted(numbers, integers, row, BY_COUNT):
        peak = peak_of(peaks, line, pieces, PADDED)
        temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
        first_width = _first_width(lows, line, pieces, peak, temperature, PADDED, BY_COUNT)
        width = first_width * (1.0 / 16.0)
        below = tl.load(belows + line)
        chosen, more = _pick(_sums_of_line(finer_sums, line, pieces, PADDED), tl.load(targets + line) - below)
        start = tl.load(starts + line)
        # Behind the last pivot of all there is no end.
        is_open = (start >= first_width * 15.0) & (chosen == 15)
        stop = tl.where(is_open, float("inf"), start + width * (chosen + 1).to(tl.float32))
        start = start + width * chosen.to(tl.float32)
        token = piece * PIECE + tl.arange(0, PIECE)
        begin = line_of(logits, row_stride, position_stride, positions, line)
        distance = distances(begin, token, vocabulary, peak, temperature)
        kept = is_kept(distance, token, tl.load(limits + line), tl.load(lasts + line), float("-inf"))
        taken = kept & (distance >= start) & (distance < stop)
        count = tl.sum(taken.to(tl.int32))
        # Whoever comes first stores first: what is searched is a set, and its sums are of integers.
        slot = tl.atomic_add(counts + line, count) + tl.cumsum(taken.to(tl.int32)) - 1
        fits = taken & (slot < CANDIDATES)
        tl.store(keys + line * CANDIDATES + slot, distance.to(tl.int32, bitcast=True), mask=fits)
        tl.store(tokens + line * CANDIDATES + slot, token, mask=fits)
        if piece == 0:
            tl.store(finer_belows + line, below + more)
            tl.store(stops + line * 2, start)
            tl.store(stops + line * 2 + 1, stop)


@triton.jit
def _search(keys, tokens, first, count, need, BY_COUNT: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The limit and the last id (see `Lines`) among `count` candidates from `first` on, whose amounts reach `need`."""
    lane = tl.arange(0, SIZE)
    inside = lane < count
    key = tl.load(keys + first + lane, mask=inside, other=IMPOSSIBLE)
    token = tl.load(tokens + first + lane, mask=inside, other=0)
    amount = _amounts(key.to(tl.float32, bitcast=True), inside, BY_COUNT)
    limit = tl.full((), 0, tl.int32)
    for step in range(31):
        middle = limit | (1 << (30 - step))
        limit = tl.where(tl.sum(tl.where(key < middle, amount, 0)) < need, middle, limit)
    before = tl.sum(tl.where(key < limit, amount, 0))
    each = tl.maximum(tl.max(tl.where(key == limit, amount, 0)), 1)
    ties = (need - before + each - 1) // each
    ties_only = inside & (key == limit)
    last = tl.full((), 0, tl.int32)
    for step in range(BITS):
        middle = last | (1 << (BITS - 1 - step))
        last = tl.where(tl.sum((ties_only & (token < middle)).to(tl.int64)) < ties, middle, last)
    return limit, last


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _settle_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, numbers, integers, peaks, limits, lasts,
    finer_belows, targets, counts, stops, keys, tokens, pieces,
    PADDED: tl.constexpr, BY_COUNT: tl.constexpr, FEW: tl.constexpr, CANDIDATES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line // positions)
    if _wanted(numbers, integers, row, BY_COUNT):
        count = tl.load(counts + line)
        lane = tl.arange(0, CANDIDATES)
        need = tl.load(targets + line) - tl.load(finer_belows + line)
        limit = tl.full((), 0, tl.int32)
        last = tl.full((), 0, tl.int32)
        ties = tl.full((), 0, tl.int64)
        if count <= FEW:
            limit, last = _search(keys, tokens, line * CANDIDATES, count, need, BY_COUNT, FEW, BITS)
        elif count <= CANDIDATES:
            limit, last = _search(keys, tokens, line * CANDIDATES, count, need, BY_COUNT, CANDIDATES, BITS)
        else:
            peak = peak_of(peaks, line, pieces, PADDED)
            temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
            begin = line_of(logits, row_stride, position_stride, positions, line)
            start, stop = tl.load(stops + line * 2), tl.load(stops + line * 2 + 1)
            old_limit, old_last = tl.load(limits + line), tl.load(lasts + line)
            # 31 bits of the threshold, one look at it, and the bits of the last id that ties.
            for step in range(32 + BITS):
                id_bit = 1 << tl.maximum(BITS - 1 - (step - 32), 0)
                middle = tl.where(step < 31, limit | (1 << tl.maximum(30 - step, 0)), last | id_bit)
                found = tl.full((), 0, tl.int64)
                at_limit = tl.full((), 0, tl.int64)
                for first in range(0, vocabulary, CANDIDATES):
                    distance = distances(begin, first + lane, vocabulary, peak, temperature)
                    taken = is_kept(distance, first + lane, old_limit, old_last, float("-inf"))
                    amount = _amounts(distance, taken & (distance >= start) & (distance < stop), BY_COUNT)
                    key = distance.to(tl.int32, bitcast=True)
                    if step < 31:
                        found += tl.sum(tl.where(key < middle, amount, 0))
                    elif step == 31:
                        found += tl.sum(tl.where(key < limit, amount, 0))
                        at_limit = tl.maximum(at_limit, tl.max(tl.where(key == limit, amount, 0)))
                    else:
                        found += tl.sum(((key == limit) & (amount > 0) & (first + lane < middle)).to(tl.int64))
                if step < 31:
                    limit = tl.where(found < need, middle, limit)
                elif step == 31:
                    each = tl.maximum(at_limit, 1)
                    ties = (need - found + each - 1) // each
                else:
                    last = tl.where(found < ties, middle, last)
        # With fewer tokens than top_k asks for the search runs to the end of the numbers.
        stop_bits = tl.load(stops + line * 2 + 1).to(tl.int32, bitcast=True)
        tl.store(limits + line, tl.minimum(limit, stop_bits))
        tl.store(lasts + line, last)


def cut(lines: Lines, *, by_count: bool) -> None:
    """Cut every line whose row asks for it: top_k where `by_count`, else top_p of what is left of the line.

    Rows without the filter, and greedy ones, stay as they are. Changes `lines.limits` and `lines.lasts`.
    """
    count, pieces, device = lines.num_lines, lines.pieces, lines.logits.device
    if not count:
        return
    sums, finer = torch.empty((2, count, pieces, 16), dtype=torch.int64, device=device)
    belows, finer_belows, targets = torch.empty((3, count), dtype=torch.int64, device=device)
    starts, stops = torch.empty((2, 2 * count), dtype=torch.float32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    keys, tokens = torch.empty((2, count, CANDIDATES), dtype=torch.int32, device=device)
    place = (*lines.place, lines.rows, lines.numbers, lines.integers)
    shared = (*place, lines.peaks, lines.lows, lines.limits, lines.lasts)
    sizes = {"PADDED": lines.padded_pieces, "BY_COUNT": by_count}
    for is_finer in (False, True):
        _sum_kernel[(count, pieces)](
            *shared, sums, finer, starts, belows, targets, counts, PIECE=PIECE, FINER=is_finer, num_warps=8, **sizes
        )
    _gather_kernel[(count, pieces)](
        *shared, finer, starts, belows, finer_belows, targets, counts, stops, keys, tokens,
        PIECE=PIECE, CANDIDATES=CANDIDATES, num_warps=8, **sizes,
    )  # fmt: skip
    _settle_kernel[(count,)](
        *place, lines.peaks, lines.limits, lines.lasts, finer_belows, targets, counts, stops, keys, tokens, pieces,
        FEW=CANDIDATES // 4, CANDIDATES=CANDIDATES, BITS=lines.vocabulary.bit_length(), num_warps=8, **sizes,
    )  # fmt: skip


settle_keys(globals())
