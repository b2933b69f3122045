"""A feed-forward layer without a gate, whose activation has numbers of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from trtrun.kernels.arguments import Activations, Delta, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.layers.decoder_layer import MLP, RowParallelLinear
from trtrun.linear.layer import Linear


@dataclass
class XieluMLP(MLP):
    """down(xielu(up(x))).

    Attributes:
        up: hidden to this rank's features.
        down: back to hidden.
        numbers: of xIELU, as `TorchOperations.xielu` takes them.
    """

    up: Linear
    down: RowParallelLinear
    numbers: torch.Tensor

    @property
    def takes_rounded_rows(self) -> Rounding | None:
        return self.up.takes_rounded_rows

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down(self._activated(x))

    @override
    def leave(self, x: Activations) -> Delta:
        return self.down.leave(self._activated(x))

    def _activated(self, x: Activations) -> torch.Tensor:
        return operations_of(self.numbers.device.type).xielu(self.up(x), self.numbers)
