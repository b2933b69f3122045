"""Lines of logits, one for each position of each row, and how far each token stands below the likeliest of its line.

Every kernel of this package sees a vocabulary in pieces of `PIECE` tokens, a program for each line and piece. What
decides is exact whatever the order: the largest number, integers, and sums of integers. So a line gives the same
token whatever other lines, rows and pieces there are.

A token's distance is (peak - logit) / temperature, 0 for the likeliest and inf for an impossible one. It is computed
with the rounding of IEEE in every kernel, so that its bits, an integer which orders as the distances do, can be
compared between kernels. Kernels are not compiled anew for a number of positions: plain decoding and verification run
the same code. NaN counts as impossible, +inf as the largest finite number.

It knows tables of parameters by row (kernels/triton/sampling/columns.py). It does not know what chose the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.compile_processes import settle_keys
from trtrun.kernels.triton.sampling import columns

PIECE = 4096
"""Tokens of one program: 32 programs for each line of a vocabulary of 128k."""

IMPOSSIBLE = tl.constexpr(0x7F800000)
"""The bits of an infinite distance."""

SMALL = [
    "rows", "lengths", "members", "picks", "peaks", "lows", "limits", "lasts", "starts", "stops", "belows",
    "finer_belows", "targets", "counts", "best", "places", "draft_tokens", "draft_lens", "num_accepted", "num_tokens",
]  # fmt: skip
"""Small tensors, which may stand anywhere in larger ones: Triton must not compile a kernel for each place."""

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_HIGHEST = tl.constexpr(3.4028234663852886e38)
NUM_NUMBERS = tl.constexpr(columns.NUM_NUMBERS)
NUM_INTEGERS = tl.constexpr(columns.NUM_INTEGERS)
TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
LOG_MIN_P = tl.constexpr(columns.LOG_MIN_P)


@dataclass(frozen=True)
class Lines:
    """Logits with the parameters of their rows, and what the filters found of each line.

    Attributes:
        logits: [R, P, V] float32, tokens contiguous. Not altered.
        rows: [R] int64: where each row's parameters stand in the tables.
        lengths: [R] int64: the position that logits[:, 0] chooses.
        numbers, integers: the tables, see kernels/triton/sampling/columns.py.
        peaks, lows: [R * P, pieces] float32: of each piece the largest and the least logit above -inf.
        limits, lasts: [R * P] int32: kept is a token whose distance's bits are below `limits`, or equal to them with an
            id of at most `lasts`.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    numbers: torch.Tensor
    integers: torch.Tensor
    peaks: torch.Tensor
    lows: torch.Tensor
    limits: torch.Tensor
    lasts: torch.Tensor

    @property
    def num_lines(self) -> int:
        """R * P."""
        return self.limits.shape[0]

    @property
    def positions(self) -> int:
        """P."""
        return self.logits.shape[1]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.logits.shape[2]

    @property
    def pieces(self) -> int:
        """Number of pieces of a line."""
        return self.peaks.shape[1]

    @property
    def padded_pieces(self) -> int:
        """A power of two."""
        return int(triton.next_power_of_2(self.pieces))

    @property
    def place(self) -> tuple[torch.Tensor, int, int, int, int]:
        """What `line_of` needs: logits, their strides, positions, vocabulary."""
        return self.logits, self.logits.stride(0), self.logits.stride(1), self.positions, self.vocabulary


@triton.jit
def line_of(logits, row_stride, position_stride, positions, line):
    """Where a line's logits begin."""
    return logits + (line // positions) * row_stride + (line % positions) * position_stride


@triton.jit
def clean(value):
    """A logit without NaN and +inf."""
    return tl.minimum(tl.where(value != value, float("-inf"), value), _HIGHEST)


@triton.jit
def peak_of(peaks, line, pieces, PADDED: tl.constexpr):
    """The largest logit of a line; the lowest finite number where all are -inf."""
    piece = tl.arange(0, PADDED)
    return tl.maximum(tl.max(tl.load(peaks + line * pieces + piece, mask=piece < pieces, other=float("-inf"))), _LOWEST)


@triton.jit
def distances(begin, token, vocabulary, peak, temperature):
    """float32 distances of tokens [n], inf beyond the vocabulary."""
    value = clean(tl.load(begin + token, mask=token < vocabulary, other=float("-inf")))
    return tl.div_rn(peak - value, tl.zeros_like(value) + temperature)


@triton.jit
def is_kept(distance, token, limit, last, log_min_p):
    """Whether tokens [n] pass the filters of their line."""
    key = distance.to(tl.int32, bitcast=True)
    ranked = (key < limit) | ((key == limit) & (token <= last))
    return ranked & (key < IMPOSSIBLE) & (distance <= -log_min_p)


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=SMALL)
def _peaks_kernel(
    logits, row_stride, position_stride, positions, vocabulary, peaks, lows, limits, lasts, PIECE: tl.constexpr
):  # fmt: skip
    line, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    begin = line_of(logits, row_stride, position_stride, positions, line)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = clean(tl.load(begin + token, mask=token < vocabulary, other=float("-inf")))
    tl.store(peaks + line * pieces + piece, tl.max(value))
    tl.store(lows + line * pieces + piece, tl.min(tl.where(value > float("-inf"), value, float("inf"))))
    if piece == 0:
        tl.store(limits + line, IMPOSSIBLE)
        tl.store(lasts + line, -1)


def make_lines(
    logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, numbers: torch.Tensor, integers: torch.Tensor
) -> Lines:
    """Lines that no filter has looked at; arguments as in `Lines`."""
    count, device = logits.shape[0] * logits.shape[1], logits.device
    pieces = triton.cdiv(logits.shape[2], PIECE)
    floats = torch.empty((2, count, pieces), dtype=torch.float32, device=device)
    limits = torch.empty((2, count), dtype=torch.int32, device=device)
    lines = Lines(logits, rows, lengths, numbers, integers, floats[0], floats[1], limits[0], limits[1])
    if count:
        _peaks_kernel[(count, pieces)](*lines.place, *floats, *limits, PIECE=PIECE, num_warps=8)
    return lines


settle_keys(globals())
