"""A decoder layer in plain torch, over whole texts, for calibration and for measuring quantized weights.

Calibration runs the models whose plans say nothing that this layer does not compute (`known_plans`): a family that is
added later, or an option of a block, is refused by name until it is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtrun.errors import ConfigError
from trtrun.kernels.torch.experts import choose_experts
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelConfig
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.models.layer_plan import NormPlan

Weights = Mapping[str, Tensor]
"""A layer's tensors by their names in the checkpoint."""

Watch = Callable[[str, Tensor], None]
"""Called with the name of a site and what passes there: the inputs [texts, tokens, features] of the linear layers, by
SITES, and "keys" (rotated) and "values" [texts, heads, tokens, head_dim]."""

SITES = ("attention", "output", "mlp", "down")
"""Where linear layers get their inputs: q_proj, k_proj and v_proj; o_proj; gate_proj and up_proj; down_proj. That of an
expert is "down.5", of the expert of all tokens "down.shared"."""

Rounding = Callable[[str, Tensor], Tensor]
"""A site, and the inputs of linear layers there [..., features] → as a format rounds them."""


def _pass(_: str, __: Tensor) -> None:
    """Watch nothing."""


@dataclass(frozen=True)
class PlainLayer:
    """One layer on one device.

    Attributes:
        plan: of the layer.
        weights: in the dtype of activations.
        rotary: of the same device and dtype, with tables for the texts' positions.
        rounding: of the inputs of linear layers; None leaves them.
    """

    plan: DecoderPlan
    weights: Weights
    rotary: RotaryEmbedding
    rounding: Rounding | None = None

    def with_weights(self, changed: Weights) -> PlainLayer:
        """Copy the layer with other tensors of some names."""
        return replace(self, weights={**self.weights, **changed})

    def forward(self, hidden: Tensor, watch: Watch = _pass) -> Tensor:
        """The layer: the residual stream [texts, tokens, hidden] → the same behind it."""
        hidden = hidden + self.attention(self.norm(self.plan.input_norm, hidden), watch)
        return hidden + self.mlp(self.norm(self.plan.post_attention_norm, hidden), watch)

    def norm(self, plan: NormPlan | None, hidden: Tensor) -> Tensor:
        assert plan is not None, "layers without one are not known"
        return rms_norm(hidden, self.weights[f"{plan.name}.weight"], plan.eps)

    def attention(self, inputs: Tensor, watch: Watch = _pass) -> Tensor:
        """Self-attention of [texts, tokens, hidden] that are normalised, with o_proj."""
        plan = self.plan.attention
        assert isinstance(plan, AttentionPlan), "others are not known"
        shape = plan.shape
        watch("attention", inputs)
        inputs = self._rounded("attention", inputs)
        queries = self._heads("q_proj", inputs, shape.num_heads)
        keys = self._heads("k_proj", inputs, shape.num_kv_heads)
        values = self._heads("v_proj", inputs, shape.num_kv_heads)
        if plan.head_norm:
            query_norm, key_norm = plan.head_norms
            queries, keys = self.norm(query_norm, queries), self.norm(key_norm, keys)
        length = inputs.shape[1]
        angles = self.rotary.lookup(torch.arange(length, device=inputs.device))
        queries, keys = (_rotate(heads, *angles).transpose(1, 2) for heads in (queries, keys))
        values = values.transpose(1, 2)
        watch("keys", keys)
        watch("values", values)
        mask = None
        if plan.window is not None and plan.window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
            mask = mask.triu(1 - plan.window)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, enable_gqa=shape.num_heads != shape.num_kv_heads
        )
        attended = attended.transpose(1, 2).flatten(2)
        watch("output", attended)
        return self._linear(f"{plan.name}.o_proj", self._rounded("output", attended))

    def mlp(self, inputs: Tensor, watch: Watch = _pass) -> Tensor:
        """The feed-forward layer of [texts, tokens, hidden] that are normalised."""
        plan = self.plan.mlp
        if isinstance(plan, ExpertsPlan):
            return self._experts(plan, inputs, watch)
        assert isinstance(plan, GatedMLPPlan), "others are not known"
        watch("mlp", inputs)
        names = [f"{plan.name}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        return self._gated(names, inputs, watch, "down")

    def _gated(self, names: Sequence[str], inputs: Tensor, watch: Watch, site: str) -> Tensor:
        """Gate, up and down, by name, of [..., hidden]; `site` is that of down."""
        inputs = self._rounded("mlp", inputs)
        gated = F.silu(self._linear(names[0], inputs)) * self._linear(names[1], inputs)
        watch(site, gated)
        return self._linear(names[2], self._rounded("down", gated))

    def _experts(self, plan: ExpertsPlan, inputs: Tensor, watch: Watch) -> Tensor:
        """The same of experts, of which each token goes through some."""
        watch("mlp", inputs)
        rows, names = inputs.flatten(0, -2), plan.names
        logits = self._linear(f"{plan.name}.{names.router}", rows)
        choice = choose_experts(logits, plan.num_chosen, renormalises=plan.renormalises)
        made = torch.zeros_like(rows, dtype=torch.float32)
        for expert in sorted({*choice.experts.flatten().tolist()}):
            tokens, places = (choice.experts == expert).nonzero(as_tuple=True)
            own = [f"{plan.name}.{name.format(expert)}" for name in (names.gate, names.up, names.down)]
            shares = choice.shares[tokens, places].unsqueeze(1)
            made.index_add_(0, tokens, self._gated(own, rows[tokens], watch, f"down.{expert}").float() * shares)
        if plan.shared is not None:
            own = [f"{plan.shared.name}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
            result = self._gated(own, rows, watch, "down.shared")
            if plan.shared_gate is not None:
                gate = self.weights[plan.shared_gate.parts[0].name]
                result = result * torch.sigmoid(F.linear(rows, gate))
            made += result.float()
        return made.to(inputs.dtype).view_as(inputs)

    def _heads(self, name: str, inputs: Tensor, count: int) -> Tensor:
        return torch.unflatten(self._linear(f"{self.plan.attention.name}.{name}", inputs), -1, (count, -1))

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _rounded(self, site: str, inputs: Tensor) -> Tensor:
        return inputs if self.rounding is None else self.rounding(site, inputs)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv:1910.07467) in float32, over the last dimension."""
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(hidden.dtype) * weight


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[texts, tokens, heads, head_dim], with tables [tokens, 1, head_dim] of RotaryEmbedding."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads * cosines + swapped * sines


_KNOWN: dict[type, frozenset[str]] = {
    DecoderPlan: frozenset({"input_norm", "attention", "post_attention_norm", "mlp"}),
    NormPlan: frozenset({"name", "size", "eps"}),
    AttentionPlan: frozenset({"name", "shape", "window", "qkv_bias", "output_bias", "head_norm"}),
    GatedMLPPlan: frozenset({"name", "shape", "has_bias"}),
    ExpertsPlan: frozenset(
        {
            *("name", "shape", "num_experts", "num_chosen", "num_features", "names", "renormalises"),
            "num_shared_features",
        }
    ),
    ModelConfig: frozenset(
        {
            *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
            *("rms_norm_eps", "architecture", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope"),
            *("layers", "checkpoint_dtype", "eos_token_ids", "quant_method", "stored", "mask_token", "values"),
        }
    ),
}


_INSTEAD = "set target.quantization: fp8, which quantizes while loading, or name a checkpoint that is quantized"


def known_plans(config: ModelConfig) -> list[DecoderPlan]:
    """The plans of a model's layers.

    Raises:
        ConfigError: they, or the model, are of a kind that is not known.
    """
    _check(config, config.architecture)
    for plan in config.layers:
        _check(plan, config.architecture)
        assert isinstance(plan, DecoderPlan)
        for block in (plan.input_norm, plan.attention, plan.post_attention_norm, plan.mlp):
            _check(block, config.architecture)
    return [plan for plan in config.layers if isinstance(plan, DecoderPlan)]


def _check(item: Any, architecture: str) -> None:
    known = _KNOWN.get(type(item))
    if known is None:
        kind = type(item).__name__
        raise ConfigError(f"trtrun quantize does not know layers of {architecture} ({kind}): {_INSTEAD}")
    for one in fields(item):
        default = None if one.default is MISSING else one.default
        if one.name not in known and getattr(item, one.name) != default:
            raise ConfigError(f"trtrun quantize does not know {architecture} (its {one.name}): {_INSTEAD}")
