"""Plans: what a family makes of a config.json, one for each layer, and what they are made of has to answer.

A plan says its tensors, how they are shared out over ranks, and what a token needs in it. Sizes, checks, dummy weights,
loading and `trtrun plan` ask plans and know no family; a rank builds its layers from them. A plan imports torch only
where it builds, because processes that only start ranks ask it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from parallel.sharding import kv_heads_for_rank, query_heads_for_rank
from trtrun.kvcache.specs import CacheSpec, LayerSpecs, like_layers
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from trtrun.kernels.arguments import Delta
    from trtrun.kvcache.store import LayerCache
    from trtrun.layers.decoder_layer import MLP, Mixer, RMSNorm
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class ModelShape:
    """Sizes that every config.json gives, and from which a family plans its layers.

    Attributes:
        num_heads, num_kv_heads, head_dim: of each layer whose plan has no shape of its own.
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

    @property
    def attention_shapes(self) -> Collection[ModelShape]:
        """Each shape of attention that layers have."""
        return (self,)

    def keeps(self, share: Share) -> Sequence[LayerSpecs]:
        """What a rank keeps of rows for each layer."""
        return like_layers(self.num_layers, len(self.keys.units(share)), self.head_dim)


class Layer(Protocol):
    """One layer on one rank. Between its two halves tokens may be left out whose result nobody wants.

    A forward issues the same operations whatever tensors hold, and never reads one back, so that it becomes a graph.
    """

    def attend(
        self,
        hidden: torch.Tensor,
        delta: Delta | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        """The layer up to its attention, or what it has in its place, writing what it keeps of the tokens.

        Args:
            hidden: [tokens, hidden], the residual stream, to which `delta` is added in place.
            delta: what the layer before left to add to it; None at the first.
            angles: of rotary position embedding.
            cache: what this layer keeps, and the segments.

        Returns:
            [tokens, features], for `feed_forward`: of attention this rank's heads * head_dim.
        """
        ...

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> Delta | None:
        """The rest of the layer, token by token.

        Args:
            hidden: [n, hidden], the residual stream, which is overwritten.
            attended: [n, features], contiguous, of the same tokens.

        Returns:
            What is left to add to the stream, of [n, hidden], so that adding and the next norm can be one operation;
            None where nothing is.
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

    def keeps(self, share: Share) -> LayerSpecs:
        """What a rank keeps of rows for the layer; nothing where it has no memory."""
        ...

    def build(self, reader: WeightReader) -> Layer:
        """The layer on the reader's rank.

        Raises:
            CheckpointError: weights that are not finite.
        """
        ...


@dataclass(frozen=True)
class NormPlan:
    """RMSNorm with the tensor `name`.weight [size].

    Attributes:
        adds_one: whether it multiplies by 1 + weight, in float32.
        in_float32: whether it multiplies by the weight before it rounds, where nothing is added either.
    """

    name: str
    size: int
    eps: float
    adds_one: bool = False
    in_float32: bool = False

    @property
    def weight(self) -> Weight:
        """[size]."""
        dummy_scale = 0.0 if self.adds_one else 1.0
        return Weight((StoredTensor(f"{self.name}.weight", (Axis(self.size),), dummy_scale),))

    def read(self, reader: WeightReader) -> torch.Tensor:
        """[size] on the reader's device, to multiply with: in the model's dtype, or in float32."""
        weight = reader.tensor(self.weight)
        if self.adds_one:
            return weight.float() + 1
        return weight.float() if self.in_float32 else weight

    def build(self, reader: WeightReader) -> RMSNorm:
        from trtrun.layers.decoder_layer import RMSNorm

        return RMSNorm(self.read(reader), self.eps)


class MixerPlan(Protocol):
    """What a layer has of attention, or in its place: where a token meets those before it.

    Attributes:
        name: in front of its tensors.
        shape: of the model, with the heads of this layer.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> ModelShape: ...

    def weights(self) -> Sequence[Weight]:
        """All of it."""
        ...

    def keeps(self, share: Share) -> CacheSpec:
        """What a rank keeps of rows for it."""
        ...

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once on a rank, at most."""
        ...

    def build(self, reader: WeightReader) -> Mixer:
        """It on the reader's rank."""
        ...


class MLPPlan(Protocol):
    """A feed-forward layer."""

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        ...

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once on a rank, at most."""
        ...

    def build(self, reader: WeightReader) -> MLP:
        """The layer on the reader's rank."""
        ...
