"""The recurrence of a gated delta net (arXiv:2412.06464) in plain torch, as Qwen3-Next has it: a short convolution over
what tokens bring, then for each head a matrix that each token reads, corrects and lets fade; and a gated norm.

Tokens go through one after the other (recurrence.py), and sums have one order, so that a token's bits do not depend on
the cut of a prompt, on drafts or on other rows. It knows heads and states. It does not know whose rows these are, or
what is in front of it and behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from trtrun.kernels.torch.recurrence import go_through
from trtrun.kvcache.row_states import LayerStates, SegmentStates

LEAST_SQUARES = 1e-6
"""Added to the sum of squares that queries and keys are divided by the root of."""


class DeltaNetWeights(NamedTuple):
    """Weights of one rank's heads.

    Attributes:
        keys, values: heads of each; there are as many of queries as of keys.
        key_dim, value_dim: numbers of a key, which queries have as well, and of a value.
        key_of_value: [values] int64: of each value head the key head that it goes with, among the rank's.
        convolution: [kernel, channels] float32, the newest token's last.
        fading: [values] float32: how fast heads fade.
        fading_bias: [values] float32: added to what says how it fades.
        norm: [value_dim], of what a value head reads.
        epsilon: of the norm.
        tile: queries of a tile of a prompt on GPUs, of which a row may have several in a forward.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    key_of_value: torch.Tensor
    convolution: torch.Tensor
    fading: torch.Tensor
    fading_bias: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    tile: int = 1

    @property
    def channels(self) -> int:
        """Numbers that go through the convolution: queries, keys, values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


DeltaNet = Callable[[torch.Tensor, torch.Tensor, LayerStates, Sequence[SegmentStates]], torch.Tensor]
"""Queries, keys, values and gates of values [tokens, channels + values * value_dim]; a number of each value head that
says how much it corrects, then one that says how it fades, [tokens, 2 * values]; rows of both may have gaps between
them; the layer's states, and where those of the forward's rows stand → [tokens, values * value_dim]."""


class _RowOperations(Protocol):
    """Operations whose rows have the same bits in any company."""

    def activate_and_multiply(self, fused: torch.Tensor, activation: Any = ...) -> torch.Tensor: ...

    def normalise(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...

    def square_sums(self, x: torch.Tensor) -> torch.Tensor: ...


class TorchDeltaNet:
    """A `DeltaNet`."""

    def __init__(self, weights: DeltaNetWeights, operations: _RowOperations) -> None:
        self.weights, self._operations = weights, operations

    def __call__(
        self, made: torch.Tensor, rates: torch.Tensor, states: LayerStates, segments: Sequence[SegmentStates]
    ) -> torch.Tensor:
        weights, dtype = self.weights, made.dtype
        channels, gates = made[:, : weights.channels], made[:, weights.channels :]
        correcting, fading = rates.float().chunk(2, dim=1)
        brought = channels.float(), self._sigmoid(correcting), self._kept(fading)
        read = self._carry_on(brought, states, segments, dtype)
        heads = read.to(dtype).view(-1, weights.value_dim)
        normed = self._operations.normalise(heads, weights.norm, weights.epsilon).view(read.shape)
        gated = torch.cat((gates.float(), normed.float()), dim=1)
        return self._operations.activate_and_multiply(gated, "silu").to(dtype)

    def _carry_on(
        self,
        brought: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        states: LayerStates,
        segments: Sequence[SegmentStates],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Have the tokens of a forward go through their rows' states; see `step` for what they bring. Returns what they
        read, [tokens, values * value_dim] float32."""
        features = self.weights.values * self.weights.value_dim
        return go_through(_Step(self, dtype), brought, states, segments, features)

    def _sigmoid(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sigmoids of [tokens, values] float32."""
        return self._operations.activate_and_multiply(torch.cat((numbers, torch.ones_like(numbers)), dim=1), "sigmoid")

    def _kept(self, fading: torch.Tensor) -> torch.Tensor:
        """What of its matrix a head keeps as a token comes, from 0 to 1, [tokens, values] float32:
        exp(-rate * softplus(fading + bias)).

        Both functions are softmaxes beside 0, whose rows have the same bits in any company; in float64, as the
        logarithm of what is close to 1 would lose its digits.
        """
        moved = (fading + self.weights.fading_bias).double()
        softplus = -functional.log_softmax(torch.stack((torch.zeros_like(moved), moved), dim=-1), dim=-1)[..., 0]
        exponent = softplus * -self.weights.fading
        shares = torch.softmax(torch.stack((exponent, torch.zeros_like(exponent)), dim=-1), dim=-1)
        return (shares[..., 0] / shares[..., 1]).float()

    def step(
        self, state: Sequence[torch.Tensor], brought: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """What a token of each row does to its state; see `Step`.

        Args:
            state: what tokens before brought to the convolution, [rows, kernel - 1, channels], and the matrices, [rows,
                values, key_dim, value_dim], rounded to their dtype behind each token.
            brought: [rows, channels], how much heads correct, and what they keep, [rows, values] each.
            dtype: of activations, in which the convolution's results are.
        """
        (window, matrix), (channels, corrects, keeps) = state, brought
        window = torch.cat((window, channels.unsqueeze(1)), dim=1)
        query, key, value = self.convolve(window.unbind(1), dtype)
        query, key = (part.index_select(1, self.weights.key_of_value) for part in (query, key))
        matrix, column = matrix * keeps.view(*keeps.shape, 1, 1), key.unsqueeze(-1)
        room = matrix * column  # a matrix of a row may be megabytes, whose pages cost more than what is computed
        change = (value - _sum_rows(room)) * corrects.unsqueeze(-1)
        matrix += torch.mul(column, change.unsqueeze(-2), out=room)
        kept = matrix.to(state[1].dtype)
        read = _sum_rows(torch.mul(kept, query.unsqueeze(-1), out=room))
        return (window[:, 1:], kept), read.flatten(1)

    def convolve(
        self, window: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [rows, keys, key_dim] of length 1, the former divided by the root of their size, and values
        [rows, values, value_dim], of what as many tokens as the kernel sees brought, [rows, channels] each; all
        float32. Activations are of a dtype."""
        weights = self.weights
        mixed = window[0] * weights.convolution[0]
        for brought, taps in zip(window[1:], weights.convolution[1:], strict=True):
            mixed = mixed + brought * taps
        mixed = mixed.to(dtype)
        mixed = self._operations.activate_and_multiply(torch.cat((mixed, torch.ones_like(mixed)), dim=1)).float()
        keys, rows = weights.keys * weights.key_dim, len(mixed)
        query, key, value = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        query, key = (self._of_length_one(part.reshape(-1, weights.key_dim)) for part in (query, key))
        query, key = (part.view(rows, weights.keys, -1) for part in (query, key))
        return query / weights.key_dim**0.5, key, value.reshape(rows, weights.values, weights.value_dim)

    def _of_length_one(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors / (self._operations.square_sums(vectors) + LEAST_SQUARES).sqrt().unsqueeze(1)


@dataclass(frozen=True)
class _Step:
    """`TorchDeltaNet.step` for activations of a dtype."""

    net: TorchDeltaNet
    dtype: torch.dtype

    def __call__(
        self, state: Sequence[torch.Tensor], brought: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        return self.net.step(state, brought, self.dtype)


def _sum_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Sums of columns, [..., rows, columns] → [..., columns], halves on halves: torch's own sums depend on how many
    matrices there are. Overwrites the matrices."""
    rows = matrices.shape[-2]
    while rows > 1:
        half = rows // 2
        matrices[..., :half, :] += matrices[..., half : 2 * half, :]
        if rows % 2:
            matrices[..., :1, :] += matrices[..., 2 * half : rows, :]
        rows = half
    return matrices[..., 0, :].clone()
