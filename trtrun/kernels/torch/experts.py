"""Experts in torch's own operations: which of them a token chooses, and what these make of it.

A token's bits do not depend on who else chose an expert: each product takes rows that are alone in it, too, and a
token's experts are added in the order in which it chose them, in float32. It knows tensors. It does not know layers, or
how ranks share features out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


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
        experts: [tokens, chosen] int64; of equally likely ones the lower number comes first.
        shares: [tokens, chosen] float32: what their results are multiplied by.
    """

    experts: torch.Tensor
    shares: torch.Tensor


def choose_experts(logits: torch.Tensor, num_chosen: int, *, renormalises: bool) -> Choice:
    """The `num_chosen` likeliest experts of logits [tokens, experts], by softmax in float32 over all of them; shares of
    those that are chosen sum to 1 where `renormalises`."""
    # By logits: shares of those that are far behind may be equal where these are not.
    experts = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    shares = torch.softmax(logits.float(), dim=-1).gather(1, experts)
    if renormalises:
        # One by one: how torch groups a sum may depend on the number of rows.
        total = shares[:, 0]
        for place in range(1, num_chosen):
            total = total + shares[:, place]
        shares = shares / total.unsqueeze(1)
    return Choice(experts, shares)


class HostExperts:
    """Experts on the CPU: each that was chosen multiplies the rows that chose it.

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

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → what the chosen experts make of it, added up: [tokens, hidden]."""
        tokens, num_chosen = choice.experts.shape
        made = x.new_empty((tokens, num_chosen, x.shape[1]))
        pairs: dict[int, list[int]] = {}
        for pair, expert in enumerate(choice.experts.flatten().tolist()):
            pairs.setdefault(expert, []).append(pair)
        flat = made.view(-1, x.shape[1])
        for expert, chosen in pairs.items():
            places = torch.tensor(chosen)
            rows = x.index_select(0, places // num_chosen)
            flat.index_copy_(0, places, self._down[expert](self._activate(self._gate_up[expert](rows))))
        return add_up(made, choice.shares)


class MaskedExperts:
    """Experts on any device, without looking at what was chosen: each multiplies all rows. It is for devices that have
    nothing better for a dtype.

    Args:
        gate_up, down: the products of each expert.
        activate: gates and factors [rows, 2 * features] → [rows, features].
    """

    def __init__(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._gate_up, self._down, self._activate = gate_up, down, activate

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → what the chosen experts make of it, added up: [tokens, hidden]."""
        made = x.new_zeros((*choice.experts.shape, x.shape[1]))
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            result = down(self._activate(gate_up(x)))
            made = torch.where((choice.experts == expert).unsqueeze(2), result.unsqueeze(1), made)
        return add_up(made, choice.shares)


def add_up(made: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """made [tokens, chosen, hidden] times shares [tokens, chosen], added up in their order in float32, then rounded:
    [tokens, hidden]."""
    total = made[:, 0].float() * shares[:, :1]
    for place in range(1, made.shape[1]):
        total = total + made[:, place].float() * shares[:, place : place + 1]
    return total.to(made.dtype)


Experts = Callable[[torch.Tensor, Choice], torch.Tensor]
"""x [tokens, hidden] and what was chosen → [tokens, hidden]."""
