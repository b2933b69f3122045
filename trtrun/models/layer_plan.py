"""What a family makes of a config.json: the plan of each layer. Sizes, checks, made-up weights, loading and `trtrun
plan` ask plans and know no family; a rank builds its layers from them.

A plan imports torch only where it builds, as processes that only start ranks ask it, too. This module knows what is
asked of plans and layers. It does not know any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from parallel.sharding import kv_heads_for_rank, query_heads_for_rank
from trtrun.weights.weight import Axis, Share, Weight

if TYPE_CHECKING:
    import torch

    from trtrun.kvcache.segments import AttentionBatch
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class ModelShape:
    """Sizes that every config.json gives, and from which a family plans its layers.

    Attributes:
        num_heads, num_kv_heads, head_dim: of each layer; the KV store has one shape.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @property
    def queries(self) -> Axis:
        """Features of all query heads."""
        return Axis(self.num_heads, query_heads_for_rank, self.head_dim)

    @property
    def keys(self) -> Axis:
        """Features of all heads of keys, or of values. Neighbouring ranks hold the same where there are few heads."""
        return Axis(self.num_kv_heads, kv_heads_for_rank, self.head_dim)


class Layer(Protocol):
    """One layer on one rank. Between its two halves tokens may be left out whose result nobody wants.

    A forward issues the same operations whatever tensors hold, and never reads one back, so that it becomes a graph.
    """

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        store_layer: torch.Tensor,
    ) -> torch.Tensor:
        """The layer up to its attention, writing the tokens' keys and values.

        Args:
            hidden: [tokens, hidden], the residual stream, to which `delta` is added in place.
            delta: what the layer before left to add to it; None at the first.
            angles: of rotary position embedding.
            batch: the segments.
            store_layer: keys and values of this layer.

        Returns:
            [tokens, this rank's heads * head_dim], for `feed_forward`.
        """
        ...

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, token by token.

        Args:
            hidden: [n, hidden], the residual stream, which is overwritten.
            attended: [n, this rank's heads * head_dim], contiguous, of the same tokens.

        Returns:
            [n, hidden]: what is left to add to the stream, so that adding and the next norm can be one operation.
        """
        ...


class LayerPlan(Protocol):
    """What one layer consists of."""

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        ...

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Upper bound of what a rank holds of a token in the layer at once, in activations of `item_bytes` each."""
        ...

    def build(self, reader: WeightReader) -> Layer:
        """The layer on the reader's rank.

        Raises:
            CheckpointError: weights that are not finite.
        """
        ...
