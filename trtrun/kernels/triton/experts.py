"""Experts on CUDA in half precision: which of them a token chooses, and their products, grouped by expert. Those that
are held in codes have kernels of their own (coded_experts).

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

from trtrun.kernels.arguments import Activation, Activations, Rounding
from trtrun.kernels.routing import LEAST_TOTAL, USUAL, Routing
from trtrun.kernels.torch.experts import Choice, Experts
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.expert_tiles import FEW_ROWS, ExpertTiles, grid_of, lay_out, tile_and_part
from trtrun.kernels.triton.fused import GATES, gated

_NO_ROW = tl.constexpr(-1)


class Tile(NamedTuple):
    """What a program computes at a time: so many features of an expert, of a tile of rows; `inputs` in a step."""

    features: int
    inputs: int
    num_warps: int
    num_stages: int


TILES = {
    16: (Tile(32, 256, 4, 3), Tile(32, 256, 4, 3)),
    64: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
}
"""By the rows of a tile, of gates and of the product behind them: for few rows an expert, which memory bounds, for
more, and for prompts. Bits are the same with any."""


@triton.jit
def _in_best_groups(
    ranked, number, OF_GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, SUMMED: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Which experts are of the best groups, by scores [experts]."""
    group = tl.arange(0, PADDED)
    scores = tl.full((PADDED,), -float("inf"), tl.float32)
    for one in tl.static_range(GROUPS):
        left, total = tl.where(number // OF_GROUP == one, ranked, -float("inf")), 0.0
        for _ in tl.static_range(SUMMED):
            best, at = tl.max(left, axis=0, return_indices=True, return_indices_tie_break_left=True)
            total += best
            left = tl.where(number == at, -float("inf"), left)
        scores = tl.where(group == one, total, scores)
    are_chosen = number < 0
    for _ in tl.static_range(CHOSEN):
        _, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
        are_chosen |= number // OF_GROUP == at
        scores = tl.where(group == at, -float("inf"), scores)
    return are_chosen


@triton.jit
def _choose_kernel(
    logits, bias, experts, shares, num_experts, stride, factor,
    CHOSEN: tl.constexpr, SHARED: tl.constexpr, IS_GATED: tl.constexpr, PLACES: tl.constexpr,
    RENORMALISES: tl.constexpr, PADDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, OF_GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, SUMMED: tl.constexpr, PADDED_GROUPS: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < num_experts
    value = tl.load(logits + row * stride + number, mask=inside, other=-float("inf")).to(tl.float32)
    if IS_SIGMOID:
        every = tl.where(inside, 1.0 / (1.0 + tl.exp(-value)), 0.0)
    else:
        power = tl.exp(value - tl.max(value, axis=0))
        every = power / tl.sum(power, axis=0)
    left = value
    if HAS_BIAS:
        left = every + tl.load(bias + number, mask=inside, other=0.0)
    elif IS_SIGMOID or SUMMED > 1:
        left = every
    left = tl.where(inside, left, -float("inf"))
    if GROUPS > 1:
        are_of_best = _in_best_groups(left, number, OF_GROUP, GROUPS, CHOSEN_GROUPS, SUMMED, PADDED_GROUPS)
        left = tl.where(are_of_best, left, -float("inf"))
    places = tl.arange(0, PLACES)
    chosen, of_chosen, total = tl.zeros((PLACES,), tl.int64), tl.zeros((PLACES,), tl.float32), 0.0
    for place in tl.static_range(CHOSEN):
        _, expert = tl.max(left, axis=0, return_indices=True, return_indices_tie_break_left=True)
        expert = tl.minimum(expert, num_experts - 1)  # where logits are no numbers
        share = tl.sum(tl.where(number == expert, every, 0.0), axis=0)
        chosen = tl.where(places == place, expert.to(tl.int64), chosen)
        of_chosen = tl.where(places == place, share, of_chosen)
        total += share
        left = tl.where(number == expert, -float("inf"), left)
    if RENORMALISES:
        of_chosen = of_chosen / (total + LEAST)
    of_chosen = of_chosen * factor
    if SHARED > 0:
        share = 1.0
        if IS_GATED:
            share = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * stride + num_experts).to(tl.float32)))
        chosen = tl.where(places < CHOSEN, chosen, num_experts + places - CHOSEN)
        of_chosen = tl.where(places < CHOSEN, of_chosen, share)
    every_place: tl.constexpr = CHOSEN + SHARED
    tl.store(experts + row * every_place + places, chosen, mask=places < every_place)
    tl.store(shares + row * every_place + places, of_chosen, mask=places < every_place)


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    routing: Routing = USUAL,
    bias: torch.Tensor | None = None,
) -> Choice:
    """Choose as trtrun.kernels.torch.experts does, in one kernel."""
    tokens, num_experts = len(logits), logits.shape[1] - routing.is_gated
    shape = tokens, num_chosen + routing.num_shared
    experts = torch.empty(shape, dtype=torch.int64, device=logits.device)
    shares = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits, shares if bias is None else bias, experts, shares, num_experts, logits.stride(0),
            float(routing.factor), CHOSEN=num_chosen, SHARED=routing.num_shared, IS_GATED=routing.is_gated,
            PLACES=triton.next_power_of_2(shape[1]), RENORMALISES=renormalises,
            PADDED=triton.next_power_of_2(num_experts), IS_SIGMOID=routing.scores == "sigmoid",
            HAS_BIAS=bias is not None, OF_GROUP=num_experts // routing.groups, GROUPS=routing.groups,
            CHOSEN_GROUPS=routing.chosen_groups, SUMMED=routing.summed,
            PADDED_GROUPS=triton.next_power_of_2(routing.groups), LEAST=LEAST_TOTAL, num_warps=1, **early(logits),
        )  # fmt: skip
    return Choice(experts, shares)


