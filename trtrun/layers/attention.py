"""Self-attention of a rank's heads: the projections around a backend that stores keys and values and attends.

It knows its linear layers, heads and window. It does not know norms in front of it, or residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.attention.backend import AttentionBackend, attend
from trtrun.kernels.rounded_rows import Activations
from trtrun.kvcache.segments import AttentionBatch
from trtrun.layers.mlp import RowParallelLinear
from trtrun.layers.norm import RMSNorm
from trtrun.linear.layer import Linear


@dataclass
class Attention:
    """Attention over the paged store.

    Attributes:
        qkv: hidden to this rank's query heads, key heads, value heads, in this order.
        head_norm: norm of queries and keys per head (weight [heads + kv_heads, head_dim]), where the model has one.
        output: this rank's heads back to hidden, for whoever is handed what was attended.
        rotated_heads: this rank's query and key heads.
        window: sliding window, None for the whole context.
    """

    qkv: Linear
    head_norm: RMSNorm | None
    output: RowParallelLinear
    backend: AttentionBackend
    rotated_heads: int
    head_dim: int
    window: int | None

    @property
    def takes_rounded_rows(self) -> bool:
        """See Linear."""
        return self.qkv.takes_rounded_rows

    def __call__(
        self,
        x: Activations,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        store_layer: torch.Tensor,
    ) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's heads * head_dim], for `output`; see
        AttentionBackend."""
        fused = self.qkv(x)
        fused = fused.view(fused.shape[0], -1, self.head_dim)
        query_key, value = fused[:, : self.rotated_heads], fused[:, self.rotated_heads :]
        if self.head_norm is not None:
            query_key = self.head_norm(query_key)
        scale, window = self.head_dim**-0.5, self.window
        return attend(self.backend, query_key, value, angles, store_layer, batch, scale, window).flatten(1)
