"""What heads of decoder layers have in common on one rank of a target: sizes, rotation, embedding and logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.specs import LayerSpecs
from trtrun.layers.embedding import KnownLogits
from trtrun.layers.rotary import RotaryEmbedding


@dataclass(frozen=True)
class HeadParts:
    """Parts that every head of decoder layers is made of.

    Attributes:
        dtype: of the target's activations, and of the head's.
        device: of its weights and activations.
        hidden_size: of its states.
        keeps: what this rank keeps of rows for each layer.
        rotary: of all layers.
        embedding: tokens [n] to [n, hidden], its own or the target's.
        logits: of [n, hidden] of the end.
    """

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    keeps: Sequence[LayerSpecs]
    rotary: RotaryEmbedding
    embedding: Callable[[torch.Tensor], torch.Tensor]
    logits: KnownLogits


class DecoderHead:
    """Base of heads of decoder layers.

    Attributes:
        hidden_size: of its states.
        dtype, device: of its activations.
        keeps: what this rank keeps of rows for each layer.
        has_overflowed: on the CPU, whether any state so far may not have been finite.
        share: see KnownLogits.
    """

    def __init__(self, parts: HeadParts) -> None:
        self.dtype = parts.dtype
        self.device = parts.device
        self.hidden_size = parts.hidden_size
        self.keeps = parts.keeps
        self.has_overflowed = False
        self.share = parts.logits.share
        self._rotary = parts.rotary
        self._embedding = parts.embedding
        self._logits = parts.logits

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; free otherwise."""
        self._rotary.reserve(positions)

    def _angles(self, positions: torch.Tensor, attention: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self._rotary.reserve(attention.block_size * max(item.block_tables.shape[1] for item in attention.segments))
        return self._rotary.lookup(positions)

    def _note(self, states: torch.Tensor) -> None:
        """Remember on the CPU whether states are not finite; elsewhere that would be read back."""
        if self.device.type == "cpu" and not self.has_overflowed:
            self.has_overflowed = not bool(states.sum().isfinite())
