"""The choice of a token from each line, and the probabilities of all, in Triton for CUDA.

A sampled row takes the largest of minus distance plus keyed Gumbel noise among the tokens that its filters keep; a
greedy row its largest logit, of equal ones the first (one that is not a number counts as the largest, so that whoever
reads the logit sees it). The noise has the same integers as sampling/random.py, hence the same uniform numbers. The
logarithms are the device's, and the one near 1 is a series here: noise may differ from torch's in the last bits.
`likeliest` finds the few largest numbers of each row and reads a vocabulary of logits once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.compile_processes import settle_keys
from trtrun.kernels.triton.early_launch import begin, early
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

_PIECE = 2048
"""Numbers of which one program finds the largest."""


@triton.jit
def _keep_largest(value, position, kept, kept_positions, COUNT: tl.constexpr, WIDTH):
    """Store the COUNT largest of `value` and the numbers of `position` beside them, the largest first."""
    for rank in range(COUNT):
        best, lane = tl.max(value, axis=0, return_indices=True)
        taken = tl.arange(0, value.shape[0]) == lane
        place = tl.sum(tl.where(taken, position, 0), axis=0)
        tl.store(kept + rank, best)
        # Where only -inf is left, lanes beyond the row are as good as any.
        tl.store(kept_positions + rank, tl.minimum(place, WIDTH - 1))
        value = tl.where(taken, float("-inf"), value)


@triton.jit
def _largest_of_pieces_kernel(
    numbers, stride, width, values, positions, COUNT: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(numbers + row * stride + position, mask=position < width, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)  # else NaN would be passed over
    at = (row * tl.num_programs(1) + piece) * COUNT
    _keep_largest(value, position, values + at, positions + at, COUNT, width)


@triton.jit
def _largest_of_rows_kernel(
    values, positions, candidates, width, best, found, COUNT: tl.constexpr, PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    value = tl.load(values + row * candidates + lane, mask=lane < candidates, other=float("-inf"))
    position = tl.load(positions + row * candidates + lane, mask=lane < candidates, other=0)
    _keep_largest(value, position, best + row * COUNT, found + row * COUNT, COUNT, width)


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] on CUDA, each row contiguous. NaN counts as infinite.
        count: how many, at most `width`.

    Returns:
        [rows, count] int64. Among equal numbers the first come first; where fewer are above -inf, what follows them
        may come twice.
    """
    rows, width = numbers.shape
    found = torch.empty((rows, count), dtype=torch.int64, device=numbers.device)
    if not rows:
        return found
    pieces = triton.cdiv(width, _PIECE)
    values = torch.empty((rows, pieces * count), dtype=torch.float32, device=numbers.device)
    positions = torch.empty((rows, pieces * count), dtype=torch.int64, device=numbers.device)
    _largest_of_pieces_kernel[(rows, pieces)](
        numbers, numbers.stride(0), width, values, positions, COUNT=count, PIECE=_PIECE, num_warps=4, **early(numbers)
    )
    best = torch.empty((rows, count), dtype=torch.float32, device=numbers.device)
    _largest_of_rows_kernel[(rows,)](
        values, positions, pieces * count, width, best, found,
        COUNT=count, PADDED=triton.next_power_of_2(pieces * count), num_warps=4,
        **early(numbers),
    )  # fmt: skip
    return found


_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_INT64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SCALE = tl.constexpr(2.0**-63)


@triton.jit
def _mix(state):
    """mix64 of uint64 `state`."""
    state = (state ^ (state >> 30)) * tl.full((), _MULTIPLIER_1, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), _MULTIPLIER_2, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def key_of(seed, position, stream):
    """uint64: the key of int64 seed and position, and a stream."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    state = _mix(seed.to(tl.uint64) + tl.cast(stream + 1, tl.uint64) * gamma)
    return _mix(state + (position + 1).to(tl.uint64) * gamma)


@triton.jit
def to_uniform(bits):
    """float32 in the open interval (0, 1) of uint64 bits."""
    odd = (bits & tl.full((), _LARGEST_INT64, tl.uint64)) | tl.full((), 1, tl.uint64)
    return tl.minimum(odd.to(tl.int64).to(tl.float32) * _SCALE, _LARGEST_BELOW_ONE)


@triton.jit
def log_exponentials(key, token):
    """float32: log of a standard exponential (minus a Gumbel number) of each of the token ids [n] under one key."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    number = to_uniform(_mix(key + (token + 1).to(tl.uint64) * gamma))
    # -log(1 - u). The fine end of u gives the large Gumbel numbers, which decide the maximum: a series there, as the
    # logarithms of GPUs are good to an absolute error near 1.
    series = 1.0 / 5.0 + number * (1.0 / 6.0 + number * (1.0 / 7.0))
    series = 1.0 / 2.0 + number * (1.0 / 3.0 + number * (1.0 / 4.0 + number * series))
    small = number + number * number * series
    exponential = tl.where(number < 0.0625, small, -tl.log(1.0 - number))
    return tl.log(exponential)


