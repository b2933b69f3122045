"""Experts in torch's own operations: which of them a token chooses, and what these make of it.

A token's bits do not depend on who else chose an expert: each product takes rows that are alone in it, too, and a
token's experts are added in the order in which it chose them, in float32. It knows tensors. It does not know layers, or
how ranks share features or experts out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

from trtrun.kernels.arguments import Delta, ExpertSums
from trtrun.kernels.routing import LEAST_TOTAL, USUAL, Routing


class ExpertCodes(NamedTuple):
    """One matrix of all experts of a layer that is held in codes of 8 or 4 bits, contiguous.

    Attributes:
        tensors: with an axis of experts in front. Of 8 bits "codes" [experts, out, in], E4M3 or int8, and "scale"
            [experts, out] or, of E4M3 in blocks of 128 by 128, "block_scale"; of 4 bits "words" with "scales"
            (integers.py), or with "blocks" and "factor" (fp4.py).
        features: of the matrix, `out`.
        inputs: of the matrix, `in`.
        rounds_activations: whether rows are rounded to E4M3, too: in blocks they always are.
    """

    tensors: Mapping[str, torch.Tensor]
    features: int
    inputs: int
    rounds_activations: bool = False


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer on one device, contiguous.

    Attributes:
        gate_up: [experts, 2 * features, hidden]: rows of gates, then of factors; or codes of these.
        down: [experts, hidden, features]; or codes of these.
        gate_up_bias: [experts, 2 * features]; None without.
        down_bias: [experts, hidden]; None without.
    """

    gate_up: torch.Tensor | ExpertCodes
    down: torch.Tensor | ExpertCodes
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


Product = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, in] → [rows, out]."""


class Choice(NamedTuple):
    """The experts of each token, the likeliest first.

    Attributes:
        experts: [tokens, chosen] int64; of equally likely ones the lower number comes first. -1 where the expert is not
            held here, among experts of a rank that holds some, and of padding.
        shares: [tokens, chosen] float32: what their results are multiplied by.
    """

    experts: torch.Tensor
    shares: torch.Tensor


class Choose(Protocol):
    """Which experts tokens choose, by logits [tokens, experts]; `positions` [tokens] int64 are negative for padding,
    which chooses none, and None where there is no padding."""

    def __call__(self, logits: torch.Tensor, *, positions: torch.Tensor | None = None) -> Choice: ...


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    routing: Routing = USUAL,
    bias: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> Choice:
    """The `num_chosen` best experts of logits [tokens, experts]; shares of those that are chosen sum to 1, but for the
    factor, where `renormalises`. `bias` is [experts] float32, where the routing has one. Experts that all tokens have
    come last. Where `positions` [tokens] int64 are negative the token chooses none, with a share of 0."""
    wide = logits.float()
    wide, gates = (wide[:, :-1], wide[:, -1:]) if routing.is_gated else (wide, None)
    if routing.scores == "softmax":
        every = torch.softmax(wide, dim=-1)
    else:  # the sigmoid as a softmax beside 0, whose rows have the same bits in any company
        every = torch.softmax(torch.stack((wide, torch.zeros_like(wide)), dim=-1), dim=-1)[..., 0]
    # By logits where that is the same order: shares of those that are far behind may be equal where these are not.
    by_logits = routing.scores == "softmax" and bias is None and routing.summed == 1
    ranked = wide if by_logits else every if bias is None else every + bias
    if routing.groups > 1:
        ranked = _of_best_groups(ranked, routing)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    shares = every.gather(1, experts)
    if renormalises:
        shares = shares / (_sum_one_by_one(shares) + LEAST_TOTAL).unsqueeze(1)
    choice = Choice(experts, shares if routing.factor == 1.0 else shares * routing.factor)
    if routing.num_shared:
        choice = _with_shared(choice, wide.shape[1], routing.num_shared, gates)
    if positions is None:
        return choice
    is_padding = (positions < 0).unsqueeze(1)
    return Choice(choice.experts.masked_fill(is_padding, -1), choice.shares.masked_fill(is_padding, 0.0))


def _with_shared(choice: Choice, num_experts: int, count: int, gates: torch.Tensor | None) -> Choice:
    """The choice, and behind it so many experts of all tokens; gates [tokens, 1] are logits of their share."""
    others = torch.arange(num_experts, num_experts + count, device=choice.experts.device).expand(
        len(choice.experts), -1
    )
    share = torch.ones_like(choice.shares[:, :1])
    if gates is not None:  # the sigmoid as a softmax beside 0, whose rows have the same bits in any company
        share = torch.softmax(torch.cat((gates, torch.zeros_like(gates)), dim=1), dim=1)[:, :1]
    experts, shares = torch.cat((choice.experts, others), dim=1), torch.cat((choice.shares, share.expand(-1, count)), 1)
    return Choice(experts, shares)


def _of_best_groups(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[tokens, experts], with -inf for experts of other groups than the best ones."""
    grouped = ranked.view(len(ranked), routing.groups, -1)
    best = grouped.sort(dim=-1, descending=True, stable=True).values[..., : routing.summed]
    of_groups = _sum_one_by_one(best.flatten(0, 1)).view(grouped.shape[:2])
    chosen = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : routing.chosen_groups]
    is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(is_left_out.unsqueeze(2), float("-inf")).flatten(1)


