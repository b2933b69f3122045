"""Blocks that families plan their layers from: norms, attention, a gated feed-forward layer, and a layer of them.

A block says its tensors, how they are shared out, and what a token needs in it; `build` makes what computes it
(trtrun.layers). It does not know which family has it, or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.sharding import column_range
from trtrun.models.layer_plan import ModelShape
from trtrun.weights.weight import Axis, LinearPlan, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.decoder_layer import Attention, DecoderLayer, GatedMLP, RMSNorm
    from trtrun.weights.weight_reader import WeightReader

_FLOAT = 4


@dataclass(frozen=True)
class NormPlan:
    """RMSNorm with the tensor `name`.weight [size]."""

    name: str
    size: int
    eps: float

    @property
    def weight(self) -> Weight:
        """[size]."""
        return Weight((StoredTensor(f"{self.name}.weight", (Axis(self.size),)),))

    def build(self, reader: WeightReader) -> RMSNorm:
        """See LayerPlan."""
        from trtrun.layers.decoder_layer import RMSNorm

        return RMSNorm(reader.tensor(self.weight), self.eps)


@dataclass(frozen=True)
class AttentionPlan:
    """Self-attention with rotated queries and keys: q_proj, k_proj and v_proj, computed as one, and o_proj.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.self_attn".
        shape: of the model.
        window: how many tokens back a query sees, itself included; None sees all.
        qkv_bias, output_bias: whether the projections have biases.
        head_norm: whether queries and keys are RMS-normalised per head before the rotation (q_norm, k_norm).
        input_size: features that go in; None for the model's hidden size.
    """

    name: str
    shape: ModelShape
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    input_size: int | None = None

    @property
    def qkv(self) -> LinearPlan:
        """Hidden to queries, keys and values, in this order. Made-up ones tell tokens apart."""
        inputs = Axis(self.input_size or self.shape.hidden_size)
        outputs = {"q_proj": self.shape.queries, "k_proj": self.shape.keys, "v_proj": self.shape.keys}
        made_up = {"q_proj": 2.0, "k_proj": 2.0}
        return LinearPlan(self.name, outputs, inputs, self.qkv_bias, made_up)

    @property
    def output(self) -> LinearPlan:
        """Heads back to hidden."""
        return LinearPlan(self.name, {"o_proj": Axis(self.shape.hidden_size)}, self.shape.queries, self.output_bias)

    @property
    def head_norms(self) -> tuple[NormPlan, ...]:
        """Of queries and of keys, where the model has them."""
        names = ("q_norm", "k_norm") if self.head_norm else ()
        return tuple(NormPlan(f"{self.name}.{name}", self.shape.head_dim, self.shape.rms_norm_eps) for name in names)

    def weights(self) -> Sequence[Weight]:
        """See LayerPlan."""
        return (*self.qkv.weights, *self.output.weights, *(norm.weight for norm in self.head_norms))

    def token_numbers(self, share: Share) -> int:
        """Of activations that a token has at once: queries, keys and values, as they are made, normalised, and rotated;
        and what is attended, in its place and gathered."""
        queries, keys = len(self.shape.queries.held(share)), len(self.shape.keys.held(share))
        return (queries + 2 * keys) + 2 * (queries + keys) + 2 * queries

    def build(self, reader: WeightReader) -> Attention:
        """See LayerPlan."""
        import torch

        from trtrun.layers.decoder_layer import Attention, RMSNorm

        heads, kv_heads = len(self.shape.queries.units(reader.share)), len(self.shape.keys.units(reader.share))
        head_norm = None
        if self.head_norm:
            query_norm, key_norm = (reader.tensor(norm.weight) for norm in self.head_norms)
            per_head = torch.cat((query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1)))
            head_norm = RMSNorm(per_head, self.shape.rms_norm_eps)
        return Attention(
            qkv=reader.linear(self.qkv.weight, self.qkv.bias),
            head_norm=head_norm,
            output=reader.row_parallel(self.output.weight, self.output.bias),
            backend=reader.attention(self.shape.head_dim),
            rotated_heads=heads + kv_heads,
            head_dim=self.shape.head_dim,
            window=self.window,
            kv_scales=reader.kv_scales(self.name, self.shape.keys),
        )


@dataclass(frozen=True)
class GatedMLPPlan:
    """The feed-forward layer down(silu(gate(x)) * up(x)): gate_proj and up_proj, computed as one, and down_proj.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.mlp".
        shape: of the model.
        has_bias: whether all three have biases.
    """

    name: str
    shape: ModelShape
    has_bias: bool = False

    @property
    def features(self) -> Axis:
        """Of the gate, and as many of what is gated."""
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def gate_up(self) -> LinearPlan:
        """Hidden to gate features, then as many up features."""
        outputs = {"gate_proj": self.features, "up_proj": self.features}
        return LinearPlan(self.name, outputs, Axis(self.shape.hidden_size), self.has_bias)

    @property
    def down(self) -> LinearPlan:
        """Features back to hidden."""
        return LinearPlan(self.name, {"down_proj": Axis(self.shape.hidden_size)}, self.features, self.has_bias)

    def weights(self) -> Sequence[Weight]:
        """See LayerPlan."""
        return (*self.gate_up.weights, *self.down.weights)

    def token_numbers(self, share: Share) -> int:
        """Of activations that a token has at once: both kinds of features, and both in float32's place."""
        return 4 * len(self.features.held(share))

    def build(self, reader: WeightReader) -> GatedMLP:
        """See LayerPlan."""
        from trtrun.layers.decoder_layer import GatedMLP

        gate_up = reader.linear(self.gate_up.weight, self.gate_up.bias)
        return GatedMLP(gate_up, reader.row_parallel(self.down.weight, self.down.bias))


@dataclass(frozen=True)
class DecoderPlan:
    """The layer of Llama and of most families since: attention and feed-forward, each behind a norm and added to the
    residual stream."""

    input_norm: NormPlan
    attention: AttentionPlan
    post_attention_norm: NormPlan
    mlp: GatedMLPPlan

    def weights(self) -> Sequence[Weight]:
        """See LayerPlan."""
        norms = (self.input_norm.weight, self.post_attention_norm.weight)
        return (*norms, *self.attention.weights(), *self.mlp.weights())

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """See LayerPlan: all of its results are still there at the end; norms work in float32 beside."""
        hidden, shape = self.input_norm.size, self.attention.shape
        held = 6 * hidden + self.attention.token_numbers(share) + self.mlp.token_numbers(share)
        rotated = len(shape.queries.held(share)) + len(shape.keys.held(share))
        return held * item_bytes + 3 * max(hidden, rotated) * _FLOAT

    def build(self, reader: WeightReader) -> DecoderLayer:
        """See LayerPlan."""
        from trtrun.layers.decoder_layer import DecoderLayer

        return DecoderLayer(
            self.input_norm.build(reader),
            self.attention.build(reader),
            self.post_attention_norm.build(reader),
            self.mlp.build(reader),
        )