@triton.jit
def _weights_of(
    weight, row, first, inputs, ROWS: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """Weights [INPUTS, features] of rows [features] int64 of all experts' rows, from an input on: for tiles of few
    rows they are read once."""
    number = first + tl.arange(0, INPUTS)
    place = weight + row[None, :] * inputs + number[:, None]
    policy: tl.constexpr = "evict_first" if ROWS <= FEW_ROWS else ""
    if IS_EVEN:
        weights = tl.load(place, eviction_policy=policy)
    else:
        weights = tl.load(place, mask=(number < inputs)[:, None], other=0.0, eviction_policy=policy)
    return weights


@triton.jit
def _gate_up_kernel(
    x, weight, bias, output, pairs, experts, features, inputs,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Activated gates times factors of the pairs of a tile: output [pairs, features]."""
    begin(EARLY)
    tile, part = tile_and_part(ROWS)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    kind = output.dtype.element_ty
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_pair = pair != _NO_ROW
    feature = part * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    # The last tile computes some features again instead of reading behind the expert.
    gates = expert * 2 * features + tl.where(is_feature, feature, 0).to(tl.int64)
    token = x + (pair // CHOSEN) * inputs
    gate, factor = tl.zeros((ROWS, FEATURES), tl.float32), tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(0, inputs, INPUTS):
        number = first + tl.arange(0, INPUTS)
        known = number < inputs
        values = tl.load(token[:, None] + number[None, :], mask=is_pair[:, None] & known[None, :], other=0.0)
        gate = tl.dot(values, _weights_of(weight, gates, first, inputs, ROWS, INPUTS, IS_EVEN), gate)
        of_factor = _weights_of(weight, gates + features, first, inputs, ROWS, INPUTS, IS_EVEN)
        factor = tl.dot(values, of_factor, factor)
    if HAS_BIAS:
        of_gates = bias + expert * 2 * features + feature
        gate += tl.load(of_gates, mask=is_feature, other=0.0).to(tl.float32)[None, :]
        factor += tl.load(of_gates + features, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    made = gated(gate.to(kind).to(tl.float32), factor.to(kind).to(tl.float32), kind, GATE, LIMIT)
    place = output + pair[:, None] * features + feature[None, :]
    tl.store(place, made, mask=is_pair[:, None] & is_feature[None, :])


@triton.jit
def _product_kernel(
    x, weight, bias, output, pairs, experts, features, inputs,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product of the pairs of a tile with their expert: output [pairs, features]. A row of x has the inputs of
    CHOSEN pairs, one behind the other."""
    begin(EARLY)
    tile, part = tile_and_part(ROWS)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_pair = pair != _NO_ROW
    feature = part * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < features
    row = expert * features + tl.where(is_feature, feature, 0).to(tl.int64)
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for first in range(0, inputs, INPUTS):
        number = first + tl.arange(0, INPUTS)
        known = number < inputs
        values = tl.load(
            x + (pair // CHOSEN)[:, None] * inputs + number[None, :], mask=is_pair[:, None] & known[None, :], other=0.0
        )
        total = tl.dot(values, _weights_of(weight, row, first, inputs, ROWS, INPUTS, IS_EVEN), total)
    if HAS_BIAS:
        total += tl.load(bias + expert * features + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    place = output + pair[:, None] * features + feature[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_pair[:, None] & is_feature[None, :])


@triton.jit
def _add_kernel(made, shares, output, size, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        value = tl.load(made + pair * size + element, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(shares + pair)
    tl.store(output + token * size + element, total.to(output.dtype.element_ty), mask=inside)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile for so many pairs."""
    rows = num_pairs // num_experts
    return 16 if rows < 16 else 64 if rows < 96 else 128


class PlainProduct:
    """The product with one matrix of all experts in half precision.

    Args:
        weight: [experts, features, inputs].
        bias: [experts, features] or None.
    """

    rounding: Rounding | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def tile_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Rows of a tile where there are so many pairs of a dtype."""
        return tile_rows(num_pairs, len(self._weight))

    def __call__(self, x: Activations, tiles: ExpertTiles, num_pairs: int, each: int) -> torch.Tensor:
        """x [rows, inputs], of which each has so many pairs → [pairs, features]."""
        assert isinstance(x, torch.Tensor)
        _, features, inputs = self._weight.shape
        tile, made = TILES[tiles.rows][1], x.new_empty((num_pairs, features))
        _product_kernel[grid_of(tiles, triton.cdiv(features, tile.features))](
            x, self._weight, x if self._bias is None else self._bias, made, *tiles, features, inputs,
            CHOSEN=each, ROWS=tiles.rows, FEATURES=tile.features, INPUTS=tile.inputs,
            IS_EVEN=inputs % tile.inputs == 0, HAS_BIAS=self._bias is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **early(x),
        )  # fmt: skip
        return made


class AddingExperts(Experts):
    """Experts whose results are added up by a kernel."""

    @override
    def add_up(self, made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        tokens, num_chosen, columns = made.shape
        output = made.new_empty((tokens, columns))
        block = min(1024, triton.next_power_of_2(columns))
        if tokens:
            _add_kernel[(tokens, triton.cdiv(columns, block))](
                made, shares, output, columns, CHOSEN=num_chosen, BLOCK=block, num_warps=4, **early(made)
            )
        return output


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
        self._gate_up, self._bias, self._down = weights[0], biases[0], PlainProduct(weights[1], biases[1])
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
            num_warps=tile.num_warps, num_stages=tile.num_stages, **early(x),
        )  # fmt: skip
        return self._down(gates, tiles, num_pairs, 1).view(tokens, num_chosen, hidden)
