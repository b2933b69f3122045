"""A gated delta net (arXiv:2412.06464) on one rank, as Qwen3-Next has it in place of attention.

It knows its linear layers, between which kernels carry rows' states on. It does not know which layer it is, or whose
rows these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtrun.kernels.arguments import Activations, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.delta_net import DeltaNetWeights
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import RowParallelLinear
from trtrun.linear.layer import Linear

Brought = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [tokens, hidden] → what tokens bring to states, and rates; rows may have gaps between them."""


class DeltaNet:
    """The layer.

    Args:
        weights: of the rank's heads.
        brought: hidden to queries, keys, values, and gates of values, in this order; and a number of each value head
            that says how much it corrects, then one that says how it fades.
        output: the value heads back to hidden.
    """

    takes_rounded_rows: Rounding | None = None

    def __init__(self, weights: DeltaNetWeights, brought: Brought, output: RowParallelLinear) -> None:
        self.output = output
        self._brought = brought
        self._carry_on = operations_of(weights.convolution.device.type).delta_net(weights)

    def __call__(self, x: Activations, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's value heads * value_dim], for `output`."""
        assert isinstance(x, torch.Tensor), "norms round for none that does not say that it takes such rows"
        assert cache.states is not None and cache.segment_states is not None, "the layer keeps a state"
        return self._carry_on(*self._brought(x), cache.states, cache.segment_states)


@dataclass(frozen=True)
class Together:
    """What tokens bring, by one product.

    Attributes:
        product: hidden to all of it.
        rates: how many of its numbers, the last ones, are rates.
    """

    product: Callable[[torch.Tensor], torch.Tensor]
    rates: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.product(x)
        return made[:, : -self.rates], made[:, -self.rates :]


@dataclass(frozen=True)
class Apart:
    """What tokens bring, by two layers."""

    states: Linear
    rates: Linear

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states(x), self.rates(x)
