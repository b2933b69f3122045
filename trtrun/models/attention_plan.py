"""The plan of self-attention with rotated queries and keys, in the forms that families have.

It names tensors and sizes, and imports torch only where it builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trtrun.kvcache.specs import PagedKeysAndValues, SharedKeysAndValues
from trtrun.layers.rope import RopeConfig, order_of_rotated
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.quantization_config import attention_names
from trtrun.weights.weight import Axis, LinearPlan, Rows, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.decoder_layer import Attention, HeadNorm
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class AttentionPlan:
    """Self-attention with rotated queries and keys: q_proj, k_proj and v_proj, computed as one, and o_proj.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.self_attn".
        shape: of the model, with the heads of this layer.
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
        norms_in_float32: whether head norms multiply by their weight before they round.
        keys_are_values: whether values are keys as k_proj makes them; then there is no v_proj.
        norms_values: whether values are RMS-normalised per head, without a weight.
        shared_layer: index of the layer in whose keys and values this one attends; then it has no k_proj, k_norm and
            v_proj. None where it has its own.
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
    norms_in_float32: bool = False
    keys_are_values: bool = False
    norms_values: bool = False
    shared_layer: int | None = None

    @property
    def is_reordered(self) -> bool:
        """Whether ranks hold heads in another order than files do."""
        return self.rotated is not None or self.interleaved

    @property
    def qkv(self) -> LinearPlan:
        """Hidden to queries, keys, values and gates, as far as they have tensors, in this order. Dummy ones tell tokens
        apart."""
        inputs, head_dim = Axis(self.input_size or self.shape.hidden_size), self.shape.head_dim
        outputs = {"q_proj": self.shape.queries}
        if self.shared_layer is None:
            outputs["k_proj"] = self.shape.keys
            if not self.keys_are_values:
                outputs["v_proj"] = self.shape.keys
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
        """Norms of queries and of keys, where the layer has them."""
        names = ("q_norm", "k_norm") if self.head_norm else ()
        size, eps = self.shape.head_dim, self.shape.rms_norm_eps
        norm = NormPlan("", size, eps, self.norms_add_one, self.norms_in_float32)
        own = names if self.shared_layer is None else names[:1]
        return tuple(replace(norm, name=f"{self.name}.{name}") for name in own)

    @property
    def sinks(self) -> Weight | None:
        """[heads], where the model has them. Dummy ones take next to nothing."""
        if not self.has_sinks:
            return None
        return Weight((StoredTensor(f"{self.name}.sinks", (replace(self.shape.queries, unit=1),), -10.0),))

    def weights(self) -> Sequence[Weight]:
        sinks = () if self.sinks is None else (self.sinks,)
        return (*self.qkv.weights, *self.output.weights, *(norm.weight for norm in self.head_norms), *sinks)

    def keeps(self, share: Share) -> PagedKeysAndValues | SharedKeysAndValues:
        """Keys and values of the rank's heads, or whose they are."""
        if self.shared_layer is not None:
            return SharedKeysAndValues(self.shared_layer)
        return PagedKeysAndValues(len(self.shape.keys.units(share)), self.shape.head_dim, self.window)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: queries, keys and values, as they are made, normalised, and
        rotated; what is attended, in its place and gathered; gates, as they are made and beside that; and normalised
        values."""
        queries, keys = len(self.shape.queries.held(share)), len(self.shape.keys.held(share))
        gates, values = 4 * queries if self.has_gates else 0, keys if self.norms_values else 0
        return (queries + 2 * keys) + 2 * (queries + keys) + 2 * queries + gates + values

    def build_head_norm(self, reader: WeightReader) -> HeadNorm | None:
        """What normalises this rank's queries and keys; None where nothing does."""
        if not self.head_norm:
            return None
        import torch

        from trtrun.layers.decoder_layer import RMSNorm

        counts = len(self.shape.queries.units(reader.share)), len(self.shape.keys.units(reader.share))
        norms = [norm.read(reader) for norm in self.head_norms]
        if self._order is not None:
            order = [number for part in self._order for number in part]
            norms = [norm[order] for norm in norms]
        per_head = [norm.expand(count, -1) for norm, count in zip(norms, counts, strict=False)]
        return RMSNorm(torch.cat(per_head), self.shape.rms_norm_eps)

    def _build_value_norm(self, reader: WeightReader) -> HeadNorm | None:
        if not self.norms_values or self.shared_layer is not None:
            return None
        import torch

        from trtrun.layers.decoder_layer import RMSNorm

        shape = len(self.shape.keys.units(reader.share)), self.shape.head_dim
        return RMSNorm(torch.ones(shape, device=reader.device), self.shape.rms_norm_eps)

    def build(self, reader: WeightReader) -> Attention:
        from trtrun.layers.decoder_layer import Attention

        heads, kv_heads = len(self.shape.queries.units(reader.share)), len(self.shape.keys.units(reader.share))
        has_keys = self.shared_layer is None
        return Attention(
            qkv=reader.linear(self.qkv.weight, self.qkv.bias),
            head_norm=self.build_head_norm(reader),
            output=reader.row_parallel(self.output.weight, self.output.bias),
            backend=reader.attention(self.shape.head_dim),
            rotated_heads=heads + kv_heads if has_keys else heads,
            head_dim=self.shape.head_dim,
            scale=self.shape.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            kv_scales=reader.kv_scales(self._keys_name, self.shape.keys),
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else reader.tensor(self.sinks).float(),
            gated_heads=heads if self.has_gates else 0,
            value_heads=kv_heads if self.keys_are_values and has_keys else 0,
            value_norm=self._build_value_norm(reader),
        )

    @property
    def _keys_name(self) -> str:
        """In front of the tensors of what makes the keys."""
        return self.name if self.shared_layer is None else attention_names(self.shared_layer + 1)[-1]
