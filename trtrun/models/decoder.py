"""The decoder-only transformer that Llama, Mistral, Qwen2 and Qwen3 share, as one rank of a group runs it.

It knows weights on this rank, the paged KV store and attention segments. It does not know requests, phases or files.
A forward issues the same operations whatever the tensors hold and never reads a value back to the host, so it can be
captured in a CUDA graph. In bfloat16 on the CPU a token's result is bit-equal whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtrun.attention.backend import AttentionBackend, attend
from trtrun.kernels.rounded_rows import Activations
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.store import KVStore
from trtrun.kvcache.tile_widths import prompt_width
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.layers.mlp import GatedMLP, RowParallelLinear
from trtrun.layers.norm import RMSNorm
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.layer import Linear
from trtrun.models.config import ModelConfig
from trtrun.models.taps import Taps
from trtrun.tensors import inference


@dataclass
class DecoderLayer:
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream.

    Attributes:
        qkv: hidden to this rank's query heads, key heads, value heads, in this order.
        qk_norm: per-head norm of queries and keys (weight [heads + kv_heads, head_dim]), where the model has one.
        window: sliding window of attention, None for the whole context.
    """

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: RowParallelLinear
    post_attention_norm: RMSNorm
    mlp: GatedMLP
    attention: AttentionBackend
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
        store_layer: torch.Tensor,
    ) -> torch.Tensor:
        """The layer up to its attention, writing the tokens' keys and values.

        Args:
            hidden: [tokens, hidden], the residual stream, to which `delta` is added in place.
            delta: what the layer before left to add to it; None at the first.
            angles: of rotary position embedding.
            batch: the segments.
            store_layer: keys and values of this layer.

        Returns:
            [tokens, this rank's heads * head_dim], for `feed_forward`.
        """
        fused = self.qkv(_normalise(self.input_norm, hidden, delta, self.qkv.takes_rounded_rows)).view(
            hidden.shape[0], -1, self.head_dim
        )
        rotated_heads = self.heads + self.kv_heads
        query_key, value = fused[:, :rotated_heads], fused[:, rotated_heads:]
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        scale = self.head_dim**-0.5
        window = self.window
        return attend(self.attention, query_key, value, angles, store_layer, batch, scale, window).flatten(1)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, token by token.

        Args:
            hidden: [n, hidden], the residual stream, which is overwritten.
            attended: [n, this rank's heads * head_dim], contiguous, of the same tokens.

        Returns:
            [n, hidden]: what is left to add to the stream, so that adding and the next norm can be one operation.
        """
        delta = self.output(attended)
        return self.mlp(_normalise(self.post_attention_norm, hidden, delta, self.mlp.takes_rounded_rows))


def _normalise(norm: RMSNorm, hidden: torch.Tensor, delta: torch.Tensor | None, rounds: bool) -> Activations:
    """hidden += delta, in place, where there is one, and the norm of it, rounded where the layer behind takes that."""
    if rounds:
        return norm.rounded(hidden, delta)
    return norm(hidden) if delta is None else norm.add(hidden, delta)


class CausalLM:
    """A whole model on one rank.

    Attributes:
        config: shapes of the whole model.
        dtype, device: of weights and activations.
        kv_heads: KV heads that this rank holds, for its KVStore.
        has_overflowed: on the CPU, whether any token so far had keys or values that may not be finite.
        on_layer: called after each layer of a forward: on CUDA once the layer is launched, and not at all where a graph
            is replayed. It must be quick and touch no tensor. None at first.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: VocabularyEmbedding,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: VocabularyHead,
        rotary: RotaryEmbedding,
    ) -> None:
        self.config = config
        self.dtype = embedding.weight.dtype
        self.device = embedding.weight.device
        self.kv_heads = layers[0].kv_heads
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = rotary
        self.on_layer: Callable[[], None] | None = None
        self.has_overflowed = False

    @property
    def prompt_width(self) -> int | None:
        """Queries of the rows that prompts are best cut into; None where each is best one row."""
        layer = self._layers[0]
        return prompt_width(layer.attention.tile, layer.heads, layer.kv_heads)

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; needed before a graph is captured, free otherwise."""
        self._rotary.reserve(positions)

    @inference
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
        wanted: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Run tokens through the model, writing their keys and values.

        Behind the last layer's attention nothing depends on tokens whose result is not wanted, so they end there,
        unless what is behind it is tapped.

        Args:
            tokens: [tokens] int64 on the device, in the order of the batch's segments.
            positions: [tokens] int64 on the device: position of each token in its row, 0 for padding.
            attention: the segments; their block tables cover every position.
            store: this rank's KV store.
            wanted: [n] int64 on the device: tokens whose result is read; None for all, in their order.
            taps: get the residual stream of all tokens; None copies nothing.

        Returns:
            [n, hidden] after the final norm, equal on all ranks of the group.
        """
        # The block tables' width bounds every position, so the host can grow the tables without reading positions.
        self._rotary.reserve(attention.block_size * max(item.block_tables.shape[1] for item in attention.segments))
        angles = self._rotary.lookup(positions)
        hidden = self._embedding(tokens)
        delta = None
        behind_layers = len(self._layers)
        reads_end = taps is not None and taps.read_from(behind_layers)
        for index, layer in enumerate(self._layers):
            attended = layer.attend(hidden, delta, angles, attention, store.layer(index))
            if taps is not None:
                taps.keep(index, hidden)  # what the layer before left to add is in it by now
            if index == behind_layers - 1:
                self._look_for_overflow(attended)
                if wanted is not None and not reads_end:
                    hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
            delta = layer.feed_forward(hidden, attended) if len(hidden) else hidden
            if self.on_layer is not None:
                self.on_layer()
        assert delta is not None, "a model has a layer at least"
        normed = self._final_norm.add(hidden, delta) if len(hidden) else hidden
        if taps is None or not reads_end:
            return normed
        taps.keep(behind_layers, hidden)
        taps.keep(behind_layers + 1, normed)
        return normed if wanted is None else normed.index_select(0, wanted)

    def _look_for_overflow(self, attended: torch.Tensor) -> None:
        """Look at what the last layer attended: a number that is none in any layer of a token shows there.

        On the CPU alone, where it costs microseconds; a sum of finite numbers that overflows does no harm.
        """
        if self.device.type == "cpu" and not self.has_overflowed:
            self.has_overflowed = not bool(attended.sum().isfinite())

    def copy_tokens(self, store: KVStore, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy all layers' keys and values of single tokens; see `AttentionBackend.copy_tokens`."""
        self._layers[0].attention.copy_tokens(store.data, source, target, offset)

    @inference
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] of `forward` → [n, vocab_size] float32, on the ranks that read them (`VocabularyHead`)."""
        return self._head(hidden)
