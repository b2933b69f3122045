"""A layer of most decoders, and what it consists of: RMSNorm, self-attention of a rank's heads, a feed-forward layer;
each of the two between norms, and added to the residual stream.

Attention is the projections around a backend that stores keys and values and attends. It knows weights, heads, windows
and the communicator. It does not know which layer it is, or how its weights are held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from parallel.communicator import Communicator
from trtrun.attention.backend import AttentionBackend, attend
from trtrun.kernels.arguments import (
    Activation,
    Activations,
    AttentionCall,
    Delta,
    NormByHead,
    RankSum,
    RoundedRows,
    Rounding,
)
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.store import LayerCache
from trtrun.linear.layer import Linear


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        weight: [size], or [heads, size] for one weight per head; on the model's device in its dtype, or in float32:
            then it is multiplied with before the result is rounded.
        eps: added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps
        self._operations = operations_of(weight.device.type)

    @property
    def by_head(self) -> NormByHead | None:
        """The norm for who computes it himself; None where there is one weight for all of a token."""
        return NormByHead(self.weight, self._eps) if self.weight.dim() > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size], or [tokens, heads, size] for one weight per head → the same shape and dtype."""
        return self._operations.normalise(x, self.weight, self._eps)

    def rounded(self, hidden: torch.Tensor, delta: Delta | None, rounding: Rounding) -> RoundedRows:
        """Do as `add`, or return the norm of `hidden` where `delta` is None, rounded for a layer that takes rows that
        are rounded so; on CUDA with Triton."""
        return self._operations.normalise_rounded(hidden, self.weight, self._eps, delta, rounding)

    def add(self, hidden: torch.Tensor, delta: Delta) -> torch.Tensor:
        """hidden += delta, in place, and the norm of the sum; both of [tokens, size] in the model's dtype."""
        return self._operations.normalise(hidden, self.weight, self._eps, delta)


