"""Plans: what a family makes of a config.json, one for each layer, and the blocks that most layers are planned from.

A plan says its tensors, how they are shared out over ranks, and what a token needs in it. Sizes, checks, dummy weights,
loading and `trtrun plan` ask plans and know no family; a rank builds its layers from them. A plan imports torch only
where it builds, because processes that only start ranks ask it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from typing_extensions import override

from parallel.sharding import column_range, kv_heads_for_rank, query_heads_for_rank
from trtrun.errors import CheckpointError
from trtrun.kvcache.specs import CacheSpec, LayerSpecs, PagedKeysAndValues, like_layers
from trtrun.layers.rope import RopeConfig, order_of_rotated
from trtrun.weights.weight import Axis, LinearPlan, Rows, Share, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from trtrun.kernels.arguments import Activation
    from trtrun.kvcache.store import LayerCache
    from trtrun.layers.decoder_layer import MLP, Attention, DecoderLayer, GatedMLP, HeadNorm, Mixer, RMSNorm
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
        delta: torch.Tensor | None,
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

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, token by token.

        Args:
            hidden: [n, hidden], the residual stream, which is overwritten.
            attended: [n, features], contiguous, of the same tokens.

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

    def keeps(self, share: Share) -> LayerSpecs:
        """What a rank keeps of rows for the layer; nothing where it has no memory."""
        ...

    def build(self, reader: WeightReader) -> Layer:
        """The layer on the reader's rank.

        Raises:
            CheckpointError: weights that are not finite.
        """
        ...


_FLOAT = 4


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
        shape: of the model.
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
        rope: how queries and keys are rotated; None as the model's config.json says for all layers.
        scale: factor of the scores; None for one over the root of the head's size.
        norms_add_one: whether head norms multiply by 1 + weight.
        soft_cap: c of c * tanh(score / c), which scores become; None leaves them as they are.
        fused_qkv: whether the three projections lie in one tensor, qkv_proj.
        rotated: how many of a head's numbers are rotated, the first ones in the files; None for all.
        interleaved: whether neighbouring numbers are rotated together, and not those half a head apart.
        has_sinks: whether each query head has one more score without a value, `name`.sinks [heads].
        has_gates: whether what each query head attends is multiplied by the sigmoid of a gate, which lies behind its
            queries in q_proj.
    """

    name: str
    shape: ModelShape
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    input_size: int | None = None
    rope: RopeConfig | None = None
    scale: float | None = None
    norms_add_one: bool = False
    soft_cap: float | None = None
    fused_qkv: bool = False
    rotated: int | None = None
    interleaved: bool = False
    has_sinks: bool = False
    has_gates: bool = False

    @property
    def is_reordered(self) -> bool:
        """Whether ranks hold heads in another order than files do."""
        return self.rotated is not None or self.interleaved

    @property
    def qkv(self) -> LinearPlan:
        """Hidden to queries, keys, values and gates, in this order. Dummy ones tell tokens apart."""
        inputs, head_dim = Axis(self.input_size or self.shape.hidden_size), self.shape.head_dim
        outputs = {"q_proj": self.shape.queries, "k_proj": self.shape.keys, "v_proj": self.shape.keys}
        inside = {}
        if self.has_gates:
            outputs["gate"] = self.shape.queries
            both = 2 * head_dim
            for name, first in (("q_proj", 0), ("gate", head_dim)):
                inside[name] = ("q_proj", Rows(first, self.shape.num_heads * both, 1, both))
        orders = dict.fromkeys(("q_proj", "k_proj"), self._order) if self._order is not None else {}
        return LinearPlan(
            self.name,
            outputs,
            inputs,
            self.qkv_bias,
            dummy_scales={"q_proj": 2.0, "k_proj": 2.0, "gate": 2.0},
            fused="qkv_proj" if self.fused_qkv else None,
            unit_orders=orders,
            inside=inside,
        )

    @property
    def _order(self) -> tuple[range, ...] | None:
        """Parts of a head in the order in which ranks hold it; None as files do."""
        if not self.is_reordered:
            return None
        return order_of_rotated(self.rotated or self.shape.head_dim, self.shape.head_dim, self.interleaved)

    @property
    def output(self) -> LinearPlan:
        """Heads back to hidden."""
        return LinearPlan(self.name, {"o_proj": Axis(self.shape.hidden_size)}, self.shape.queries, self.output_bias)

    @property
    def head_norms(self) -> tuple[NormPlan, ...]:
        """Norms of queries and of keys, where the model has them."""
        names = ("q_norm", "k_norm") if self.head_norm else ()
        size, eps = self.shape.head_dim, self.shape.rms_norm_eps
        return tuple(NormPlan(f"{self.name}.{name}", size, eps, self.norms_add_one) for name in names)

    @property
    def sinks(self) -> Weight | None:
        """[heads], where the model has them. Dummy ones take next to nothing."""
        if not self.has_sinks:
            return None
        return Weight((StoredTensor(f"{self.name}.sinks", (replace(self.shape.queries, unit=1),), -10.0),))

    def weights(self) -> Sequence[Weight]:
        sinks = () if self.sinks is None else (self.sinks,)
        return (*self.qkv.weights, *self.output.weights, *(norm.weight for norm in self.head_norms), *sinks)

    def keeps(self, share: Share) -> PagedKeysAndValues:
        """Keys and values of the rank's heads."""
        return PagedKeysAndValues(len(self.shape.keys.units(share)), self.shape.head_dim, self.window)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: queries, keys and values, as they are made, normalised, and
        rotated; what is attended, in its place and gathered; and gates, as they are made and beside that."""
        queries, keys = len(self.shape.queries.held(share)), len(self.shape.keys.held(share))
        gates = 4 * queries if self.has_gates else 0
        return (queries + 2 * keys) + 2 * (queries + keys) + 2 * queries + gates

    def build_head_norm(self, reader: WeightReader) -> HeadNorm | None:
        """What normalises this rank's queries and keys; None where nothing does."""
        if not self.head_norm:
            return None
        import torch

        from trtrun.layers.decoder_layer import RMSNorm

        heads, kv_heads = len(self.shape.queries.units(reader.share)), len(self.shape.keys.units(reader.share))
        query_norm, key_norm = (norm.read(reader) for norm in self.head_norms)
        if self._order is not None:
            order = [number for part in self._order for number in part]
            query_norm, key_norm = query_norm[order], key_norm[order]
        per_head = torch.cat((query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1)))
        return RMSNorm(per_head, self.shape.rms_norm_eps)

    def build(self, reader: WeightReader) -> Attention:
        from trtrun.layers.decoder_layer import Attention

        heads, kv_heads = len(self.shape.queries.units(reader.share)), len(self.shape.keys.units(reader.share))
        return Attention(
            qkv=reader.linear(self.qkv.weight, self.qkv.bias),
            head_norm=self.build_head_norm(reader),
            output=reader.row_parallel(self.output.weight, self.output.bias),
            backend=reader.attention(self.shape.head_dim),
            rotated_heads=heads + kv_heads,
            head_dim=self.shape.head_dim,
            scale=self.shape.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            kv_scales=reader.kv_scales(self.name, self.shape.keys),
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else reader.tensor(self.sinks).float(),
            gated_heads=heads if self.has_gates else 0,
        )


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
        return held * item_bytes + 3 * max(hidden, rotated) * _FLOAT

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
