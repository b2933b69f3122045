"""Products of experts on CUDA in half precision, grouped by expert. Those that are held in codes have kernels of their
own (coded_experts).

The pairs of a token and an expert that it chose are sorted by expert into tiles of rows; a program multiplies a tile
with some features of its expert. Each number is one chain of sums over the inputs, whatever stands in the other rows of
its tile: so a token's bits do not depend on its company, or on the tile. Its experts are added in the order in which it
chose them, in float32. Nothing is read back: for so many tokens there are so many tiles, of which some are empty.

It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from typing_extensions import override

from trtrun.kernels.arguments import Activation, Activations, Delta, ExpertSums, Rounding
from trtrun.kernels.torch.experts import Choice, Experts
from trtrun.kernels.triton.early_launch import (
    early,
    last_asked,
    launch_next,
    launch_next_at,
    lines_of,
    wait_for_all,
)
from trtrun.kernels.triton.expert_sums import add_up
from trtrun.kernels.triton.expert_tiles import (
    FEW_PAIRS,
    FEW_ROWS,
    ExpertTiles,
    fetch_of_expert,
    grid_of,
    has_no_more,
    lay_out,
    tile_and_part,
)
from trtrun.kernels.triton.fused import GATES, gated

_NO_ROW = tl.constexpr(-1)


class Tile(NamedTuple):
    """What a program computes at a time: so many features of an expert, of a tile of rows; `inputs` in a step."""

    features: int
    inputs: int
    num_warps: int
    num_stages: int


TILES = {
    16: (Tile(32, 256, 4, 3), Tile(64, 128, 4, 3)),
    64: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    128: (Tile(128, 64, 8, 4), Tile(128, 64, 8, 3)),
}
"""By the rows of a tile, of gates and of the product behind them: for few rows an expert, which memory bounds, for
more, and for prompts. Bits are the same with any."""


@triton.jit
def _weights_of(
    weight, row, first, inputs, FEW: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """Weights [INPUTS, features] of rows [features] int64 of all experts' rows, from an input on: for tiles of few
    rows they are read once."""
    number = first + tl.arange(0, INPUTS)
    place = weight + row[None, :] * inputs + number[:, None]
    policy: tl.constexpr = "evict_first" if FEW else ""
    if IS_EVEN:
        weights = tl.load(place, eviction_policy=policy)
    else:
        weights = tl.load(place, mask=(number < inputs)[:, None], other=0.0, eviction_policy=policy)
    return weights


@triton.jit
def _nothing(ROWS: tl.constexpr, FEATURES: tl.constexpr, FEW: tl.constexpr):
    """Where sums begin."""
    if FEW:
        return tl.zeros((ROWS, FEATURES), tl.float32)
    else:
        return tl.zeros((FEATURES, ROWS), tl.float32)


@triton.jit
def _add_product(values, weights, total, FEW: tl.constexpr):
    """Sums and the product of values [ROWS, INPUTS] with weights [INPUTS, features]. They are held as [features, ROWS]
    in tiles of more than few rows: four warps multiply 64 of the first, and any number of the second."""
    if FEW:
        return tl.dot(values, weights, total)
    else:
        return tl.dot(tl.trans(weights), tl.trans(values), total)


@triton.jit
def _of_rows(total, FEW: tl.constexpr):
    """Sums [ROWS, features]."""
    if FEW:
        return total
    else:
        return tl.trans(total)


@triton.jit
def _gate_up(
    x, weight, bias, output, pairs, expert, part, features, inputs,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Activated gates times factors of the pairs at ROWS places, for a part of the features of their expert."""
    pair = tl.load(pairs + tl.arange(0, ROWS)).to(tl.int64)
    tl.debug_barrier()  # so that the expert is asked for at once, too
    if expert >= 0:
        kind = output.dtype.element_ty
        is_pair = pair != _NO_ROW
        feature = part * FEATURES + tl.arange(0, FEATURES)
        is_feature = feature < features
        # The last tile computes some features again instead of reading behind the expert.
        gates = expert * 2 * features + tl.where(is_feature, feature, 0).to(tl.int64)
        token = x + (pair // CHOSEN) * inputs
        gate, factor = _nothing(ROWS, FEATURES, FEW), _nothing(ROWS, FEATURES, FEW)
        chosen = last_asked(inputs, INPUTS, STAGES)
        for first in range(0, inputs, INPUTS):
            if FEW:
                launch_next_at(first, chosen, EARLY)
            number = first + tl.arange(0, INPUTS)
            known = number < inputs
            values = tl.load(token[:, None] + number[None, :], mask=is_pair[:, None] & known[None, :], other=0.0)
            of_gate = _weights_of(weight, gates, first, inputs, FEW, INPUTS, IS_EVEN)
            gate = _add_product(values, of_gate, gate, FEW)
            of_factor = _weights_of(weight, gates + features, first, inputs, FEW, INPUTS, IS_EVEN)
            factor = _add_product(values, of_factor, factor, FEW)
        gate, factor = _of_rows(gate, FEW), _of_rows(factor, FEW)
        if HAS_BIAS:
            of_gates = bias + expert * 2 * features + feature
            gate += tl.load(of_gates, mask=is_feature, other=0.0).to(tl.float32)[None, :]
            factor += tl.load(of_gates + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
        made = gated(gate.to(kind).to(tl.float32), factor.to(kind).to(tl.float32), kind, GATE, LIMIT)
        place = output + pair[:, None] * features + feature[None, :]
        tl.store(place, made, mask=is_pair[:, None] & is_feature[None, :])


@triton.jit
def _gate_up_kernel(
    x, weight, bias, output, pairs, experts, features, inputs,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Activated gates times factors of the pairs of a tile: output [pairs, features]."""
    FEW: tl.constexpr = ROWS <= FEW_ROWS
    wait_for_all(EARLY)  # first: the next kernel looks at what is in `experts`
    if not FEW:
        launch_next(EARLY)
    tile, part = tile_and_part(ROWS)
    expert, own = tl.load(experts + tile).to(tl.int64), pairs + tile * ROWS
    if not FEW and has_no_more(own, ROWS // 4):
        _gate_up(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS // 4, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, GATE, LIMIT, STAGES, EARLY, FEW,
        )  # fmt: skip
    elif not FEW and has_no_more(own, ROWS // 2):
        _gate_up(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS // 2, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, GATE, LIMIT, STAGES, EARLY, FEW,
        )  # fmt: skip
    else:
        _gate_up(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, GATE, LIMIT, STAGES, EARLY, FEW,
        )  # fmt: skip


@triton.jit
def _multiply(
    x, weight, bias, output, pairs, expert, part, features, inputs,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The product of the pairs at ROWS places with a part of the features of their expert."""
    pair = tl.load(pairs + tl.arange(0, ROWS)).to(tl.int64)
    tl.debug_barrier()  # so that the expert is asked for at once, too
    if expert >= 0:
        is_pair = pair != _NO_ROW
        feature = part * FEATURES + tl.arange(0, FEATURES)
        is_feature = feature < features
        row = expert * features + tl.where(is_feature, feature, 0).to(tl.int64)
        token = x + (pair // CHOSEN)[:, None] * inputs
        total = _nothing(ROWS, FEATURES, FEW)
        chosen = last_asked(inputs, INPUTS, STAGES)
        for first in range(0, inputs, INPUTS):
            if FEW:
                launch_next_at(first, chosen, EARLY)
            number = first + tl.arange(0, INPUTS)
            known = number < inputs
            values = tl.load(token + number[None, :], mask=is_pair[:, None] & known[None, :], other=0.0)
            weights = _weights_of(weight, row, first, inputs, FEW, INPUTS, IS_EVEN)
            total = _add_product(values, weights, total, FEW)
        total = _of_rows(total, FEW)
        if HAS_BIAS:
            total += tl.load(bias + expert * features + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
        place = output + pair[:, None] * features + feature[None, :]
        tl.store(place, total.to(output.dtype.element_ty), mask=is_pair[:, None] & is_feature[None, :])


@triton.jit
def _product_kernel(
    x, weight, bias, output, pairs, experts, features, inputs, num_experts,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of the pairs of a tile with their expert: output [pairs, features]. A row of x has the inputs of
    CHOSEN pairs, one behind the other. Where LINES are asked for, the kernel before waited before it let this begin."""
    tile, part = tile_and_part(ROWS)
    if EARLY and LINES > 0:
        fetch_of_expert(weight, experts + tile, num_experts, part * FEATURES, features, inputs, FEATURES, LINES)
    FEW: tl.constexpr = ROWS <= FEW_ROWS
    wait_for_all(EARLY)
    if not FEW:
        launch_next(EARLY)
    expert, own = tl.load(experts + tile).to(tl.int64), pairs + tile * ROWS
    if not FEW and has_no_more(own, ROWS // 4):
        _multiply(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS // 4, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, STAGES, EARLY, FEW,
        )  # fmt: skip
    elif not FEW and has_no_more(own, ROWS // 2):
        _multiply(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS // 2, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, STAGES, EARLY, FEW,
        )  # fmt: skip
    else:
        _multiply(
            x, weight, bias, output, own, expert, part, features, inputs,
            CHOSEN, ROWS, FEATURES, INPUTS, IS_EVEN, HAS_BIAS, STAGES, EARLY, FEW,
        )  # fmt: skip


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile for so many pairs."""
    rows = num_pairs // num_experts
    return 16 if rows < 16 else 64 if rows < 96 else 128


class PlainProduct:
    """The product with one matrix of all experts in half precision.

    Args:
        weight: [experts, features, inputs].
        bias: [experts, features] or None.
        asks_ahead: whether programs of few pairs ask for weights before they wait: only where the kernel before waits
            first, then lets this one begin, and does not write the tiles.
    """

    rounding: Rounding | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, asks_ahead: bool = False) -> None:
        self._weight, self._bias, self._asks_ahead = weight, bias, asks_ahead

    def tile_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Rows of a tile where there are so many pairs of a dtype."""
        return tile_rows(num_pairs, len(self._weight))

    def __call__(self, x: Activations, tiles: ExpertTiles, num_pairs: int, each: int) -> torch.Tensor:
        """x [rows, inputs], of which each has so many pairs → [pairs, features]."""
        assert isinstance(x, torch.Tensor)
        num_experts, features, inputs = self._weight.shape
        tile, made = TILES[tiles.rows][1], x.new_empty((num_pairs, features))
        asks = self._asks_ahead and num_pairs <= FEW_PAIRS
        _product_kernel[grid_of(tiles, triton.cdiv(features, tile.features))](
            x, self._weight, x if self._bias is None else self._bias, made, *tiles, features, inputs, num_experts,
            CHOSEN=each, ROWS=tiles.rows, FEATURES=tile.features, INPUTS=tile.inputs,
            IS_EVEN=inputs % tile.inputs == 0, HAS_BIAS=self._bias is not None,
            LINES=lines_of(self._weight[0], tile.features) if asks else 0,
            STAGES=tile.num_stages, num_warps=tile.num_warps,
            num_stages=tile.num_stages, **early(x),
        )  # fmt: skip
        return made


_MOST_LEFT = 512
"""Tokens whose experts the next norm adds up: what these made is kept until then, eight times as much as their sum."""


class AddingExperts(Experts):
    """Experts whose results are added up by a kernel, or by that of the next norm."""

    @override
    def add_up(self, made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return add_up(ExpertSums(made, shares))

    @override
    def leave(self, x: torch.Tensor, choice: Choice) -> Delta:
        sums = ExpertSums(self.make(x, choice), choice.shares)
        return sums if len(x) <= _MOST_LEFT else add_up(sums)


class TritonExperts(AddingExperts):
    """Experts with weights of half precision.

    Args:
        weights: [experts, 2 * features, hidden], and [experts, hidden, features].
        biases: of both, [experts, 2 * features] and [experts, hidden]; or None.
        activation: what gates go through.
        limit: of the activation, where it has one.
    """

    def __init__(
        self,
        weights: tuple[torch.Tensor, torch.Tensor],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        activation: Activation,
        limit: float,
    ) -> None:
        self._gate_up, self._bias = weights[0], biases[0]
        self._down = PlainProduct(weights[1], biases[1], asks_ahead=True)
        self._gate, self._limit = GATES[activation], limit

    @override
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        x = x.contiguous()
        (tokens, hidden), num_chosen = x.shape, choice.experts.shape[1]
        if not tokens:
            return x.new_empty((tokens, num_chosen, hidden))
        num_experts, features, num_pairs = len(self._gate_up), self._gate_up.shape[1] // 2, choice.experts.numel()
        tiles = lay_out(choice.experts, num_experts, tile_rows(num_pairs, num_experts * self.num_holders))
        tile = TILES[tiles.rows][0]
        gates = x.new_empty((num_pairs, features))
        _gate_up_kernel[grid_of(tiles, triton.cdiv(features, tile.features))](
            x, self._gate_up, x if self._bias is None else self._bias, gates, *tiles, features, hidden,
            CHOSEN=num_chosen, ROWS=tiles.rows, FEATURES=tile.features, INPUTS=tile.inputs,
            IS_EVEN=hidden % tile.inputs == 0, HAS_BIAS=self._bias is not None, GATE=self._gate, LIMIT=self._limit,
            STAGES=tile.num_stages, num_warps=tile.num_warps,
            num_stages=tile.num_stages, **early(x),
        )  # fmt: skip
        return self._down(gates, tiles, num_pairs, 1).view(tokens, num_chosen, hidden)
