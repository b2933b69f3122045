"""The product with a dense weight of half precision on CUDA, whose rows have the same bits in any company.

Each number of a result is one chain of sums over the inputs, in their order: nothing is split over programs, so neither
the tile nor the number of rows can be seen in it. cuBLASLt without split sums computes the same chain, faster for many
rows; where a check finds that it does not, or torch cannot ask it for that, the kernel here computes them, too.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from trtrun.kernels.library_speeds import Speeds, WeightSpeeds
from trtrun.kernels.torch.cuda import capturing, forbid_split_sums
from trtrun.kernels.triton.early_launch import early, fetch, last_asked, launch_next_at, lines_of, wait_for_all
from trtrun.kernels.triton.row_functions import add_bias
from trtrun.kernels.triton.support import multiprocessors, shared_bytes

_FEWEST_ROWS, _WIDEST = 16, 64
"""Rows of a tile."""

_ROWS = (_FEWEST_ROWS, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Numbers of rows that are tried; others go the way of the next larger one. Up to the first the kernel reads weights
as fast as anything (measured on an H200)."""

_MOST_TIMED_ROWS = 256
_TIMED_CALLS = 8
_SLOW_LIBRARY = 1.25
"""How many times as long as the kernel it may take: what is tried lies in a cache, and a weight comes from memory."""

_SLOW_BETWEEN = 1.1
"""How many times as long as the next larger number of rows some number between two may take."""

_CHECK_BYTES = 256 << 20
"""Most memory that comparing results may take: weights are loaded before the KV store gets what is left."""

_ALIGNED = 8
"""Numbers of half precision in 16 bytes."""

_NARROW, _FEW_FEATURES = 2048, 4096
"""Features of a weight, such as a router's, that are few."""


class Tile(NamedTuple):
    """What one program computes at a time, and how: FEATURES x INPUTS of the weight."""

    features: int
    inputs: int
    num_stages: int
    num_warps: int = 4


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, weight, bias, y, rows, features, inputs, x_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The weight is the side of the matrix units that is 64 wide, so few rows waste nothing."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_feature, is_row = feature < features, row < rows
    # The last tile computes some features again instead of reading behind the weight.
    start = tl.where(is_feature, feature, 0).to(tl.int64) * inputs
    fetch(weight, start, inputs, LINES, EARLY)
    wait_for_all(EARLY)
    kind: tl.constexpr = y.dtype.element_ty
    if HAS_BIAS:  # asked for in front of the weights, so that nothing waits for it behind them
        added = tl.load(bias + tl.where(is_feature, feature, 0)).to(tl.float32)
    total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
    chosen = last_asked(inputs, INPUTS, STAGES)
    for first in range(0, inputs, INPUTS):
        launch_next_at(first, chosen, EARLY)
        number = first + tl.arange(0, INPUTS)
        if IS_EVEN:
            weights = tl.load(weight + start[:, None] + number[None, :], eviction_policy="evict_first")
            values = tl.load(x + row[None, :] * x_stride + number[:, None], mask=is_row[None, :], other=0.0)
        else:
            known = number < inputs
            weights = tl.load(
                weight + start[:, None] + number[None, :], mask=known[None, :], other=0.0, eviction_policy="evict_first"
            )
            values = tl.load(
                x + row[None, :] * x_stride + number[:, None], mask=is_row[None, :] & known[:, None], other=0.0
            )
        total = tl.dot(weights, values, total)
    if HAS_BIAS:
        # Else ptxas has each matrix instruction wait for the one before: it takes the rounding for a part of the loop.
        total += 0.0
    made = total.to(kind)
    if HAS_BIAS:
        made = (made.to(tl.float32) + added[:, None]).to(kind)
    place = y + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(place, made, mask=is_row[None, :] & is_feature[:, None])


