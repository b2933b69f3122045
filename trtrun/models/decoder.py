"""A decoder-only transformer as one rank of a group runs it: embedding, layers of whatever kind, norm and head.

A forward issues the same operations whatever the tensors hold and never reads a value back to the host, so it can be
captured in a CUDA graph. On the CPU, in bfloat16 and by its own kernels in float32, a token's result is bit-equal
whatever else is in the batch.

`Taps` are copies of the residual stream at some boundaries, for drafters that read hidden states. Boundary 0 is the
embedding, i what enters layer i, `num_layers` what leaves the last layer, and `num_layers + 1` the normed end that
logits are made of. transformers' `output_hidden_states` is boundaries 0 to `num_layers - 1`, and last the normed end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from trtrun.attention.backend import AttentionBackend
from trtrun.attention.latents import LatentBackend
from trtrun.errors import ConfigError
from trtrun.kernels.arguments import Delta
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.store import KVStore
from trtrun.kvcache.tile_widths import prompt_width
from trtrun.layers.decoder_layer import Attention, RMSNorm
from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
from trtrun.layers.experts import Padding
from trtrun.layers.layer_inputs import LayerInputs
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.layers.uniform_layers import are_uniform
from trtrun.linear.layer import AdaptedLayers
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import Layer
from trtrun.tensors import inference
from trtrun.weights.weight import Share


@dataclass(frozen=True)
class Taps:
    """What one forward keeps, and where.

    Attributes:
        boundaries: that are kept, in the order in which they are handed out.
        kept: [tokens, boundaries, hidden] in the model's dtype on its device, which the forward fills.
    """

    boundaries: tuple[int, ...]
    kept: torch.Tensor

    def keep(self, boundary: int, hidden: torch.Tensor) -> None:
        """Copy hidden [tokens, hidden], the stream at a boundary, where that is asked for."""
        if boundary in self.boundaries:
            self.kept[:, self.boundaries.index(boundary)].copy_(hidden)

    def read_from(self, boundary: int) -> bool:
        """Whether any boundary from this one on is kept."""
        return max(self.boundaries) >= boundary


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The boundaries of a model that are to be kept.

    Raises:
        ConfigError: one is not among the model's, or stands there twice.
    """
    for boundary in boundaries:
        if not 0 <= boundary <= num_layers + 1:
            raise ConfigError(
                f"the drafter reads hidden states at boundary {boundary}, but a target of {num_layers} layers has "
                f"0 to {num_layers + 1}"
            )
    if len(set(boundaries)) < len(boundaries):
        raise ConfigError(f"the drafter reads hidden states at a boundary twice: {list(boundaries)}")
    return tuple(boundaries)


_FIRST_AND_LAST = 2
"""Layers that together run what all do, where all are alike: the first has nothing to add to the stream, and behind
the last one tokens are left out."""


