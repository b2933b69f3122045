"""A layer of most decoders: attention and feed-forward, each behind a norm and added to the residual stream.

It knows the order of its blocks. It does not know what they hold, or which layer it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.kernels.rounded_rows import Activations
from trtrun.kvcache.segments import AttentionBatch
from trtrun.layers.attention import Attention
from trtrun.layers.mlp import GatedMLP
from trtrun.layers.norm import RMSNorm


@dataclass
class DecoderLayer:
    """See the module; `attend` and `feed_forward` are its halves, between which tokens may be left out."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        store_layer: torch.Tensor,
    ) -> torch.Tensor:
        """See Layer."""
        normed = _normalise(self.input_norm, hidden, delta, self.attention.takes_rounded_rows)
        return self.attention(normed, angles, batch, store_layer)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """See Layer."""
        delta = self.attention.output(attended)
        return self.mlp(_normalise(self.post_attention_norm, hidden, delta, self.mlp.takes_rounded_rows))


def _normalise(norm: RMSNorm, hidden: torch.Tensor, delta: torch.Tensor | None, rounds: bool) -> Activations:
    """hidden += delta, in place, where there is one, and the norm of it, rounded where the layer behind takes that."""
    if rounds:
        return norm.rounded(hidden, delta)
    return norm(hidden) if delta is None else norm.add(hidden, delta)
