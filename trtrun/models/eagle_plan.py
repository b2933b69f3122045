"""What an EAGLE head consists of on each rank of the target, and how it is built (EAGLE: Li et al. 2024,
arXiv:2401.15077; EAGLE-3: Li et al. 2025, arXiv:2503.01840).

It knows weights and shapes. It does not know where files have them (eagle_layouts.py, eagle3_layouts.py), or how a head
computes (layers/eagle_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.errors import CheckpointError
from trtrun.layers.rope import RopeConfig
from trtrun.models.blocks import AttentionPlan, DecoderPlan, GatedMLPPlan, NormPlan
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.layer_plan import ModelShape
from trtrun.models.weights import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from parallel.communicator import Communicator
    from trtrun.layers.eagle_head import EagleHead, FusedLayer, JoinedLayer, TapFusion
    from trtrun.models.config import ModelConfig
    from trtrun.models.heads import HeadsTarget
    from trtrun.models.weight_reader import WeightReader


@dataclass(frozen=True)
class JoiningPlan:
    """fc, of which all ranks have all: [inputs] to [outputs]. Names of its weight, and of its bias where it has one."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int

    @property
    def both(self) -> tuple[Weight, Weight | None]:
        """The weight [outputs, inputs] and the bias [outputs]."""
        made, taken = Axis(self.outputs), Axis(self.inputs)
        weight = Weight((StoredTensor(self.weight, (made, taken)),), "linear")
        return weight, None if self.bias is None else Weight((StoredTensor(self.bias, (made,)),))

    def weights(self) -> Sequence[Weight]:
        """All that there is."""
        return [weight for weight in self.both if weight is not None]


@dataclass(frozen=True)
class FusionPlan:
    """What makes one hidden state of the target's at all taps, in EAGLE-3.

    Attributes:
        fc: of all of them side by side.
        tap_norms: of the state at each tap, before fc; none where it has none.
        joint_norm: of the states at all taps as one, before fc; None where it has none.
    """

    fc: JoiningPlan
    tap_norms: tuple[NormPlan, ...]
    joint_norm: NormPlan | None

    def weights(self) -> Sequence[Weight]:
        """All that there is."""
        norms = (*self.tap_norms, self.joint_norm)
        return [*self.fc.weights(), *(norm.weight for norm in norms if norm is not None)]

    def build(self, reader: WeightReader) -> TapFusion:
        """What computes it on the reader's rank."""
        from trtrun.layers.eagle_head import TapFusion

        norms = [norm.build(reader) for norm in self.tap_norms]
        return TapFusion(
            reader.linear(*self.fc.both), norms, None if self.joint_norm is None else self.joint_norm.build(reader)
        )


@dataclass(frozen=True)
class JoinedLayerPlan:
    """The first layer of EAGLE: fc makes one state of a token's embedding and a hidden state.

    Attributes:
        fc: of embedding and hidden state, in this order.
        input_norm: in front of attention; None where there is none, as in the paper's.
    """

    fc: JoiningPlan
    input_norm: NormPlan | None
    attention: AttentionPlan
    post_attention_norm: NormPlan
    mlp: GatedMLPPlan

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        norms = [norm.weight for norm in (self.input_norm, self.post_attention_norm) if norm is not None]
        return (*self.fc.weights(), *norms, *self.attention.weights(), *self.mlp.weights())

    def build(self, reader: WeightReader) -> JoinedLayer:
        """The layer on the reader's rank."""
        from trtrun.layers.eagle_head import JoinedLayer

        return JoinedLayer(
            reader.linear(*self.fc.both),
            None if self.input_norm is None else self.input_norm.build(reader),
            self.attention.build(reader),
            self.post_attention_norm.build(reader),
            self.mlp.build(reader),
        )


@dataclass(frozen=True)
class FusedLayerPlan:
    """The first layer of EAGLE-3: its attention reads a token's embedding beside a hidden state, each behind a norm.

    Attributes:
        norm_before_residual: whether the residual stream is the normed hidden state.
    """

    input_norm: NormPlan
    hidden_norm: NormPlan
    attention: AttentionPlan
    post_attention_norm: NormPlan
    mlp: GatedMLPPlan
    norm_before_residual: bool

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        norms = (self.input_norm.weight, self.hidden_norm.weight, self.post_attention_norm.weight)
        return (*norms, *self.attention.weights(), *self.mlp.weights())

    def build(self, reader: WeightReader) -> FusedLayer:
        """The layer on the reader's rank."""
        from trtrun.layers.eagle_head import FusedLayer

        return FusedLayer(
            self.input_norm.build(reader),
            self.hidden_norm.build(reader),
            self.attention.build(reader),
            self.post_attention_norm.build(reader),
            self.mlp.build(reader),
            self.norm_before_residual,
        )