class Mixer(Protocol):
    """Attention on one rank, or what a layer has in its place.

    Attributes:
        output: what it makes back to hidden, for whoever is handed that.
        takes_rounded_rows: how its input may be rounded; None where it may not.
    """

    output: RowParallelLinear

    @property
    def takes_rounded_rows(self) -> Rounding | None: ...

    def __call__(self, x: Activations, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's features], for `output`. A token's bits do not depend
        on what is computed beside it."""
        ...


class HeadNorm(Protocol):
    """What normalises queries and keys before they are rotated.

    Attributes:
        by_head: the same, where each head is normalised by itself; None where it is not, or by other means.
    """

    @property
    def by_head(self) -> NormByHead | None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads + kv_heads, head_dim], this rank's queries, then its keys if any → the same shape and dtype.
        A token's bits do not depend on the others."""
        ...


@dataclass
class Attention:
    """Attention over the paged store.

    Attributes:
        qkv: hidden to this rank's query heads, key heads, value heads, in this order.
        head_norm: of queries and keys, where the model has one: an RMSNorm of weight [heads + kv_heads, head_dim] where
            it is per head.
        output: this rank's heads back to hidden, for whoever is handed what was attended.
        rotated_heads: this rank's query and key heads.
        scale: factor of the scores.
        window: sliding window, None for the whole context.
        kv_scales, soft_cap, sinks: of the layer, sinks of this rank's query heads; see AttentionCall.
        gated_heads: query heads whose gates `qkv` makes behind the values: all of them, or none.
        value_heads: values where `qkv` makes none: the last so many of the keys, as they are before `head_norm`; 0 for
            what stands behind the keys.
        value_norm: of values, an RMSNorm of weight [kv_heads, head_dim]; None without.
    """

    qkv: Linear
    head_norm: HeadNorm | None
    output: RowParallelLinear
    backend: AttentionBackend
    rotated_heads: int
    head_dim: int
    scale: float
    window: int | None
    kv_scales: torch.Tensor | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    gated_heads: int = 0
    value_heads: int = 0
    value_norm: HeadNorm | None = None

    @property
    def takes_rounded_rows(self) -> Rounding | None:
        return self.qkv.takes_rounded_rows

    def __call__(
        self,
        x: Activations,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's heads * head_dim], for `output`."""
        fused = self.qkv(x)
        fused = fused.view(fused.shape[0], -1, self.head_dim)
        gates = fused.shape[1] - self.gated_heads
        first_value = self.rotated_heads - self.value_heads
        query_key, value = fused[:, : self.rotated_heads], fused[:, first_value:gates]
        query_key, head_norm = self._normalise(query_key, self.head_norm)
        value, value_norm = self._normalise(value, self.value_norm)
        call = AttentionCall(
            query_key,
            value,
            angles,
            cache.keys_and_values,
            cache.batch,
            self.scale,
            self.window,
            self.kv_scales,
            self.soft_cap,
            self.sinks,
            head_norm,
            value_norm,
        )
        attended = attend(self.backend, call)
        if self.gated_heads:
            attended = operations_of(attended.device.type).gate_heads(fused[:, gates:], attended)
        return attended.flatten(1)

    def _normalise(self, heads: torch.Tensor, norm: HeadNorm | None) -> tuple[torch.Tensor, NormByHead | None]:
        """Heads, normalised, or as they are with what the backend is to normalise them by."""
        if norm is None:
            return heads, None
        by_head = norm.by_head if self.backend.normalises_heads else None
        return (norm(heads), None) if by_head is None else (heads, by_head)


class RowParallelLinear:
    """A linear layer whose input features are spread over the group: partial results are summed, then the bias added.

    Args:
        linear: this rank's input features, without bias.
        bias: [out] or None; added once, after the sum.
        communicator: of the tensor-parallel group.
    """

    def __init__(self, linear: Linear, bias: torch.Tensor | None, communicator: Communicator) -> None:
        self._linear = linear
        self._bias = bias
        self._communicator = communicator

    @property
    def takes_rounded_rows(self) -> Rounding | None:
        return self._linear.takes_rounded_rows

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, in share] → [tokens, out], equal on all ranks."""
        output = self._linear(x)
        if self._communicator.size > 1:
            output = self._communicator.all_reduce(output)
        return output if self._bias is None else output.add_(self._bias)

    def leave(self, x: Activations) -> Delta:
        """x [tokens, in share] → the same, for who adds it to the residual stream on the way to a norm."""
        if self._communicator.size == 1 or self._bias is not None:
            return self(x)
        return sum_of_ranks(self._linear(x), self._communicator)


def sum_of_ranks(part: torch.Tensor, communicator: Communicator) -> Delta:
    """The sum of the ranks' parts [tokens, hidden], or what is left of it to the next norm where that is faster there:
    the same on all ranks. It may be made in place."""
    if operations_of(part.device.type).sums_ranks(part, communicator):
        return RankSum(part, communicator)
    return communicator.all_reduce(part)


class MLP(Protocol):
    """The feed-forward layer of one rank, whatever it consists of.

    Attributes:
        takes_rounded_rows: how its input may be rounded; None where it may not.
    """

    @property
    def takes_rounded_rows(self) -> Rounding | None: ...

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks. A token's bits do not depend on the others."""
        ...

    def leave(self, x: Activations) -> Delta:
        """x [tokens, hidden] → the same, for who adds it to the residual stream on the way to a norm."""
        return self(x)


class GatedMLP(MLP):
    """A gated linear unit (arXiv:2002.05202) with gate and up fused into one linear layer.

    Args:
        gate_up: hidden to this rank's gate features, then as many up features.
        down: back to hidden.
        activation: what gates go through.
    """

    def __init__(self, gate_up: Linear, down: RowParallelLinear, activation: Activation = "silu") -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._operations = operations_of(gate_up.device.type)

    @property
    def takes_rounded_rows(self) -> Rounding | None:
        return self._gate_up.takes_rounded_rows

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self._down(self._gated(x))

    @override
    def leave(self, x: Activations) -> Delta:
        return self._down.leave(self._gated(x))

    def _gated(self, x: Activations) -> Activations:
        fused, rounding = self._gate_up(x), self._down.takes_rounded_rows
        if rounding is not None:
            return self._operations.activate_and_multiply_rounded(fused, rounding, self._activation)
        return self._operations.activate_and_multiply(fused, self._activation)


@dataclass
class DecoderLayer:
    """A layer of most decoders; `attend` and `feed_forward` are its halves, between which tokens may be left out.

    Attributes:
        input_norm, post_attention_norm: in front of attention and of the feed-forward layer; None where there is none.
        attention: or what the layer has in its place.
        attention_output_norm, mlp_output_norm: of what the two add to the residual stream; None where there is none.
        residual_factor: of what they add.
    """

    input_norm: RMSNorm | None
    attention: Mixer
    post_attention_norm: RMSNorm | None
    mlp: MLP
    attention_output_norm: RMSNorm | None = None
    mlp_output_norm: RMSNorm | None = None
    residual_factor: float = 1.0

    def attend(
        self,
        hidden: torch.Tensor,
        delta: Delta | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        normed = _normalise(self.input_norm, hidden, delta, self.attention.takes_rounded_rows)
        return self.attention(normed, angles, cache)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> Delta:
        delta = self._left(self.attention.output, attended, self.attention_output_norm)
        normed = _normalise(self.post_attention_norm, hidden, delta, self.mlp.takes_rounded_rows)
        return self._left(self.mlp, normed, self.mlp_output_norm)

    def _left(self, end: RowParallelLinear | MLP, x: Activations, norm: RMSNorm | None) -> Delta:
        """What a half adds to the residual stream, by what it ends with."""
        if norm is None and self.residual_factor == 1.0:
            return end.leave(x)
        delta = end(x) if norm is None else norm(end(x))
        return delta if self.residual_factor == 1.0 else delta.mul_(self.residual_factor)


def add_to(hidden: torch.Tensor, delta: Delta) -> torch.Tensor:
    """hidden [tokens, hidden] += delta, in place, where no norm stands behind."""
    return hidden.add_(operations_of(hidden.device.type).added_up(delta))


def _normalise(
    norm: RMSNorm | None, hidden: torch.Tensor, delta: Delta | None, rounding: Rounding | None
) -> Activations:
    """hidden += delta, in place, where there is one, and the norm of it, rounded where the layer behind takes that."""
    if norm is None:
        return hidden if delta is None else add_to(hidden, delta)
    if rounding is not None:
        return norm.rounded(hidden, delta, rounding)
    return norm(hidden) if delta is None else norm.add(hidden, delta)
