"""RMSNorm of the residual stream with a sum over ranks added to it, in one Triton kernel for CUDA: for few rows, whose
numbers go straight into the memory of the other ranks.

A program has a row. It sends the row's numbers to all other ranks, waits for theirs, adds all up in the order of the
ranks, in float32, and rounds once, as a sum by itself does; then it does what fused.py does with a sum that it is
handed, the same numbers in the same order, so that the bits of both are the same. How words travel is said at PeerRows
(parallel.communicator); why none is overwritten before it is read, at one_shot in parallel/transports/
peer_all_reduce.cu: a row here is what a block is there. Nothing ends a wait: a rank may be late for minutes, and a
process that ends takes its kernels with it.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from parallel.communicator import PeerRows
from trtrun.kernels.arguments import GROUP, RankSum, RoundedRows, Rounding
from trtrun.kernels.triton.compilation.launches import is_collecting
from trtrun.kernels.triton.early_launch import launch_next, wait_for_all
from trtrun.kernels.triton.fused import ROUNDS, empty_rows, norm_options, store_normal

_MOST_OTHERS = 7
_HIGHEST_BIT = tl.constexpr(-(1 << 31))
_LEAST = 512
"""Numbers of a row: of fewer a thread would have one word, where two are written at a time."""
_TURN = tl.constexpr(1 << 24)
"""In so many calls all places are cleared once, so that no word from 2^31 calls ago is taken for one of now."""


def takes(part: torch.Tensor, peers: PeerRows | None) -> bool:
    """Whether the ranks' parts [tokens, size] are summed so: few rows, and of half precision in whole words."""
    if peers is None or part.dtype not in (torch.bfloat16, torch.float16) or not part.is_contiguous():
        return False
    rows, size = part.shape
    return 0 < rows <= peers.rows and size % 2 == 0 and _LEAST <= size <= 2 * peers.words


_SEND = tl.constexpr("""{
.reg .pred one, other, both;
.reg .b64 next;
setp.ne.b32 one, $6, 0;
setp.ne.b32 other, $7, 0;
add.s64 next, $2, 8;
setp.eq.and.s64 both, next, $3, one;
and.pred both, both, other;
and.b64 next, $2, 8;
setp.eq.and.s64 both, next, 0, both;
@both st.relaxed.sys.global.v2.b64 [$2], {$4, $5};
not.pred both, both;
and.pred one, one, both;
and.pred other, other, both;
@one st.relaxed.sys.global.b64 [$2], $4;
@other st.relaxed.sys.global.b64 [$3], $5;
mov.u32 $0, 0;
mov.u32 $1, 0;
}""")
"""Writes two words: together, where they lie side by side."""