def _sum_one_by_one(numbers: torch.Tensor) -> torch.Tensor:
    """Sums of rows [rows, few]: how torch groups a sum may depend on the number of rows."""
    total = numbers[:, 0]
    for place in range(1, numbers.shape[1]):
        total = total + numbers[:, place]
    return total


class ScaledChoice:
    """A choice of experts whose shares are then multiplied by a number of each expert.

    Args:
        choose: by logits alone.
        factors: [experts] float32.
    """

    def __init__(self, choose: Choose, factors: torch.Tensor) -> None:
        self._choose, self._factors = choose, factors

    def __call__(self, logits: torch.Tensor, *, positions: torch.Tensor | None = None) -> Choice:
        """Choose as `choose` does."""
        experts, shares = self._choose(logits, positions=positions)
        return Choice(experts, shares * self._factors[experts])


_TOKENS_AT_ONCE = 64
"""That are added up in float32: so this takes little memory, which stays in caches."""


def add_up(sums: ExpertSums) -> torch.Tensor:
    """[tokens, columns]."""
    made, shares = sums
    tokens, num_chosen, columns = made.shape
    output = made.new_empty((tokens, columns))
    for first in range(0, tokens, _TOKENS_AT_ONCE):
        own = slice(first, first + _TOKENS_AT_ONCE)
        weighted = made[own].float() * shares[own].unsqueeze(2)
        total = weighted[:, 0]
        for place in range(1, num_chosen):
            total += weighted[:, place]
        output[own] = total
    return output


class Experts(ABC):
    """Experts of a layer, or those of them that a rank holds.

    Attributes:
        num_holders: ranks that hold some. So many times fewer pairs of a token and an expert are this one's, about.
    """

    num_holders = 1

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → what the chosen experts make of it, added up: [tokens, hidden]."""
        return self.add_up(self.make(x, choice), choice.shares)

    @abstractmethod
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → what each chosen expert makes of it: [tokens, chosen, hidden], any numbers where the
        expert is not held here."""

    def add_up(self, made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """made [tokens, chosen, columns] times shares [tokens, chosen], added up in their order in float32, then
        rounded: [tokens, columns]."""
        return add_up(ExpertSums(made, shares))

    def leave(self, x: torch.Tensor, choice: Choice) -> Delta:
        """x [tokens, hidden] → what is left to add to the residual stream, which the next norm may add up itself."""
        return self(x, choice)


class ProductExperts(Experts):
    """Experts by products of each.

    Args:
        gate_up: of each expert, hidden to gate features, then as many up features.
        down: of each expert, back to hidden.
        activate: gates and factors [rows, 2 * features] → [rows, features].
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._gate_up, self._down, self._activate = gate_up, down, activate


class HostExperts(ProductExperts):
    """Experts on the CPU: each that was chosen multiplies the rows that chose it."""

    @override
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        tokens, num_chosen = choice.experts.shape
        made = x.new_empty((tokens, num_chosen, x.shape[1]))
        pairs: dict[int, list[int]] = {}
        for pair, expert in enumerate(choice.experts.flatten().tolist()):
            if expert >= 0:
                pairs.setdefault(expert, []).append(pair)
        flat = made.view(-1, x.shape[1])
        for expert, chosen in pairs.items():
            places = torch.tensor(chosen)
            rows = x.index_select(0, places // num_chosen)
            flat.index_copy_(0, places, self._down[expert](self._activate(self._gate_up[expert](rows))))
        return made


class MaskedExperts(ProductExperts):
    """Experts on any device, without looking at what was chosen: each multiplies all rows. It is for devices that have
    nothing better for a dtype.
    """

    @override
    def make(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        made = x.new_zeros((*choice.experts.shape, x.shape[1]))
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            result = down(self._activate(gate_up(x)))
            made = torch.where((choice.experts == expert).unsqueeze(2), result.unsqueeze(1), made)
        return made
