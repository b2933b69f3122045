"""A feed-forward layer beside experts: each between norms of its own, and their results are added.

It knows norms and layers. It does not know which layer it is, or how experts are held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trtrun.kernels.arguments import Activations, Rounding
from trtrun.layers.decoder_layer import MLP, RMSNorm
from trtrun.layers.experts import ExpertsMLP


@dataclass
class ExpertsBesideMLP:
    """norm(mlp(norm(x))) + norm(experts(norm(x))), with all norms of their own; and one of what the router reads.

    Attributes:
        mlp: of all tokens.
        experts: of which each token chooses some.
        router_norm: of what the router reads.
        input_norm, output_norm: around `mlp`.
        experts_input_norm, experts_output_norm: around `experts`.
    """

    mlp: MLP
    experts: ExpertsMLP
    router_norm: RMSNorm
    input_norm: RMSNorm
    output_norm: RMSNorm
    experts_input_norm: RMSNorm
    experts_output_norm: RMSNorm

    takes_rounded_rows: ClassVar[Rounding | None] = None

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden], the residual stream → [tokens, hidden], equal on all ranks."""
        assert isinstance(x, torch.Tensor), "what rounds asks before"
        of_all = self.output_norm(self.mlp(self.input_norm(x)))
        chosen = self.experts(self.experts_input_norm(x), self.router_norm(x))
        return of_all.add_(self.experts_output_norm(chosen))