_SEED = tl.constexpr(columns.SEED)
UNIT = tl.constexpr(2.0**40)
"""Weights are summed as integers in units of its inverse: exact in any order."""


@triton.jit(do_not_specialize=["positions", "stream"], do_not_specialize_on_alignment=SMALL)
def _scores_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, lengths, numbers, integers, peaks, limits, lasts,
    best, places, scores, stream, PIECE: tl.constexpr, PADDED: tl.constexpr, KEEPS_SCORES: tl.constexpr,
):  # fmt: skip
    line, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows + line // positions)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
    begin = line_of(logits, row_stride, position_stride, positions, line)
    token = piece * PIECE + tl.arange(0, PIECE)
    score = tl.full((PIECE,), float("-inf"), tl.float32)
    if temperature > 0.0:
        peak = peak_of(peaks, line, pieces, PADDED)
        distance = distances(begin, token, vocabulary, peak, temperature)
        log_min_p = tl.load(numbers + row * NUM_NUMBERS + LOG_MIN_P)
        kept = is_kept(distance, token, tl.load(limits + line), tl.load(lasts + line), log_min_p)
        if tl.max(kept.to(tl.int32)) > 0:  # noise is most of the work, and most pieces may have nothing to choose
            position = tl.load(lengths + line // positions) + line % positions
            key = key_of(tl.load(integers + row * NUM_INTEGERS + _SEED), position, stream)
            score = tl.where(kept, 0.0 - distance - log_exponentials(key, token), float("-inf"))
    else:
        value = tl.load(begin + token, mask=token < vocabulary, other=float("-inf"))
        score = tl.where(value != value, float("inf"), value)
    largest, lane = tl.max(score, axis=0, return_indices=True)
    tl.store(best + line * pieces + piece, largest)
    tl.store(places + line * pieces + piece, piece * PIECE + lane)
    if KEEPS_SCORES:
        tl.store(scores + line * vocabulary + token, score, mask=token < vocabulary)


@triton.jit
def best_of(best, places, line, pieces, PADDED: tl.constexpr):
    """The token of the largest score of a line: of equal ones the first, 0 where all are -inf."""
    piece = tl.arange(0, PADDED)
    score = tl.load(best + line * pieces + piece, mask=piece < pieces, other=float("-inf"))
    _, lane = tl.max(score, axis=0, return_indices=True)
    return tl.load(places + line * pieces + lane)


@triton.jit
def _best_kernel(best, places, chosen, pieces, PADDED: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    tl.store(chosen + line, best_of(best, places, line, pieces, PADDED).to(tl.int64))


def _score(lines: Lines, stream: int, scores: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find of each line's pieces the largest score, float32, and its token, int32; and all scores into `scores`."""
    shape, device = (lines.num_lines, lines.pieces), lines.logits.device
    best = torch.empty(shape, dtype=torch.float32, device=device)
    places = torch.empty(shape, dtype=torch.int32, device=device)
    _scores_kernel[shape](
        *lines.place, lines.rows, lines.lengths, lines.numbers, lines.integers, lines.peaks, lines.limits, lines.lasts,
        best, places, best if scores is None else scores, stream,
        PIECE=PIECE, PADDED=lines.padded_pieces, KEEPS_SCORES=scores is not None, num_warps=8,
    )  # fmt: skip
    return best, places


def choose(lines: Lines, stream: int) -> torch.Tensor:
    """[R, P] int64: a token of each line, its noise keyed by (the row's seed, length + position, `stream`); 0 where a
    line has no possible token."""
    chosen = torch.empty(lines.logits.shape[:2], dtype=torch.int64, device=lines.logits.device)
    if lines.num_lines:
        best, places = _score(lines, stream, None)
        _best_kernel[(lines.num_lines,)](
            best, places, chosen, lines.pieces, PADDED=lines.padded_pieces, num_warps=1
        )  # fmt: skip
    return chosen


def rank(lines: Lines, stream: int, count: int) -> torch.Tensor:
    """[R * P, count] int64: what `choose` would take, then what it would take without that, and so on."""
    return likeliest(scores(lines, stream), count)


def scores(lines: Lines, stream: int) -> torch.Tensor:
    """[R * P, V] float32 of which `choose` takes the largest."""
    found = torch.empty((lines.num_lines, lines.vocabulary), dtype=torch.float32, device=lines.logits.device)
    if lines.num_lines:
        _score(lines, stream, found)
    return found


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _weights_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, picks, numbers, peaks, limits, lasts, sums,
    PIECE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    line, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    pick = tl.load(picks + line // positions)
    row, source = tl.load(rows + pick), pick * positions + line % positions
    peak = peak_of(peaks, source, pieces, PADDED)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
    token = piece * PIECE + tl.arange(0, PIECE)
    begin = line_of(logits, row_stride, position_stride, positions, source)
    distance = distances(begin, token, vocabulary, peak, temperature)
    log_min_p = tl.load(numbers + row * NUM_NUMBERS + LOG_MIN_P)
    kept = is_kept(distance, token, tl.load(limits + source), tl.load(lasts + source), log_min_p)
    weight = tl.where(kept, tl.exp(-distance) * UNIT, 0.0).to(tl.int64)
    tl.store(sums + line * pieces + piece, tl.sum(weight))


@triton.jit
def inverse_total(sums, line, pieces, PADDED: tl.constexpr):
    """What turns a weight exp(-distance) of a line into a probability; 0 for a line without a possible token."""
    piece = tl.arange(0, PADDED)
    total = tl.sum(tl.load(sums + line * pieces + piece, mask=piece < pieces, other=0)).to(tl.float32)
    return tl.where(total > 0.0, UNIT / tl.maximum(total, 1.0), 0.0)


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _probabilities_kernel(
    logits, row_stride, position_stride, positions, vocabulary, rows, picks, numbers, peaks, limits, lasts, sums,
    output, output_row_stride, output_position_stride, width, pieces, PIECE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pick = tl.load(picks + line // positions)
    row, source = tl.load(rows + pick), pick * positions + line % positions
    peak = peak_of(peaks, source, pieces, PADDED)
    temperature = tl.load(numbers + row * NUM_NUMBERS + TEMPERATURE)
    token = piece * PIECE + tl.arange(0, PIECE)
    begin = line_of(logits, row_stride, position_stride, positions, source)
    distance = distances(begin, token, vocabulary, peak, temperature)
    log_min_p = tl.load(numbers + row * NUM_NUMBERS + LOG_MIN_P)
    kept = is_kept(distance, token, tl.load(limits + source), tl.load(lasts + source), log_min_p)
    probability = tl.where(kept, tl.exp(-distance) * inverse_total(sums, line, pieces, PADDED), 0.0)
    place = line_of(output, output_row_stride, output_position_stride, positions, line)
    tl.store(place + token, probability, mask=token < width)


def sum_weights(lines: Lines, picks: torch.Tensor) -> torch.Tensor:
    """[S * P, pieces] int64: the weights of what is kept in each piece of the rows `picks` [S] int64, all sampled."""
    count = picks.numel() * lines.positions
    sums = torch.empty((count, lines.pieces), dtype=torch.int64, device=lines.logits.device)
    if count:
        _weights_kernel[(count, lines.pieces)](
            *lines.place, lines.rows, picks, lines.numbers, lines.peaks, lines.limits, lines.lasts, sums,
            PIECE=PIECE, PADDED=lines.padded_pieces, num_warps=8,
        )  # fmt: skip
    return sums


def write_probabilities(lines: Lines, picks: torch.Tensor, output: torch.Tensor) -> None:
    """Write the distributions that `choose` draws from into `output`.

    Args:
        lines: of R rows.
        picks: [S] int64 on the device: which of them; all sampled.
        output: [S, P, width] float32, tokens contiguous, width at least V: zeros where a token is filtered out or
            beyond V, and everywhere in a line without a possible token.
    """
    count, width = picks.numel() * lines.positions, output.shape[2]
    if not count:
        return
    _probabilities_kernel[(count, triton.cdiv(width, PIECE))](
        *lines.place, lines.rows, picks, lines.numbers, lines.peaks, lines.limits, lines.lasts,
        sum_weights(lines, picks), output, output.stride(0), output.stride(1), width, lines.pieces,
        PIECE=PIECE, PADDED=lines.padded_pieces, num_warps=8,
    )  # fmt: skip


settle_keys(globals())
