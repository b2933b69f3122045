"""A gated delta net (arXiv:2412.06464) on one rank, as Qwen3-Next has it in place of attention.

It knows its linear layers, between which kernels carry rows' states on. It does not know which layer it is, or whose
rows these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtrun.kernels.arguments import Activations, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.delta_net import DeltaNetWeights
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import RowParallelLinear


class DeltaNet:
    """The layer.

    Args:
        weights: of the rank's heads.
        inputs: hidden to queries, keys, values, and gates of values, in this order; then to a number of each value head
            that says how much it corrects, and one that says how it fades. One product of all of them, or a second one
            of the numbers.
        output: the value heads back to hidden.
    """

    takes_rounded_rows: Rounding | None = None

    def __init__(
        self,
        weights: DeltaNetWeights,
        inputs: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        output: RowParallelLinear,
    ) -> None:
        self.output = output
        self._inputs, self._num_rates = inputs, 2 * weights.values
        self._carry_on = operations_of(weights.convolution.device.type).delta_net(weights)

    def __call__(self, x: Activations, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's value heads * value_dim], for `output`."""
        assert isinstance(x, torch.Tensor), "norms round for none that does not say that it takes such rows"
        assert cache.states is not None and cache.segment_states is not None, "the layer keeps a state"
        made = [product(x) for product in self._inputs]
        states, rates = made if len(made) > 1 else made[0].tensor_split([-self._num_rates], dim=1)
        return self._carry_on(states, rates, cache.states, cache.segment_states)
