"""Inputs that each layer has of a token beside the residual stream, and layers that take them in: they end by mixing
their own in and by a factor.

As Gemma 4 has them: an embedding of the token for each layer, and a projection of the token as it is embedded for the
first one. It knows tokens and tensors. It does not know what a layer consists of otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.kernels.arguments import Delta
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import DecoderLayer, Mixer, RMSNorm, add_to
from trtrun.layers.embedding import VocabularyEmbedding
from trtrun.linear.layer import Linear

_HALF = 2.0**-0.5
"""Factor of the sum of two parts that are alike in size."""


class LayerInputs:
    """Inputs of all layers, for the tokens of one forward.

    Args:
        embedding: of tokens for all layers, one behind the other.
        projection: of what goes into the first layer, likewise.
        norm: of what the projection makes for a layer.
        factor: of what it makes, before.
    """

    def __init__(self, embedding: VocabularyEmbedding, projection: Linear, norm: RMSNorm, factor: float) -> None:
        self._embedding, self._projection, self._norm = embedding, projection, norm
        self._factor = factor
        self._inputs: torch.Tensor | None = None

    def begin(self, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """A forward begins: tokens [tokens] int64, and hidden [tokens, hidden], which goes into the first layer.
        Collective over the group."""
        projected = self._projection(hidden).mul_(self._factor)
        size = self._norm.weight.shape[0]
        normed = self._norm(projected.view(-1, size)).view(projected.shape)
        self._inputs = normed.add_(self._embedding(tokens)).mul_(_HALF).view(len(tokens), -1, size)

    def keep(self, wanted: torch.Tensor) -> None:
        """Only some of the tokens, [n] int64, go on."""
        assert self._inputs is not None, "a forward has begun"
        self._inputs = self._inputs.index_select(0, wanted)

    def end(self) -> None:
        """Let go of what the forward had."""
        self._inputs = None

    def of_layer(self, index: int) -> torch.Tensor:
        """[n, size] of the tokens that go on."""
        assert self._inputs is not None, "a forward has begun"
        return self._inputs[:, index]


@dataclass
class InputMixer:
    """What a layer makes of its inputs: they are multiplied with gates from the residual stream, and projected back.

    Attributes:
        inputs: of all layers.
        index: of this one.
        gate: hidden to gates, which go through GELU.
        projection: back to hidden.
        norm: of that.
    """

    inputs: LayerInputs
    index: int
    gate: Linear
    projection: Linear
    norm: RMSNorm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] → what is added to it, of the same shape."""
        both = torch.cat((self.gate(hidden), self.inputs.of_layer(self.index)), dim=1)
        gated = operations_of(both.device.type).activate_and_multiply(both, "gelu_tanh")
        return self.norm(self.projection(gated))


@dataclass
class ScaledLayer:
    """A layer behind which the residual stream is multiplied by a factor, with inputs of the layer mixed in before.

    Attributes:
        layer: what it is otherwise.
        factor: of the stream.
        mixer: of its inputs; None where it has none.
    """

    layer: DecoderLayer
    factor: float
    mixer: InputMixer | None

    @property
    def attention(self) -> Mixer:
        """What it has of attention."""
        return self.layer.attention

    def attend(
        self,
        hidden: torch.Tensor,
        delta: Delta | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        return self.layer.attend(hidden, delta, angles, cache)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> Delta | None:
        delta = self.layer.feed_forward(hidden, attended)
        if self.mixer is None and self.factor == 1.0:
            return delta
        add_to(hidden, delta)
        if self.mixer is not None:
            hidden.add_(self.mixer(hidden))
        hidden.mul_(self.factor)
        return None