@triton.jit
def _send(place, word, inside, ORDERED: tl.constexpr):
    """Write words of 64 bits, each as a whole, to where another device reads."""
    if ORDERED:
        tl.inline_asm_elementwise(
            _SEND, "=r,=r,l,l,l,l,r,r", [place, word, inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=2
        )
    else:
        tl.store(place, word, mask=inside)


@triton.jit
def _receive(place, inside, mark):
    """The data of words that another rank sends, once all of them have the mark of the call."""
    # A volatile load reads a word as a whole, wherever the system has it, and each time anew.
    found = tl.load(place, mask=inside, other=0, volatile=True)
    while tl.max((inside & ((found >> 32).to(tl.int32) != mark)).to(tl.int32), axis=0) != 0:
        found = tl.load(place, mask=inside, other=0, volatile=True)
    return found.to(tl.int32)


@triton.jit
def _widen(word, kind: tl.constexpr):
    """The two numbers of a word, in float32."""
    if kind == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _places(base, call, source, row, rows, SLOTS: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """Where the words of a row lie that `source` sends in a call."""
    place = ((call & (SLOTS - 1)) * RANKS + source).to(tl.int64) * rows + row
    return tl.multiple_of(base.to(tl.int64).to(tl.pointer_type(tl.int64)) + place * WORDS, 16)


@triton.jit
def _clear(own, call, row, rows, SLOTS: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Clear a slot of a row."""
    for source in tl.static_range(RANKS):
        places = _places(own, call, source, row, rows, SLOTS, RANKS, WORDS)
        for first in range(0, WORDS, BLOCK):
            word = first + tl.arange(0, BLOCK)
            tl.store(places + word, tl.zeros((BLOCK,), tl.int64), mask=word < WORDS)


@triton.jit(do_not_specialize=["rows", "calls", "own"])
def _sum_and_normalise_kernel(
    hidden, part, weight, output, scales, epsilon, hidden_stride, output_stride, scale_stride,
    rows, calls, own, other0, other1, other2, other3, other4, other5, other6,
    SIZE: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    WORDS: tl.constexpr, ROUNDS: tl.constexpr, ORDERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    factor = tl.load(weight + element, mask=inside, other=0.0)
    wait_for_all(EARLY)
    word = tl.arange(0, PADDED // 2)
    is_word = word < SIZE // 2
    kind = hidden.dtype.element_ty
    counter = calls.to(tl.int64).to(tl.pointer_type(tl.int32)) + row
    call = tl.load(counter)
    mark = call | _HIGHEST_BIT  # never zero, which is what a cleared word has
    # Words of two numbers.
    mine = tl.load(part + row * (SIZE // 2) + word, mask=is_word, other=0)
    sent = (mark.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    others = (other0, other1, other2, other3, other4, other5, other6)
    for other in tl.static_range(RANKS - 1):
        _send(_places(others[other], call, RANK, row, rows, SLOTS, RANKS, WORDS) + word, sent, is_word, ORDERED)
    value = tl.load(hidden + row * hidden_stride + element, mask=inside, other=0.0).to(tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            low, high = _widen(mine, kind)
        else:
            places = _places(own, call, source, row, rows, SLOTS, RANKS, WORDS)
            low, high = _widen(_receive(places + word, is_word, mark), kind)
        if source == 0:
            sum_low, sum_high = low, high
        else:
            sum_low, sum_high = sum_low + low, sum_high + high
    value += tl.interleave(sum_low, sum_high).to(kind).to(tl.float32)
    tl.store(hidden + row * hidden_stride + element, value.to(kind), mask=inside)
    store_normal(
        value.to(kind).to(tl.float32), factor, output, scales, row, epsilon, output_stride, scale_stride,
        kind, SIZE, PADDED, ROUNDS,
    )  # fmt: skip
    if (call & (_TURN - 1)) < SLOTS:  # the slot behind the next call's, into which nobody writes yet
        _clear(own, call + 2, row, rows, SLOTS, RANKS, WORDS, PADDED)
    tl.debug_barrier()  # all have read the number of the call
    tl.store(counter, call + 1)


def sum_and_normalise(hidden: torch.Tensor, delta: RankSum, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """hidden += delta, in place, then RMSNorm of it. Collective over the ranks, for what `takes` says.

    Args:
        hidden: [tokens, size] in the dtype of the sum, whose rows have no gaps, on CUDA.
        delta: of [tokens, size].
        weight, epsilon: as of `fused.add_and_normalise`.

    Returns:
        [tokens, size].
    """
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    _launch(output, output, None, hidden, delta, weight, epsilon)
    return output


def sum_and_normalise_rounded(
    hidden: torch.Tensor, delta: RankSum, weight: torch.Tensor, epsilon: float, rounding: Rounding = "row"
) -> RoundedRows:
    """Compute `sum_and_normalise`, with what it returns rounded to E4M3."""
    tokens, size = hidden.shape
    made = empty_rows(tokens, size, hidden, rounding)
    _launch(made.codes, made.scale, rounding, hidden, delta, weight, epsilon)
    return made


def _launch(
    output: torch.Tensor, scales: torch.Tensor, rounding: Rounding | None,
    hidden: torch.Tensor, delta: RankSum, weight: torch.Tensor, epsilon: float,
) -> None:  # fmt: skip
    peers = delta.communicator.peer_rows
    assert peers is not None
    tokens, size = hidden.shape
    padded = triton.next_power_of_2(max(size, GROUP) if rounding == "group" else size)
    launch = _sum_and_normalise_kernel[(tokens,)]
    if is_collecting():  # no rank may run it while another skips it
        launch = partial(_sum_and_normalise_kernel.warmup, grid=(tokens,))
    launch(
        hidden, delta.part.view(torch.int32), weight, output, scales, epsilon, hidden.stride(0), output.stride(0),
        scales.stride(-1), peers.rows, peers.calls, peers.own,
        *peers.others, *(0,) * (_MOST_OTHERS - len(peers.others)),
        SIZE=size, PADDED=padded, RANK=peers.rank, RANKS=peers.ranks, SLOTS=peers.slots, WORDS=peers.words,
        ROUNDS=ROUNDS[rounding], ORDERED=hidden.is_cuda, **norm_options(hidden),
    )  # fmt: skip
