"""A gated delta net (arXiv:2412.06464) on one rank, as Qwen3-Next has it in place of attention: a short convolution
over what tokens bring, then for each head a matrix that each token reads, corrects and lets fade.

Tokens go through one after the other (recurrence.py), and sums have one order, so that a token's bits do not depend on
the cut of a prompt, on drafts or on other rows. It knows weights, heads and states. It does not know which layer it is,
or whose rows these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from trtrun.kernels.arguments import Activations, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import RMSNorm, RowParallelLinear
from trtrun.layers.recurrence import go_through
from trtrun.linear.layer import Linear

_LEAST_SQUARES = 1e-6
"""Added to the sum of squares that queries and keys are divided by the root of."""


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of one rank.

    Attributes:
        keys, values: how many there are of each.
        key_dim, value_dim: numbers of a key, which queries have as well, and of a value.
        key_of_value: [values] int64: of each value head the key head that it goes with, among the rank's.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    key_of_value: torch.Tensor

    @property
    def channels(self) -> int:
        """Numbers that go through the convolution: queries, keys, values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


class DeltaNet:
    """The layer.

    Args:
        heads: of the rank.
        states: hidden to queries, keys, values, and gates of values, in this order.
        rates: hidden to a number of each value head that says how much it corrects, then one that says how it fades.
        convolution: [kernel, channels] float32, the newest token's last.
        fading: [values] float32: how fast heads fade.
        fading_bias: [values] float32: added to what says how it fades.
        norm: of what a value head reads, [value_dim].
        output: the value heads back to hidden.
    """

    takes_rounded_rows: Rounding | None = None

    def __init__(
        self,
        heads: DeltaHeads,
        *,
        states: Linear,
        rates: Linear,
        convolution: torch.Tensor,
        fading: torch.Tensor,
        fading_bias: torch.Tensor,
        norm: RMSNorm,
        output: RowParallelLinear,
    ) -> None:
        self.output = output
        self._heads = heads
        self._states, self._rates = states, rates
        self._convolution = convolution
        self._fading, self._fading_bias = fading, fading_bias
        self._norm = norm
        self._operations = operations_of(convolution.device.type)

    def __call__(self, x: Activations, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's value heads * value_dim], for `output`."""
        assert isinstance(x, torch.Tensor), "norms round for none that does not say that it takes such rows"
        heads, made = self._heads, self._states(x)
        channels, gates = made[:, : heads.channels], made[:, heads.channels :]
        correcting, fading = self._rates(x).float().chunk(2, dim=1)
        brought = channels.float(), self._sigmoid(correcting), self._kept(fading)
        read = go_through(_Step(self, x.dtype), brought, cache, heads.values * heads.value_dim)
        normed = self._norm(read.to(x.dtype).view(-1, heads.value_dim)).view(read.shape)
        gated = torch.cat((gates.float(), normed.float()), dim=1)
        return self._operations.activate_and_multiply(gated, "silu").to(x.dtype)

    def _sigmoid(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sigmoids of [tokens, values] float32."""
        return self._operations.activate_and_multiply(torch.cat((numbers, torch.ones_like(numbers)), dim=1), "sigmoid")

    def _kept(self, fading: torch.Tensor) -> torch.Tensor:
        """What of its matrix a head keeps as a token comes, from 0 to 1, [tokens, values] float32:
        exp(-rate * softplus(fading + bias)).

        Both functions are softmaxes beside 0, whose rows have the same bits in any company; in float64, as the
        logarithm of what is close to 1 would lose its digits.
        """
        moved = (fading + self._fading_bias).double()
        softplus = -functional.log_softmax(torch.stack((torch.zeros_like(moved), moved), dim=-1), dim=-1)[..., 0]
        exponent = softplus * -self._fading
        shares = torch.softmax(torch.stack((exponent, torch.zeros_like(exponent)), dim=-1), dim=-1)
        return (shares[..., 0] / shares[..., 1]).float()

    def step(
        self, state: Sequence[torch.Tensor], brought: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """What a token of each row does to its state; see `Step`.

        Args:
            state: what tokens before brought to the convolution, [rows, kernel - 1, channels], and the matrices, [rows,
                values, key_dim, value_dim].
            brought: [rows, channels], how much heads correct, and what they keep, [rows, values] each.
            dtype: of activations, in which the convolution's results are.
        """
        (window, matrix), (channels, corrects, kept) = state, brought
        window = torch.cat((window, channels.unsqueeze(1)), dim=1)
        query, key, value = self._convolve(window, dtype)
        matrix, column = matrix * kept.view(*kept.shape, 1, 1), key.unsqueeze(-1)
        room = matrix * column  # a matrix of a row may be megabytes, whose pages cost more than what is computed
        change = (value - _sum_rows(room)) * corrects.unsqueeze(-1)
        matrix += torch.mul(column, change.unsqueeze(-2), out=room)
        read = _sum_rows(torch.mul(matrix, query.unsqueeze(-1), out=room))
        return (window[:, 1:], matrix), read.flatten(1)

    def _convolve(self, window: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys [rows, values, key_dim] of length 1, the former divided by the root of their size, and
        values [rows, values, value_dim], of window [rows, kernel, channels]."""
        heads = self._heads
        mixed = window[:, 0] * self._convolution[0]
        for place in range(1, window.shape[1]):
            mixed = mixed + window[:, place] * self._convolution[place]
        mixed = mixed.to(dtype)
        mixed = self._operations.activate_and_multiply(torch.cat((mixed, torch.ones_like(mixed)), dim=1)).float()
        keys, rows = heads.keys * heads.key_dim, len(mixed)
        query, key, value = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        query, key = (self._of_length_one(part.reshape(-1, heads.key_dim)) for part in (query, key))
        query, key = (part.view(rows, heads.keys, -1).index_select(1, heads.key_of_value) for part in (query, key))
        return query / heads.key_dim**0.5, key, value.reshape(rows, heads.values, heads.value_dim)

    def _of_length_one(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors / (self._operations.square_sums(vectors) + _LEAST_SQUARES).sqrt().unsqueeze(1)


@dataclass(frozen=True)
class _Step:
    """`DeltaNet.step` for activations of a dtype."""

    net: DeltaNet
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
