"""What heads compute that keep keys and values of every token, as the engine sees it; heads/eagle_head.py.

It knows tensors. It does not know which heads there are.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.store import KVStore


class FeatureLayers(Protocol):
    """Heads of one rank."""

    hidden_size: int
    dtype: torch.dtype
    num_layers: int
    kv_heads: int
    head_dim: int
    has_overflowed: bool

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; free otherwise."""
        ...

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [n, taps, its hidden] → [n, hidden]."""
        ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Feed tokens [n] at positions [n], with hidden states [n, hidden]; the states [n, hidden] behind them."""
        ...

    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """[n, the target's vocab_size] float32 for states [n, hidden]; None on ranks that do not decide."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks."""
        ...
