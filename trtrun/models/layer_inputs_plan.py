"""Plans of what Gemma 4's layers have beside those of others: inputs of their own, and a factor at the end.

They name tensors and sizes, and import torch only where they build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.weight import Axis, LinearPlan, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.layer_inputs import InputMixer, LayerInputs, ScaledLayer
    from trtrun.weights.weight_reader import WeightReader

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class LayerInputsPlan:
    """Inputs of all layers: `name`.embed_tokens_per_layer, cut along the vocabulary, and per_layer_model_projection
    with its norm, whole on each rank.

    Attributes:
        name: in front of the tensors.
        shape: of the model.
        num_tokens: entries of the vocabulary.
        size: of a layer's input.
    """

    name: str
    shape: ModelShape
    num_tokens: int
    size: int

    @property
    def embedding(self) -> Weight:
        """[vocabulary share, layers * size]."""
        entries = Axis(self.num_tokens, loaded_vocabulary_range, padded=vocabulary_range)
        return Weight((StoredTensor(f"{self.name}.embed_tokens_per_layer.weight", (entries, self._all)),))

    @property
    def projection(self) -> Weight:
        """[layers * size, hidden]."""
        return LinearPlan(self.name, {"per_layer_model_projection": self._all}, Axis(self.shape.hidden_size)).weight

    @property
    def norm(self) -> NormPlan:
        """The norm of a layer's part of the projection."""
        return NormPlan(f"{self.name}.per_layer_projection_norm", self.size, self.shape.rms_norm_eps, in_float32=True)

    @property
    def _all(self) -> Axis:
        return Axis(self.shape.num_layers * self.size)

    def weights(self) -> Sequence[Weight]:
        """All that it has."""
        return self.embedding, self.projection, self.norm.weight

    def token_bytes(self, item_bytes: int) -> int:
        """Upper bound of what a rank holds of a token: both parts, and a norm in float32."""
        return self.shape.num_layers * self.size * (3 * item_bytes + 2 * _FLOAT_BYTES)

    def build(self, reader: WeightReader) -> LayerInputs:
        """What computes it on the reader's rank."""
        from trtrun.layers.embedding import VocabularyEmbedding
        from trtrun.layers.layer_inputs import LayerInputs

        first = vocabulary_range(self.num_tokens, *reader.share).start
        return LayerInputs(
            VocabularyEmbedding(reader.tensor(self.embedding), first, reader.communicator, self.size**0.5),
            reader.linear(self.projection, is_adapted=False),
            self.norm.build(reader),
            self.shape.hidden_size**-0.5,
        )


@dataclass(frozen=True)
class InputMixerPlan:
    """How a layer takes its inputs in: per_layer_input_gate, per_layer_projection and a norm, whole on each rank.

    Attributes:
        index: of the layer.
        shape: of the model.
        size: of its input.
    """

    index: int
    shape: ModelShape
    size: int

    @property
    def gate(self) -> LinearPlan:
        """Hidden to gates."""
        return self._linear("per_layer_input_gate", self.size, self.shape.hidden_size)

    @property
    def projection(self) -> LinearPlan:
        """Inputs back to hidden."""
        return self._linear("per_layer_projection", self.shape.hidden_size, self.size)

    @property
    def norm(self) -> NormPlan:
        """The norm of what is added."""
        name = f"model.layers.{self.index}.post_per_layer_input_norm"
        return NormPlan(name, self.shape.hidden_size, self.shape.rms_norm_eps, in_float32=True)

    def _linear(self, name: str, outputs: int, inputs: int) -> LinearPlan:
        return LinearPlan(f"model.layers.{self.index}", {name: Axis(outputs)}, Axis(inputs))

    def weights(self) -> Sequence[Weight]:
        """All that it has."""
        return self.gate.weight, self.projection.weight, self.norm.weight

    def token_bytes(self, item_bytes: int) -> int:
        """Upper bound of what a rank holds of a token: gates, as they are made, beside inputs, and multiplied; what is
        added, normalised, and in float32."""
        return 4 * self.size * item_bytes + 2 * self.shape.hidden_size * (item_bytes + _FLOAT_BYTES)

    def build(self, reader: WeightReader) -> InputMixer:
        """What computes it on the reader's rank."""
        from trtrun.layers.layer_inputs import InputMixer

        assert reader.layer_inputs is not None, "the model has inputs of layers"
        gate, projection = reader.linear(self.gate.weight), reader.linear(self.projection.weight)
        return InputMixer(reader.layer_inputs, self.index, gate, projection, self.norm.build(reader))


@dataclass(frozen=True)
class ScaledLayerPlan(DecoderPlan):
    """A decoder layer with a factor at its end, layer_scalar, and inputs of its own.

    Attributes:
        index: of the layer.
        mixer: of its inputs; None where it has none.
    """

    index: int = 0
    mixer: InputMixerPlan | None = None

    @property
    def factor(self) -> Weight:
        """[1]."""
        return Weight((StoredTensor(f"model.layers.{self.index}.layer_scalar", (Axis(1),)),))

    @override
    def weights(self) -> Sequence[Weight]:
        return (*super().weights(), self.factor, *(() if self.mixer is None else self.mixer.weights()))

    @override
    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return super().token_bytes(share, item_bytes) + (
            0 if self.mixer is None else self.mixer.token_bytes(item_bytes)
        )

    @override
    def build(self, reader: WeightReader) -> ScaledLayer:  # type: ignore[override]
        from trtrun.layers.layer_inputs import ScaledLayer

        layer, factor = super().build(reader), float(reader.tensor(self.factor))
        return ScaledLayer(layer, factor, None if self.mixer is None else self.mixer.build(reader))
