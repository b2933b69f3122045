"""Scales of a layer's channels that change no result: what feeds a linear layer is divided by them, and its weights are
multiplied, so that what is hard to round becomes less so.

It knows a plan of blocks and tensors by name. It does not know how scales are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtrun.models.blocks import DecoderPlan
from trtrun.tools.quantizing.plain_layer import Weights


@dataclass(frozen=True)
class Pair:
    """What feeds linear layers, and these.

    Attributes:
        site: the inputs of the linear layers; see plain_layer.SITES.
        source: module that makes them: a norm, or a linear layer whose output features they are.
        consumers: the linear layers.
        shape: (heads of keys, query heads for each, features of a head) where each output feature of the source reaches
            the consumers as often as there are query heads for a head of values; None where it does once.
    """

    site: str
    source: str
    consumers: tuple[str, ...]
    shape: tuple[int, int, int] | None = None

    def shared(self, channels: Tensor) -> Tensor:
        """Means over what comes of one output feature of the source: channels [in] → [in]."""
        if self.shape is None:
            return channels
        return channels.view(self.shape).mean(1, keepdim=True).expand(self.shape).reshape(-1)

    def of_source(self, scale: Tensor) -> Tensor:
        """A scale [in] that is `shared`, for the source's output features."""
        return scale if self.shape is None else scale.view(self.shape)[:, 0].reshape(-1)


def norm_pairs(plan: DecoderPlan) -> Sequence[Pair]:
    """Norms and the linear layers behind them."""
    attention, mlp = plan.attention.name, plan.mlp.name
    behind_input = tuple(f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    behind_attention = tuple(f"{mlp}.{name}" for name in ("gate_proj", "up_proj"))
    return (
        Pair("attention", plan.input_norm.name, behind_input),
        Pair("mlp", plan.post_attention_norm.name, behind_attention),
    )


def linear_pairs(plan: DecoderPlan) -> Sequence[Pair]:
    """Linear layers whose output features are the inputs of others, but for what is between without mixing channels."""
    attention, mlp, shape = plan.attention.name, plan.mlp.name, plan.attention.shape
    per_head = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    return (
        Pair("output", f"{attention}.v_proj", (f"{attention}.o_proj",), per_head),
        Pair("down", f"{mlp}.up_proj", (f"{mlp}.down_proj",)),
    )


def fold(weights: Weights, pair: Pair, scale: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer with a scale folded in.

    Args:
        weights: float32.
        pair: where.
        scale: [in] float32, positive, and `shared`.
        dtype: in which norms are stored: what their rounding changes is made up for by the consumers.
    """
    found = dict(weights)
    name = f"{pair.source}.weight"
    if weights[name].dim() == 1:  # a norm
        before, after = weights[name], (weights[name] / scale).to(dtype).float()
        is_fine = (after != 0) & after.isfinite()
        found[name] = torch.where(is_fine, after, before)
        scale = torch.where(is_fine, before / torch.where(is_fine, after, 1.0), 1.0)
    else:
        of_source = pair.of_source(scale)
        found[name] = weights[name] / of_source.unsqueeze(1)
        bias = f"{pair.source}.bias"
        if bias in weights:
            found[bias] = weights[bias] / of_source
    for consumer in pair.consumers:
        found[f"{consumer}.weight"] = weights[f"{consumer}.weight"] * scale
    return found


def smooth(weights: Weights, pair: Pair, largest: Tensor, strength: float) -> Tensor:
    """SmoothQuant's scale (arXiv:2211.10438, equation 4): max|X|^strength / max|W|^(1 - strength), 1 for channels
    without any activation or weight.

    Args:
        weights: float32.
        pair: where.
        largest: [in] float32: the largest activation of each channel.
        strength: alpha.
    """
    of_weights = torch.stack([weights[f"{name}.weight"].abs().amax(0) for name in pair.consumers]).amax(0)
    scale = largest.pow(strength) / of_weights.pow(1 - strength)
    return torch.where((largest > 0) & (of_weights > 0), scale, 1.0).clamp(min=1e-5)