class CausalLM:
    """A whole model on one rank.

    Attributes:
        config: shapes of the whole model.
        dtype, device: of weights and activations.
        keeps: what this rank keeps of rows for each layer, in its KVStore.
        prompt_width: queries of the rows that prompts are best cut into; None where each is best one row.
        adapted: its layers that may have adapters; None where none may.
        has_like_layers: whether all layers run the same kernels.
        shortens_first_runs: whether `first_run` leaves any out. Ranks of a group must do so alike, as layers meet in
            sums: where there are several, whoever has asked all of them sets it.
        has_overflowed: on the CPU, whether any token so far had keys or values that may not be finite.
        on_layer: called after each layer of a forward: on CUDA once the layer is launched, and not at all where a graph
            is replayed. It must be quick and touch no tensor. None at first.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: VocabularyEmbedding,
        layers: Sequence[Layer],
        final_norm: RMSNorm,
        head: VocabularyHead,
        rotary: Sequence[RotaryEmbedding],
        attention: Mapping[int, AttentionBackend | LatentBackend],
        share: Share,
        adapted: AdaptedLayers | None = None,
        layer_inputs: LayerInputs | None = None,
        padding: Padding | None = None,
    ) -> None:
        """Put the parts together; `rotary` is of each layer, the same object where layers rotate alike, and `attention`
        for each size of heads."""
        self.config = config
        self.dtype = embedding.weight.dtype
        self.device = embedding.weight.device
        self.keeps = config.keeps(share)
        self.prompt_width = prompt_width(
            attention[config.head_dim].tile, len(config.queries.units(share)), len(config.keys.units(share))
        )
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._rotary = list(dict.fromkeys(rotary))
        self._rotary_of_layer = [self._rotary.index(table) for table in rotary]
        self._attention = attention
        self._layer_inputs = layer_inputs
        self._padding = padding or Padding()
        self.adapted = adapted
        self.on_layer: Callable[[], None] | None = None
        self.has_like_layers = are_uniform(layers)
        self.shortens_first_runs = share.size == 1 and self.has_like_layers
        self.has_overflowed = False

    @property
    def reads_logits(self) -> bool:
        """Whether this rank reads what `logits` returns."""
        return self._head.is_read

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Within it forwards end after the first layers: for who asks what runs, and not what comes out."""
        layers, self._layers = self._layers, self._layers[:num_layers]
        try:
            yield
        finally:
            self._layers = layers

    def first_run(self) -> AbstractContextManager[None]:
        """Within it forwards without taps may end after the first layers, where all run the same kernels: for who only
        wants each of them to have run once."""
        return self.shortened(_FIRST_AND_LAST) if self.shortens_first_runs else nullcontext()

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; needed before a graph is captured, free otherwise."""
        for table in self._rotary:
            table.reserve(positions)

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
            positions: [tokens] int64 on the device: position of each token in its row; -1 is padding.
            attention: the segments; their block tables cover every position.
            store: this rank's KV store.
            wanted: [n] int64 on the device: tokens whose result is read; None for all, in their order.
            taps: get the residual stream of all tokens; None copies nothing.

        Returns:
            [n, hidden] after the final norm, equal on all ranks of the group.
        """
        # The block tables' width bounds every position, so the host can grow the tables without reading positions.
        self.reserve_positions(attention.block_size * max(item.block_tables.shape[1] for item in attention.segments))
        angles = [table.lookup(positions) for table in self._rotary]
        hidden = self._embedding(tokens)
        if self._layer_inputs is not None:
            self._layer_inputs.begin(tokens, hidden)
        self._padding.positions = positions
        delta: Delta | None = None
        behind_layers = len(self._layers)
        reads_end = taps is not None and taps.read_from(behind_layers)
        caches = store.of_layers(attention)
        if self.adapted is not None:
            self.adapted.begin(store.slots_of(attention))
        for index, layer in enumerate(self._layers):
            of_layer = angles[self._rotary_of_layer[index]]
            attended = layer.attend(hidden, delta, of_layer, caches[index])
            delta = None  # the stream has it by now: so its memory, which is that of experts' results, is free
            if taps is not None:
                taps.keep(index, hidden)
            if index == behind_layers - 1:
                self._look_for_overflow(attended)
                if wanted is not None and not reads_end:
                    hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
                    self._keep(wanted)
            delta = layer.feed_forward(hidden, attended) if len(hidden) else hidden
            if self.on_layer is not None:
                self.on_layer()
        self._padding.positions = None
        if self._layer_inputs is not None:
            self._layer_inputs.end()
        normed = hidden
        if len(hidden):
            normed = self._final_norm(hidden) if delta is None else self._final_norm.add(hidden, delta)
        if taps is None or not reads_end:
            return normed
        taps.keep(behind_layers, hidden)
        taps.keep(behind_layers + 1, normed)
        return normed if wanted is None else normed.index_select(0, wanted)

    def _keep(self, wanted: torch.Tensor) -> None:
        """From here on in the forward, only some of its tokens, [n] int64, go on."""
        if self.adapted is not None:
            self.adapted.keep(wanted)
        if self._layer_inputs is not None:
            self._layer_inputs.keep(wanted)
        self._padding.positions = None  # for one layer it is not worth to gather them

    @inference
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden], equal on all ranks of the group."""
        return self._embedding(tokens)

    @inference
    def stored_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden]: rows of the embedding without the model's factor, equal on all ranks."""
        return self._embedding.stored_rows(tokens)

    def _look_for_overflow(self, attended: torch.Tensor) -> None:
        """Look at what the last layer attended: a number that is none in any layer of a token shows there.

        On the CPU alone, where it costs microseconds; a sum of finite numbers that overflows does no harm.
        """
        if self.device.type == "cpu" and not self.has_overflowed:
            self.has_overflowed = not bool(attended.sum().isfinite())

    def attention_of(self, layer: int) -> Attention:
        """The attention of a layer, which keeps keys and values: for who attends in these."""
        found = getattr(self._layers[layer], "attention", None)
        assert isinstance(found, Attention), "the layer keeps keys and values"
        return found

    def rotary_of(self, layer: int) -> RotaryEmbedding:
        """How a layer rotates."""
        return self._rotary[self._rotary_of_layer[layer]]

    def copy_tokens(self, store: KVStore, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy all layers' keys and values of single tokens; see `AttentionBackend.copy_tokens`."""
        parts = zip(store.head_dims, store.parts(source, target), strict=True)
        for head_dim, (data, of_source, of_target) in parts:
            self._attention[head_dim].copy_tokens(data, of_source, of_target, offset)

    @inference
    def logits(self, hidden: torch.Tensor, *, widens: bool = True) -> torch.Tensor:
        """hidden [n, hidden] of `forward` → [n, vocab_size] float32, on the ranks that read them; not `widens` leaves
        that to who copies them (`VocabularyHead`)."""
        return self._head(hidden, widens=widens)
