"""Which experts a token chooses, on CUDA, in one kernel: the choice of trtrun.kernels.torch.experts.

One expert after another is found by largest integers, for which a warp has an instruction, so that a program is one
warp: of floating-point numbers it takes ten steps, each of which waits for the one before. It knows logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.routing import LEAST_TOTAL, USUAL, Routing
from trtrun.kernels.torch.experts import Choice
from trtrun.kernels.triton.early_launch import begin, early

_OUT = tl.constexpr(-(1 << 31))
"""Below the rank of any number."""


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
def _ranks(value):
    """int32 above `_OUT` in the order of numbers of float32, what is no number last, as torch sorts. A processor finds
    the largest integer of a warp by one instruction."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _ranks_of_half(value):
    """Do as `_ranks`, of numbers of 16 bits, in 16 bits."""
    bits = tl.where(value == 0.0, 0.0, value).to(value.dtype).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(value == value, bits ^ ((bits >> 15) & 0x7FFF), 0x7FFF)


@triton.jit
def _choose_kernel(
    logits, positions, bias, experts, shares, num_experts, stride, factor,
    CHOSEN: tl.constexpr, SHARED: tl.constexpr, IS_GATED: tl.constexpr, PLACES: tl.constexpr,
    RENORMALISES: tl.constexpr, PADDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, OF_GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, SUMMED: tl.constexpr, PADDED_GROUPS: tl.constexpr, LEAST: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_POSITIONS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < num_experts
    logit = tl.load(logits + row * stride + number, mask=inside, other=-float("inf"))
    value = logit.to(tl.float32)
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
    if IS_PACKED:
        ranks = tl.where(inside, (_ranks_of_half(logit) << 16) | (0xFFFF - number), _OUT)
    else:
        ranks = tl.where(inside, _ranks(left), _OUT)
    bits = every.to(tl.int32, bitcast=True)
    places = tl.arange(0, PLACES)
    chosen, of_chosen, total = tl.zeros((PLACES,), tl.int64), tl.zeros((PLACES,), tl.float32), 0.0
    for place in tl.static_range(CHOSEN):
        best = tl.max(ranks, axis=0)
        expert = 0xFFFF - (best & 0xFFFF)
        if not IS_PACKED:
            expert = tl.min(tl.where(ranks == best, number, PADDED - 1), axis=0)
        # Of bits, of which one is not 0: a sum that is one instruction, too.
        share = tl.xor_sum(tl.where(number == expert, bits, 0), axis=0).to(tl.float32, bitcast=True)
        chosen = tl.where(places == place, expert.to(tl.int64), chosen)
        of_chosen = tl.where(places == place, share, of_chosen)
        total += share
        ranks = tl.where(number == expert, _OUT, ranks)
    if RENORMALISES:
        of_chosen = of_chosen / (total + LEAST)
    of_chosen = of_chosen * factor
    if SHARED > 0:
        share = 1.0
        if IS_GATED:
            share = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * stride + num_experts).to(tl.float32)))
        chosen = tl.where(places < CHOSEN, chosen, num_experts + places - CHOSEN)
        of_chosen = tl.where(places < CHOSEN, of_chosen, share)
    if HAS_POSITIONS:
        is_token = tl.load(positions + row) >= 0
        chosen, of_chosen = tl.where(is_token, chosen, -1), tl.where(is_token, of_chosen, 0.0)
    every_place: tl.constexpr = CHOSEN + SHARED
    tl.store(experts + row * every_place + places, chosen, mask=places < every_place)
    tl.store(shares + row * every_place + places, of_chosen, mask=places < every_place)


def _is_packed(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> bool:
    """Whether experts are ranked by numbers of 16 bits, beside which there is room for their own number."""
    is_by_logit = routing.scores == "softmax" and bias is None and routing.groups == routing.summed == 1
    return is_by_logit and logits.itemsize == 2 and logits.shape[1] <= 1 << 16


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    routing: Routing = USUAL,
    bias: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> Choice:
    """Choose as trtrun.kernels.torch.experts does, in one kernel."""
    tokens, num_experts = len(logits), logits.shape[1] - routing.is_gated
    shape = tokens, num_chosen + routing.num_shared
    experts = torch.empty(shape, dtype=torch.int64, device=logits.device)
    shares = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits, experts if positions is None else positions, shares if bias is None else bias, experts, shares,
            num_experts, logits.stride(0),
            float(routing.factor), CHOSEN=num_chosen, SHARED=routing.num_shared, IS_GATED=routing.is_gated,
            PLACES=triton.next_power_of_2(shape[1]), RENORMALISES=renormalises,
            PADDED=triton.next_power_of_2(num_experts), IS_SIGMOID=routing.scores == "sigmoid",
            HAS_BIAS=bias is not None, OF_GROUP=num_experts // routing.groups, GROUPS=routing.groups,
            CHOSEN_GROUPS=routing.chosen_groups, SUMMED=routing.summed,
            PADDED_GROUPS=triton.next_power_of_2(routing.groups), LEAST=LEAST_TOTAL,
            IS_PACKED=_is_packed(logits, routing, bias), HAS_POSITIONS=positions is not None, num_warps=1,
            **early(logits),
        )  # fmt: skip
    return Choice(experts, shares)