def chain_product(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [rows, in] @ weight [out, in].T → [rows, out], any number of rows, each contiguous and of half precision. A
    bias [out] is added to what is rounded, and the sum is rounded."""
    rows = x.shape[0]
    features, inputs = weight.shape
    y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    if rows:
        width = min(_WIDEST, max(_FEWEST_ROWS, triton.next_power_of_2(rows)))
        tile = _that_fits(tile or _tile(width, features, x.device), width, shared_bytes(x.device))
        _product_kernel[(triton.cdiv(features, tile.features), triton.cdiv(rows, width))](
            x, weight, x if bias is None else bias, y, rows, features, inputs, x.stride(0),
            ROWS=width, FEATURES=tile.features, INPUTS=tile.inputs, IS_EVEN=inputs % tile.inputs == 0,
            HAS_BIAS=bias is not None, LINES=lines_of(weight, tile.features), STAGES=tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **early(x),
        )  # fmt: skip
    return y


def _tile(rows: int, features: int, device: torch.device) -> Tile:
    """What was fastest on an H200, or nearly, for so many rows: long runs of memory, and programs enough to keep every
    multiprocessor reading."""
    units = multiprocessors(device)
    if features > 64 * units:
        return Tile(64, 128, _stages_of_many(triton.cdiv(features, 64) / units) if rows <= _FEWEST_ROWS else 3)
    if rows <= _FEWEST_ROWS and features <= _FEW_FEATURES:
        return Tile(16, 512, 6, 2) if features <= _NARROW else Tile(32, 256, 6)
    return Tile(64, 128, 6)


def _stages_of_many(programs: float) -> int:
    """Stages where a multiprocessor has so many programs of few rows, in the mean: those of four leave room for two at
    once, of eight for one. Two are fastest unless the last few run alone, or few run beside another: 34,816 features of
    5,120 inputs took 91 µs on an H200 with four stages, and 85 with eight."""
    left_over = programs / 2 % 1
    return 8 if 1.5 <= programs < 1.8 or (2 < programs < 6 and 0 < left_over < 0.15) else 4


def _that_fits(tile: Tile, rows: int, shared: int) -> Tile:
    """A tile with no more stages than there is shared memory for; other cards have less of it than an H200."""
    stage = 2 * (tile.features + rows) * tile.inputs
    return tile._replace(num_stages=max(1, min(tile.num_stages, shared // stage)))


class TritonMatmul:
    """The product with one weight on CUDA.

    Args:
        weight: [out, in] float16 or bfloat16, contiguous.
        bias: [out] or None. It is added to the rounded product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._uses_library, self._is_padded = _compare(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out] in the same dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        most = _ROWS[len(self._uses_library) - 1]
        place = bisect_left(_ROWS, min(x.shape[0], most))
        if not self._uses_library[place]:
            return chain_product(x, self._weight, bias=self._bias)
        y = self._ask_library(x, place, most)
        return y if self._bias is None else add_bias(y, self._bias)

    def _ask_library(self, x: torch.Tensor, place: int, most: int) -> torch.Tensor:
        """The product without the bias, of so many rows as `_ROWS` has at `place`, or more than the most of them."""
        rows = x.shape[0]
        if rows <= most:
            if self._is_padded[place] and rows < _ROWS[place]:
                padded = x.new_empty((_ROWS[place], x.shape[1]))
                padded[:rows].copy_(x)
                return functional.linear(padded, self._weight)[:rows]
            return functional.linear(x, self._weight)
        # Nothing is known of more rows than were tried.
        y = x.new_empty((rows, self._weight.shape[0]))
        for first in range(0, rows, most):
            torch.mm(x[first : first + most], self._weight.t(), out=y[first : first + most])
        return y


_speeds: dict[tuple[int, int, str], Speeds] = {}
"""For each of `_ROWS` but the first, as far as it was tried."""


def known_speeds() -> list[WeightSpeeds]:
    """What was found so far. Finding it out takes a graph for each number of rows."""
    return [WeightSpeeds(*key, answers) for key, answers in _speeds.items()]


def remember_speeds(found: Sequence[WeightSpeeds]) -> None:
    """Take over what an earlier process on this GPU has found. Whether bits are equal is tried again all the same."""
    for features, inputs, dtype, speeds in found:
        _speeds[features, inputs, dtype] = speeds


_compared: dict[tuple[torch.Size, torch.dtype, torch.device], Speeds] = {}


def _compare(weight: torch.Tensor) -> Speeds:
    """Whether cuBLASLt computes the product with weights of that shape, for each of `_ROWS` up to what there is memory
    for, the first among them: where it gives the chain's bits for all of them and is not the slower way. Tried once,
    with random rows."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _compared:
        _compared[key] = _try_library(weight)
    return _compared[key]


def _try_library(weight: torch.Tensor) -> Speeds:
    features, inputs = weight.shape
    most = _CHECK_BYTES // (weight.itemsize * (inputs + 2 * features))
    counts = [count for count in _ROWS if count <= max(most, _ROWS[1])]
    # Other shapes go to kernels of their own, which agreed for these numbers of rows and not for others (seen).
    never = Speeds((False,) * len(counts), (False,) * len(counts))
    if features % _ALIGNED or inputs % _ALIGNED or not forbid_split_sums():
        return never
    generator = torch.Generator(weight.device).manual_seed(0)
    values = torch.randn((counts[-1], inputs), generator=generator, device=weight.device).to(weight.dtype)
    # Up to the fewest rows the chain is faster in any case: the library reads some weights slowly unless it may split.
    is_equal = all(
        torch.equal(functional.linear(values[:count], weight), chain_product(values[:count], weight))
        for count in counts[1:]
    )
    if not is_equal:
        return never
    key = (features, inputs, str(weight.dtype))
    if key not in _speeds or len(_speeds[key].is_fast) != len(counts) - 1:
        _speeds[key] = Speeds(
            tuple(_library_is_fast(values[:count], weight) for count in counts[1:]),
            tuple(_is_slow_between(values[:count], weight, before) for before, count in pairwise(counts)),
        )
    return Speeds((False, *_speeds[key].is_fast), (False, *_speeds[key].is_padded))


def _library_is_fast(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuBLASLt is not a trap there: for some few numbers of rows, without split sums, it takes ten times as
    long. Many rows are arithmetic, which it does best where there are features enough for all multiprocessors: 128
    features of 512 rows took 71 µs on an H200."""
    if x.shape[0] > _MOST_TIMED_ROWS and weight.shape[0] > _NARROW:
        return True
    library = _seconds(lambda: functional.linear(x, weight))
    return library <= _SLOW_LIBRARY * _seconds(lambda: chain_product(x, weight))


def _is_slow_between(x: torch.Tensor, weight: torch.Tensor, fewer: int) -> bool:
    """Whether cuBLASLt takes longer for some rows than for all of x, where there are more than `fewer`: it goes by
    tiles of its own choice (448 rows of a weight of 28,672 x 4,096 took 1.7 times as long as 512 on an H200)."""
    rows = len(x)
    if rows <= _MOST_TIMED_ROWS:
        return False
    between = x[: (fewer + rows) // 2]
    whole = _seconds(lambda: functional.linear(x, weight))
    return _seconds(lambda: functional.linear(between, weight)) > _SLOW_BETWEEN * whole


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    """What a call takes on the device, from a graph of some: launching one takes the host longer than that."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(_TIMED_CALLS):
            call()
    graph.replay()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000 / _TIMED_CALLS
