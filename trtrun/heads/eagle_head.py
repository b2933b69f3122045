"""An EAGLE or MTP head on one rank of a target: a decoder layer of its own over the target's hidden states, and logits
(EAGLE: Li et al. 2024, arXiv:2401.15077; EAGLE-3: Li et al. 2025, arXiv:2503.01840; MTP: arXiv:2412.19437).

At position i its first layer reads the embedding of the token at i + 1 beside a hidden state of i: of tokens that the
target has read, the target's own; of tokens that are drafted, what the head itself left behind at the position before.
In EAGLE-3 the target's is made by fc of several, and each half is normed; before it, fc makes one state of embedding
and hidden state, and nothing is normed; in MTP both are normed before it. Layers are shared out over the group as a
decoder's are, fc is computed on every rank, and logits are for the rank that decides. It does not know tensors' names,
rows or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trtrun.heads.decoder_head import DecoderHead, HeadParts
from trtrun.kernels.arguments import Delta
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.store import KVStore, LayerCache
from trtrun.layers.decoder_layer import Attention, DecoderLayer, GatedMLP, RMSNorm, add_to
from trtrun.linear.layer import Linear
from trtrun.models.layer_plan import Layer
from trtrun.tensors import inference


class FirstLayer(Protocol):
    """A head's first layer, which reads embeddings beside hidden states."""

    def __call__(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> tuple[torch.Tensor, Delta]:
        """Embeddings and hidden states, [n, hidden] each, of which the latter may be overwritten → the residual stream,
        and what is left to add to it; writing the tokens' keys and values."""
        ...


@dataclass
class JoinedLayer:
    """EAGLE's: what fc makes of embedding and hidden state is the stream, and what attention reads; behind a norm in
    heads that were trained with one."""

    fc: Linear
    input_norm: RMSNorm | None
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self.fc(torch.cat((embedded, hidden), dim=1))
        read = stream if self.input_norm is None else self.input_norm(stream)
        attended = self.attention(read, angles, cache)
        return stream, self.mlp(self.post_attention_norm.add(stream, self.attention.output(attended)))


@dataclass
class FusedLayer:
    """EAGLE-3's. Its stream begins with the hidden state, or with its norm where `norm_before_residual`."""

    input_norm: RMSNorm
    hidden_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP
    norm_before_residual: bool

    def __call__(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_norm(embedded), normed), dim=1)
        attended = self.attention(both, angles, cache)
        stream = normed if self.norm_before_residual else hidden
        return stream, self.mlp(self.post_attention_norm.add(stream, self.attention.output(attended)))


@dataclass
class MTPLayer:
    """That of multi-token prediction: fc makes one state of embedding and hidden state, each behind a norm, and a layer
    like the target's follows."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear
    layer: Layer

    def __call__(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> tuple[torch.Tensor, Delta]:
        stream = self.fc(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=1))
        delta = self.layer.feed_forward(stream, self.layer.attend(stream, None, angles, cache))
        assert delta is not None, "layers that draft leave something to add"
        return stream, delta


@dataclass
class TapFusion:
    """What makes one hidden state of the target's at all taps, in EAGLE-3.

    Attributes:
        fc: [n, taps * target's hidden] to [n, hidden].
        tap_norms: of the state at each tap, in order; none where they are not normed apart.
        joint_norm: of all of them as one, where there is one.
    """

    fc: Linear
    tap_norms: Sequence[RMSNorm]
    joint_norm: RMSNorm | None

    def __call__(self, tapped: torch.Tensor) -> torch.Tensor:
        """[n, taps, target's hidden] → [n, hidden]."""
        if self.tap_norms:
            states = [norm(tapped[:, tap].contiguous()) for tap, norm in enumerate(self.tap_norms)]
            tapped = torch.stack(states, dim=1)
        flat = tapped.flatten(1)
        return self.fc(flat if self.joint_norm is None else self.joint_norm(flat))


class EagleHead(DecoderHead):
    """The head of a target."""

    def __init__(
        self,
        parts: HeadParts,
        *,
        fusion: TapFusion | None,
        first: FirstLayer,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm | None,
        norm_output: bool,
    ) -> None:
        """Put layers together.

        Args:
            parts: what all heads have.
            fusion: what makes a hidden state of the target's; None where there is one tap, which is read as it is.
            first, layers, final_norm: in this order; not all heads have a final norm.
            norm_output: whether the next step reads what leaves the final norm.
        """
        super().__init__(parts)
        self._fusion = fusion
        self._first = first
        self._layers = layers
        self._final_norm = final_norm
        self._norm_output = norm_output

    @inference
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, taps, target's hidden] in its dtype → [n, hidden]."""
        return tapped.flatten(1) if self._fusion is None else self._fusion(tapped)

    @inference
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Feed tokens, writing keys and values. Collective over the group.

        Args:
            tokens: [n] int64 on the device: of each position the token that stands behind it.
            positions: [n] int64 on the device, 0 for padding.
            hidden: [n, hidden] of the positions, which may be overwritten.
            attention: the segments; their block tables cover every position.
            store: this rank's keys and values of the head.

        Returns:
            [n, hidden], equal on all ranks: what `logits` and the next step take.
        """
        angles = self._angles(positions, attention)
        first, *others = store.of_layers(attention)
        stream, delta = self._first(self._embedding(tokens), hidden, angles, first)
        for layer, cache in zip(self._layers, others, strict=True):
            attended = layer.attend(stream, delta, angles, cache)
            delta = layer.feed_forward(stream, attended)
        normed = add_to(stream, delta) if self._final_norm is None else self._final_norm.add(stream, delta)
        self._note(stream)
        return normed if self._norm_output else stream

    @inference
    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """What follows the tokens that `forward` was fed. Collective over the group.

        Args:
            state: [n, hidden] of `forward`.

        Returns:
            [n, the target's vocab_size] float32, -inf where the head does not know a token; None on ranks that do not
            decide.
        """
        norm = None if self._norm_output else self._final_norm
        return self._logits(state if norm is None else norm(state))
