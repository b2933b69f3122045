"""The gated feed-forward layer: down(silu(gate(x)) * up(x)), cut over a tensor-parallel group.

It knows its two linear layers and the communicator. It does not know norms or residuals.
"""

from __future__ import annotations

import torch

from parallel.communicator import Communicator
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.rounded_rows import Activations
from trtrun.linear.layer import Linear


class RowParallelLinear:
    """A linear layer whose input features are spread over the group: partial results are summed, then the bias added.

    Args:
        linear: this rank's input features, without bias.
        bias: [out] or None; added once, after the sum.
        communicator: of the tensor-parallel group.
    """

    def __init__(self, linear: Linear, bias: torch.Tensor | None, communicator: Communicator) -> None:
        self._linear = linear
        self._bias = bias
        self._communicator = communicator

    @property
    def takes_rounded_rows(self) -> bool:
        """See Linear."""
        return self._linear.takes_rounded_rows

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, in share] → [tokens, out], equal on all ranks."""
        output = self._linear(x)
        if self._communicator.size > 1:
            output = self._communicator.all_reduce(output)
        return output if self._bias is None else output.add_(self._bias)


class GatedMLP:
    """SwiGLU (arXiv:2002.05202) with gate and up fused into one linear layer.

    Args:
        gate_up: hidden to this rank's gate features, then as many up features.
        down: back to hidden.
    """

    def __init__(self, gate_up: Linear, down: RowParallelLinear) -> None:
        self._gate_up = gate_up
        self._down = down
        self._operations = operations_of(gate_up.device.type)

    @property
    def takes_rounded_rows(self) -> bool:
        """See Linear."""
        return self._gate_up.takes_rounded_rows

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        fused = self._gate_up(x)
        if self._down.takes_rounded_rows:
            return self._down(self._operations.silu_and_multiply_rounded(fused))
        return self._down(self._operations.silu_and_multiply(fused))
