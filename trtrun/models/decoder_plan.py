"""The plan of a decoder layer like Llama's, of its feed-forward part, and what families since have beside.

It names tensors and sizes, and imports torch only where it builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from parallel.sharding import column_range
from trtrun.errors import CheckpointError
from trtrun.kvcache.specs import LayerSpecs
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.layer_plan import LayerPlan, MixerPlan, MLPPlan, ModelShape, NormPlan
from trtrun.weights.weight import Axis, LinearPlan, Share, Weight

if TYPE_CHECKING:
    from trtrun.kernels.arguments import Activation
    from trtrun.layers.decoder_layer import DecoderLayer, GatedMLP, RMSNorm
    from trtrun.weights.weight_reader import WeightReader

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class GatedMLPPlan:
    """The feed-forward layer down(activation(gate(x)) * up(x)): gate_proj and up_proj, computed as one, and down_proj.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.mlp".
        shape: of the model.
        has_bias: whether all three have biases.
        activation: what gates go through.
        fused_gate_up: whether gate_proj and up_proj lie in one tensor, gate_up_proj.
    """

    name: str
    shape: ModelShape
    has_bias: bool = False
    activation: Activation = "silu"
    fused_gate_up: bool = False

    @property
    def features(self) -> Axis:
        """Features of the gate; there are as many of what is gated."""
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def gate_up(self) -> LinearPlan:
        """Hidden to gate features, then as many up features."""
        outputs = {"gate_proj": self.features, "up_proj": self.features}
        fused = "gate_up_proj" if self.fused_gate_up else None
        return LinearPlan(self.name, outputs, Axis(self.shape.hidden_size), self.has_bias, fused=fused)

    @property
    def down(self) -> LinearPlan:
        """Features back to hidden."""
        return LinearPlan(self.name, {"down_proj": Axis(self.shape.hidden_size)}, self.features, self.has_bias)

    def weights(self) -> Sequence[Weight]:
        return (*self.gate_up.weights, *self.down.weights)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: both kinds of features, and both in float32's place."""
        return 4 * len(self.features.held(share))

    def build(self, reader: WeightReader) -> GatedMLP:
        from trtrun.layers.decoder_layer import GatedMLP

        gate_up = reader.linear(self.gate_up.weight, self.gate_up.bias)
        return GatedMLP(gate_up, reader.row_parallel(self.down.weight, self.down.bias), self.activation)


class OrdinaryBlocks(NamedTuple):
    """What a layer like Llama's consists of."""

    input_norm: NormPlan
    attention: AttentionPlan
    post_attention_norm: NormPlan
    mlp: GatedMLPPlan


@dataclass(frozen=True)
class DecoderPlan(LayerPlan):
    """The layer of Llama and of most families since: attention and feed-forward, between norms, each added to the
    residual stream.

    Attributes:
        attention: or what the layer has in its place.
        input_norm, post_attention_norm: in front of attention and of the feed-forward layer; None where there is none.
        attention_output_norm, mlp_output_norm: of what the two add to the residual stream; None where there is none.
        residual_factor: of what they add.
    """

    input_norm: NormPlan | None
    attention: MixerPlan
    post_attention_norm: NormPlan | None
    mlp: MLPPlan
    attention_output_norm: NormPlan | None = None
    mlp_output_norm: NormPlan | None = None
    residual_factor: float = 1.0

    @classmethod
    def of_layer(cls, index: int, attention: MixerPlan, mlp: MLPPlan, residual_factor: float = 1.0) -> DecoderPlan:
        """The layer `index` with Llama's norms, under their usual names, in front of both halves."""
        shape = attention.shape
        names = (f"model.layers.{index}.{name}" for name in ("input_layernorm", "post_attention_layernorm"))
        input_norm, behind = (NormPlan(name, shape.hidden_size, shape.rms_norm_eps) for name in names)
        return cls(input_norm, attention, behind, mlp, residual_factor=residual_factor)

    @property
    def ordinary(self) -> OrdinaryBlocks:
        """The blocks, for who knows layers like Llama's alone.

        Raises:
            CheckpointError: the layer is of another kind.
        """
        norms = self.input_norm, self.post_attention_norm
        others = self.attention_output_norm, self.mlp_output_norm
        if None in norms or others != (None, None) or self.residual_factor != 1.0:
            raise CheckpointError(f"{self.attention.name} stands in a layer whose norms are not those of Llama")
        if not isinstance(self.attention, AttentionPlan):
            raise CheckpointError(f"{self.attention.name} is a {type(self.attention).__name__}, which is not known")
        if not isinstance(self.mlp, GatedMLPPlan):
            raise CheckpointError(
                f"behind {self.attention.name} stands a {type(self.mlp).__name__}, which is not known"
            )
        if self.attention.fused_qkv or self.mlp.fused_gate_up or self.attention.is_reordered:
            raise CheckpointError(f"{self.attention.name} lies in its files in another way than Llama's")
        assert norms[0] is not None and norms[1] is not None
        usual = replace(
            self.attention, rope=None, scale=None, soft_cap=None, norms_add_one=False, has_sinks=False, has_gates=False
        )
        adds_one = any(norm.adds_one for norm in self.norms if norm is not None)
        if self.attention != usual or self.mlp.activation != "silu" or adds_one:
            raise CheckpointError(f"{self.attention.name} stands in a layer that computes in another way than Llama's")
        return OrdinaryBlocks(norms[0], self.attention, norms[1], self.mlp)

    @property
    def norms(self) -> tuple[NormPlan | None, ...]:
        """In the order in which a token meets them."""
        return self.input_norm, self.attention_output_norm, self.post_attention_norm, self.mlp_output_norm

    @override
    def weights(self) -> Sequence[Weight]:
        norms = (norm.weight for norm in self.norms if norm is not None)
        return (*norms, *self.attention.weights(), *self.mlp.weights())

    @override
    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Bytes of all results of the layer, which are still there at its end, and of norms in float32 beside."""
        shape = self.attention.shape
        hidden = shape.hidden_size
        num_outputs = sum(norm is not None for norm in (self.attention_output_norm, self.mlp_output_norm))
        held = (6 + num_outputs) * hidden + self.attention.token_numbers(share) + self.mlp.token_numbers(share)
        rotated = len(shape.queries.held(share)) + len(shape.keys.held(share))
        return held * item_bytes + 3 * max(hidden, rotated) * _FLOAT_BYTES

    @override
    def keeps(self, share: Share) -> LayerSpecs:
        return (self.attention.keeps(share),)

    @override
    def build(self, reader: WeightReader) -> DecoderLayer:
        from trtrun.layers.decoder_layer import DecoderLayer

        def build(norm: NormPlan | None) -> RMSNorm | None:
            return None if norm is None else norm.build(reader)

        return DecoderLayer(
            build(self.input_norm),
            self.attention.build(reader),
            build(self.post_attention_norm),
            self.mlp.build(reader),
            build(self.attention_output_norm),
            build(self.mlp_output_norm),
            self.residual_factor,
        )
