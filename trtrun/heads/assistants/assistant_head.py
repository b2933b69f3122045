"""An assistant of Gemma 4 on one rank of its target: layers with queries alone, which attend in the target's keys and
values, and logits.

It is fed a row's newest token beside a hidden state of the target's size: at first the target's own, behind its final
norm, of the token before; then what `post_projection` made of its own state. All tokens that it drafts of a row are fed
at one position, that of the row's newest token, of which the target has no keys yet: it sees those before
(SinglePositionMultiTokenCandidateGenerator of transformers). Where transformers still has keys of a rejected token at
that very position these are not seen here.

Layers are shared out over the group as the target's are; the projections are computed on every rank, and logits are for
the rank that decides. It does not know tensors' names, rows or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel.communicator import Communicator
from trtrun.kernels.arguments import Delta
from trtrun.kvcache.segments import AttentionBatch
from trtrun.kvcache.specs import LayerSpecs
from trtrun.kvcache.store import KVStore
from trtrun.layers.decoder_layer import RMSNorm
from trtrun.layers.embedding import DECIDES, KnownLogits
from trtrun.layers.rotary import RotaryEmbedding
from trtrun.linear.layer import Linear
from trtrun.models.layer_plan import Layer
from trtrun.tensors import inference


@dataclass(frozen=True)
class ReadLayer:
    """One layer.

    Attributes:
        layer: what it computes.
        read: the target's layer in whose keys and values it attends.
        rotary: of that.
    """

    layer: Layer
    read: int
    rotary: RotaryEmbedding


class ClusteredLogits:
    """Logits of the tokens in those clusters that go best with a state.

    Args:
        centroids: states [n, hidden] to scores of clusters.
        lines: [V, hidden]: of the vocabulary head, one cluster behind the other, all of one size.
        tokens: [V] int64 on the device: of each line.
        num_chosen: clusters whose tokens get logits.
        communicator: of the target's tensor-parallel group.
    """

    def __init__(
        self,
        centroids: Linear,
        lines: torch.Tensor,
        tokens: torch.Tensor,
        num_chosen: int,
        communicator: Communicator,
    ) -> None:
        self._centroids = centroids
        self._lines = lines.view(centroids.out_features, -1, lines.shape[1])
        self._tokens = tokens.view(centroids.out_features, -1)
        self._num_chosen = num_chosen
        self._communicator = communicator

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [n, hidden] → [n, V] float32, -inf of tokens in other clusters; None on ranks that do not decide."""
        if self._communicator.rank != DECIDES:
            return None
        count = len(hidden)
        chosen = self._centroids(hidden).topk(self._num_chosen, dim=1).indices.flatten()
        lines = self._lines.index_select(0, chosen).view(count, -1, hidden.shape[1])
        scores = torch.bmm(lines, hidden.unsqueeze(2)).squeeze(2).float()
        every = torch.full((count, self._tokens.numel()), -torch.inf, dtype=torch.float32, device=hidden.device)
        return every.scatter_(1, self._tokens.index_select(0, chosen).view(count, -1), scores)

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of the rank that decides, on all ranks; see `KnownLogits.share`."""
        return tokens if self._communicator.size == 1 else self._communicator.broadcast(tokens, DECIDES)


class AssistantHead:
    """The assistant of a target; see `engine.heads.head_rows.FeatureLayers`. A state of it is what logits are made of,
    and behind that what the next step reads.

    Attributes:
        hidden_size: of its states: its own and the target's.
        dtype: of its activations.
        keeps: nothing.
        has_overflowed: never, as it writes no keys.
        share: see KnownLogits.
    """

    keeps: Sequence[LayerSpecs] = ()
    has_overflowed = False

    def __init__(
        self,
        *,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        before: Linear,
        layers: Sequence[ReadLayer],
        final_norm: RMSNorm,
        behind: Linear,
        logits: KnownLogits | ClusteredLogits,
        hidden_size: int,
        target_hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Put layers together.

        Args:
            embedding: tokens [n] int64 to [n, target's hidden], as the target embeds them.
            before: of both, [n, 2 * target's hidden], to [n, hidden].
            layers: in order.
            final_norm: behind the last.
            behind: [n, hidden] to [n, target's hidden].
            logits: of [n, hidden] behind the norm.
            hidden_size: of layers.
            target_hidden_size: of the target.
            dtype: of activations.
        """
        self._embedding = embedding
        self._before = before
        self._layers = layers
        self._final_norm = final_norm
        self._behind = behind
        self._logits = logits
        self._own = hidden_size
        self.hidden_size = hidden_size + target_hidden_size
        self.dtype = dtype
        self.share = logits.share

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; free otherwise."""
        for layer in self._layers:
            layer.rotary.reserve(positions)

    @inference
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, 1, target's hidden] → [n, hidden_size] that the first step reads."""
        return torch.nn.functional.pad(tapped[:, 0], (self._own, 0))

    @inference
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Feed tokens. Collective over the group.

        Args:
            tokens: [n] int64 on the device: what stands last in each row, or is drafted behind it.
            positions: [n] int64 on the device, 0 for padding: of the last key that each of them sees, one before that
                of the row's newest token.
            hidden: [n, hidden_size] of `fuse`, or of the step before.
            attention: the segments, at these positions; their block tables cover the newest token's, too.
            store: the target's on this rank.

        Returns:
            [n, hidden_size], equal on all ranks.
        """
        positions = positions + 1
        self.reserve_positions(attention.block_size * max(item.block_tables.shape[1] for item in attention.segments))
        tables = {layer.rotary: None for layer in self._layers}
        angles = {table: table.lookup(positions) for table in tables}
        caches = store.of_layers(attention)
        stream = self._before(torch.cat((self._embedding(tokens), hidden[:, self._own :]), dim=1))
        delta: Delta | None = None
        for one in self._layers:
            attended = one.layer.attend(stream, delta, angles[one.rotary], caches[one.read])
            delta = one.layer.feed_forward(stream, attended)
        normed = self._final_norm(stream) if delta is None else self._final_norm.add(stream, delta)
        return torch.cat((normed, self._behind(normed)), dim=1)

    @inference
    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """What follows the tokens that `forward` was fed. Collective over the group.

        Args:
            state: [n, hidden_size] of `forward`.

        Returns:
            [n, the target's vocab_size] float32, -inf where a token is in no chosen cluster; None on ranks that do not
            decide.
        """
        return self._logits(state[:, : self._own].contiguous())
