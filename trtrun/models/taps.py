"""Taps: copies of the residual stream at some boundaries of a forward, for drafters that read hidden states.

Boundary 0 is the embedding, i what enters layer i, `num_layers` what leaves the last layer, and `num_layers + 1` the
normed end that logits are made of. transformers' `output_hidden_states` is boundaries 0 to `num_layers - 1`, and last
the normed end. It knows tensors. It does not know layers or who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtrun.errors import ConfigError


@dataclass(frozen=True)
class Taps:
    """What one forward keeps, and where.

    Attributes:
        boundaries: that are kept, in the order in which they are handed out.
        kept: [tokens, boundaries, hidden] in the model's dtype on its device, which the forward fills.
    """

    boundaries: tuple[int, ...]
    kept: torch.Tensor

    def keep(self, boundary: int, hidden: torch.Tensor) -> None:
        """Copy hidden [tokens, hidden], the stream at a boundary, where that is asked for."""
        if boundary in self.boundaries:
            self.kept[:, self.boundaries.index(boundary)].copy_(hidden)

    def read_from(self, boundary: int) -> bool:
        """Whether any boundary from this one on is kept."""
        return max(self.boundaries) >= boundary


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The boundaries of a model that are to be kept.

    Raises:
        ConfigError: one is not among the model's, or stands there twice.
    """
    for boundary in boundaries:
        if not 0 <= boundary <= num_layers + 1:
            raise ConfigError(
                f"the drafter reads hidden states at boundary {boundary}, but a target of {num_layers} layers has "
                f"0 to {num_layers + 1}"
            )
    if len(set(boundaries)) < len(boundaries):
        raise ConfigError(f"the drafter reads hidden states at a boundary twice: {list(boundaries)}")
    return tuple(boundaries)