@dataclass(frozen=True)
class EaglePlan:
    """The head of a directory.

    Attributes:
        name: of its kind, for people.
        reads: of the target, for people.
        files: where it is.
        target_vocab_size, target_hidden_size: of the target.
        taps: see HeadsPlan.
        stored: shape of its layers.
        fusion: what makes one hidden state of those at all taps; None where there is one, which is read as it is.
        first: its first layer.
        layers: those behind it, which are ordinary ones.
        final_norm: behind the last layer; None where there is none, as in EAGLE.
        norm_output: whether the next step reads what leaves the final norm, not what enters it.
        rope: how it rotates.
        embedding: name of its embedding; None where the target's serves.
        head: name of the matrix to its vocabulary; None where the target's serves.
        num_lines: tokens of its vocabulary.
        d2t: name of the tensor that says how far each of its tokens is from the target's id; None where they agree.
        t2d: name of the tensor that says which of the target's tokens it knows; None where nothing does.
    """

    name: str
    reads: str
    files: Checkpoint
    target_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    stored: ModelShape
    fusion: FusionPlan | None
    first: FusedLayerPlan | JoinedLayerPlan
    layers: tuple[DecoderPlan, ...]
    final_norm: NormPlan | None
    norm_output: bool
    rope: RopeConfig
    embedding: str | None
    head: str | None
    num_lines: int
    d2t: str | None = None
    t2d: str | None = None

    num_logits = 1

    @property
    def embedding_weight(self) -> Weight | None:
        """[vocabulary share, hidden]."""
        return None if self.embedding is None else self._of_vocabulary(self.embedding, self.target_vocab_size)

    @property
    def head_weight(self) -> Weight | None:
        """[share of its vocabulary, hidden]."""
        if self.head is None:
            return None
        return Weight(self._of_vocabulary(self.head, self.num_lines).parts, "head")

    def _of_vocabulary(self, name: str, size: int) -> Weight:
        lines = Axis(size, loaded_vocabulary_range, padded=vocabulary_range)
        return Weight((StoredTensor(name, (lines, Axis(self.stored.hidden_size))),))

    @cached_property
    def weights(self) -> Sequence[Weight]:
        """See HeadsPlan."""
        ends = [weight for weight in (self.embedding_weight, self.head_weight) if weight is not None]
        ends += [] if self.fusion is None else self.fusion.weights()
        ends += [] if self.final_norm is None else [self.final_norm.weight]
        return [*ends, *self.first.weights(), *(weight for layer in self.layers for weight in layer.weights())]

    def ends_of(self, target: ModelConfig) -> Sequence[Weight]:
        """See HeadsPlan."""
        borrowed = ((self.embedding, target.embedding), (self.head, target.head))
        return [weight for own, weight in borrowed if own is None]

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """See HeadsPlan: states at the taps as they are gathered, normed and laid side by side; its embedding, normed
        and beside the hidden state; and what a layer holds."""
        hidden, taken = self.stored.hidden_size, len(self.taps) * self.target_hidden_size
        held = 3 * taken + 12 * hidden
        held += self.first.attention.token_numbers(share) + self.first.mlp.token_numbers(share)
        if share.size > 1:
            held += 3 * hidden * (share.size + 2)
        norms_in_float32 = 3 * max(hidden, taken, len(self.stored.queries.held(share))) * 4
        return held * item_bytes + norms_in_float32

    def describe(self) -> str:
        """See HeadsPlan."""
        count = 1 + len(self.layers)
        layers = "1 layer" if count == 1 else f"{count} layers"
        known = f"{self.num_lines} of {self.target_vocab_size} tokens"
        return f"{self.name} head of {layers} and {known}, reading {self.reads}"

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> EagleHead:
        """See HeadsPlan.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.layers.eagle_head import EagleHead
        from trtrun.layers.embedding import VocabularyEmbedding, VocabularyHead
        from trtrun.layers.rotary import RotaryEmbedding

        token_ids = self._read_token_ids()
        head_weight, embedding_weight = self.head_weight, self.embedding_weight
        logits = target.logits
        if head_weight is not None:
            logits = VocabularyHead(reader.linear(head_weight), self.num_lines, communicator, EagleHead.DECIDES)
        embedding = target.embed
        if embedding_weight is not None:
            first = vocabulary_range(self.target_vocab_size, *reader.share).start
            embedding = VocabularyEmbedding(reader.tensor(embedding_weight), first, communicator)
        return EagleHead(
            dtype=target.dtype,
            device=target.device,
            hidden_size=self.stored.hidden_size,
            kv_heads=len(self.stored.keys.units(reader.share)),
            head_dim=self.stored.head_dim,
            fusion=None if self.fusion is None else self.fusion.build(reader),
            first=self.first.build(reader),
            layers=[layer.build(reader) for layer in self.layers],
            final_norm=None if self.final_norm is None else self.final_norm.build(reader),
            norm_output=self.norm_output,
            rotary=RotaryEmbedding(self.rope, self.stored.head_dim, target.dtype, reader.device),
            embedding=embedding,
            logits=logits,
            token_ids=None if token_ids is None else token_ids.to(reader.device),
            vocab_size=self.target_vocab_size,
            communicator=communicator,
        )

    def _read_token_ids(self) -> torch.Tensor | None:
        """[num_lines] int64: the target's id of each of its tokens; None where they are the same."""
        import torch

        if self.d2t is None:
            return None
        file, own = self.files.file(self.d2t), torch.arange(self.num_lines)
        token_ids = own + self.files.integers(self.d2t)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self.target_vocab_size:
            raise CheckpointError(
                f"{file}: {self.d2t} leads to ids from {int(token_ids.min())} to {int(token_ids.max())}, but the "
                f"target has {self.target_vocab_size} tokens: it must hold how far each token's id is from the target's"
            )
        if len(set(token_ids.tolist())) < self.num_lines:
            raise CheckpointError(f"{file}: {self.d2t} leads to an id twice")
        if self.t2d is not None and self.num_lines < self.target_vocab_size:
            known = self.files.flags(self.t2d).nonzero().flatten()
            if not torch.equal(known, token_ids.sort().values):
                raise CheckpointError(
                    f"{file}: {self.d2t} and {self.t2d} do not name the same tokens: one of them was not saved"
                )
        elif self.num_lines < self.target_vocab_size and torch.equal(token_ids, own):
            raise CheckpointError(
                f"{file}: {self.d2t} is zero everywhere for {self.num_lines} of {self.target_vocab_size} tokens: it "
                "was not saved, and nothing says which tokens the head knows"
            )
        return None if torch.equal(token_ids, own) else token_ids
