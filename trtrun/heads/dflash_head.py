"""A DFlash or DSpark head on one rank of a target: decoder layers that draft all tokens of a row in one forward, from
the target's hidden states (DFlash: arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

Each layer keeps keys and values of the tokens that the target has read. They are made of the target's hidden states
alone: fc of those at some layers, normed, is what the layer's projections take. A draft is the row's newest token and
mask tokens behind it, which the layers run as a decoder's do, but that each of them sees all of them. In DSpark the
token before adds to what is said of the next one (a Markov head). Layers are shared out over the group as a decoder's
are, fc and the Markov head are computed on every rank, and logits are for the rank that decides. It does not know
tensors' names, rows or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtrun.attention.backend import attend
from trtrun.heads.decoder_head import DecoderHead, HeadParts
from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.cpu.fused import rotate
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.store import KVStore
from trtrun.layers.decoder_layer import Attention, DecoderLayer, RMSNorm
from trtrun.linear.layer import Linear
from trtrun.tensors import inference

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DraftedBlocks:
    """The tokens of rows' drafts in one forward.

    Attributes:
        own: where each of them stands.
        whole: the same, each where the last of its row stands, so that it sees all of them.
        last: [tokens] int64: of each of them the last of its row.
    """

    own: AttentionBatch
    whole: AttentionBatch
    last: torch.Tensor


@dataclass(frozen=True)
class MarkovBias:
    """What the token before adds to logits (DSpark's Markov head, vanilla or gated).

    Attributes:
        before: [target's tokens, rank].
        behind: rank to the tokens that the head knows.
        gate: hidden + rank to rank, whose sigmoid weighs what goes from one to the other; None where all of it counts.
    """

    before: torch.Tensor
    behind: Linear
    gate: Linear | None

    def __call__(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """State [n, hidden] of the place and tokens [n] int64 before it → [n, known tokens] float32."""
        taken = self.before.index_select(0, tokens)
        if self.gate is not None:
            taken = taken * torch.sigmoid(self.gate(torch.cat((state, taken), dim=1)))
        return self.behind(taken).float()


class DFlashHead(DecoderHead):
    """The head of a target.

    Attributes:
        mask_token: stands for a token that is not known.
        from_newest: whether what is behind the row's newest token says the first draft token; else what is behind the
            first mask token does.
        looks_back: whether logits depend on the token before.
    """

    def __init__(
        self,
        parts: HeadParts,
        *,
        fc: Linear,
        context_norm: RMSNorm,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        markov: MarkovBias | None,
        mask_token: int,
        from_newest: bool,
        is_causal: bool,
    ) -> None:
        """Put layers together.

        Args:
            parts: what all heads have.
            fc, context_norm: make a state of the target's, in this order.
            layers, final_norm: of drafts, in this order.
            markov: what the token before adds to logits; None where nothing.
            mask_token, from_newest: see the class.
            is_causal: whether tokens of a draft do not see those behind them.
        """
        super().__init__(parts)
        self.mask_token = mask_token
        self.from_newest = from_newest
        self.looks_back = markov is not None
        self._fc = fc
        self._context_norm = context_norm
        self._layers = layers
        self._final_norm = final_norm
        self._markov = markov
        self._is_causal = is_causal

    @inference
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, taps, target's hidden] in its dtype → [n, hidden]."""
        return self._context_norm(self._fc(tapped.flatten(1)))

    @inference
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Write keys and values of tokens that the target has read.

        Args:
            tokens: not looked at.
            positions: [n] int64 on the device, 0 for padding.
            hidden: [n, hidden] of `fuse`.
            attention: the segments; their block tables cover every position.
            store: this rank's keys and values of the head.

        Returns:
            `hidden`.
        """
        angles = self._angles(positions, attention)
        for index, layer in enumerate(self._layers):
            own = _attention_of(layer)
            # Attention does both, writing and reading; each token then reads itself alone, and what comes of it is
            # left.
            _attend(own, *_projected(own, hidden), angles, attention, store.layer(index), 1)
        self._note(hidden)
        return hidden

    @inference
    def guess(
        self, tokens: torch.Tensor, positions: torch.Tensor, drafted: DraftedBlocks, store: KVStore
    ) -> torch.Tensor:
        """Run drafts, writing keys and values that later ones write over. Collective over the group.

        Args:
            tokens: [n] int64 on the device: rows' newest tokens, and mask tokens.
            positions: [n] int64 on the device, 0 for padding.
            drafted: where they stand; its block tables cover every position.
            store: this rank's keys and values of the head.

        Returns:
            [n, hidden], equal on all ranks: what `logits` takes.
        """
        angles = self._angles(positions, drafted.own)
        stream, delta = self._embedding(tokens), None
        for index, layer in enumerate(self._layers):
            assert layer.input_norm is not None, "heads have layers like Llama's"
            normed = layer.input_norm(stream) if delta is None else layer.input_norm.add(stream, delta)
            attended = self._attended(_attention_of(layer), normed, angles, drafted, store.layer(index))
            delta = layer.feed_forward(stream, attended)
        assert delta is not None
        normed = self._final_norm.add(stream, delta)
        self._note(stream)
        return normed

    def _attended(
        self,
        attention: Attention,
        normed: torch.Tensor,
        angles: Angles,
        drafted: DraftedBlocks,
        store_layer: torch.Tensor,
    ) -> torch.Tensor:
        """[n, this rank's heads * head_dim]. Where tokens see those behind them, they attend anew once all are written,
        from where the last of their row stands; with its key and value, which are written there again."""
        query_key, value = _projected(attention, normed)
        attended = _attend(attention, query_key, value, angles, drafted.own, store_layer, attention.window)
        if self._is_causal:
            return attended
        heads = query_key.shape[1] - value.shape[1]
        rotated = rotate(query_key, *angles)
        query_key = torch.cat((rotated[:, :heads], rotated[:, heads:].index_select(0, drafted.last)), dim=1)
        unturned = torch.ones_like(angles[0]), torch.zeros_like(angles[1])
        value = value.index_select(0, drafted.last)
        return _attend(attention, query_key, value, unturned, drafted.whole, store_layer, attention.window)

    @inference
    def logits(self, state: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor | None:
        """What is said of a draft's places. Collective over the group.

        Args:
            state: [n, hidden] of `guess`.
            before: [n] int64: of each the token in front of the one that it is about; needed where it `looks_back`.

        Returns:
            [n, the target's vocab_size] float32, -inf where the head does not know a token; None on ranks that do not
            decide.
        """
        bias = None
        if self._markov is not None:
            assert before is not None
            bias = self._markov(state, before)
        return self._logits(state, bias)


def _attention_of(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention), "heads have layers like Llama's"
    return layer.attention


def _projected(attention: Attention, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [n, heads + KV heads, head], normed, and values [n, KV heads, head] of [n, hidden]."""
    fused = attention.qkv(read)
    fused = fused.view(fused.shape[0], -1, attention.head_dim)
    query_key, value = fused[:, : attention.rotated_heads], fused[:, attention.rotated_heads :]
    return query_key if attention.head_norm is None else attention.head_norm(query_key), value


def _attend(
    attention: Attention,
    query_key: torch.Tensor,
    value: torch.Tensor,
    angles: Angles,
    batch: AttentionBatch,
    store_layer: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Attend as `attention` does → [n, heads * head]."""
    scale = attention.head_dim**-0.5
    call = AttentionCall(query_key, value, angles, store_layer, batch, scale, window, attention.kv_scales)
    return attend(attention.backend, call).flatten(1)
