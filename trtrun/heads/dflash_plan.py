"""What a DFlash or DSpark head consists of on each rank of the target, and how it is built (DFlash:
arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

It knows weights and shapes. It does not know where files have them (dflash_layouts.py), or how a head computes
(heads/dflash_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from trtrun.heads.eagle_plan import JoiningPlan
from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.layers.rope import RopeConfig
from trtrun.models.layer_plan import DecoderPlan, ModelShape, NormPlan
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.dflash_head import DFlashHead, MarkovBias
    from trtrun.heads.heads import HeadsTarget
    from trtrun.models.config import ModelConfig
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class MarkovPlan:
    """DSpark's Markov head, of which all ranks have all.

    Attributes:
        before, behind: names of its matrices.
        target_vocab_size: tokens that may stand before.
        num_lines: tokens that the head knows.
        rank: numbers between.
        hidden_size: of the heads' states.
        gate: name in front of the gate's weight and bias; None without.
    """

    before: str
    behind: str
    target_vocab_size: int
    num_lines: int
    rank: int
    hidden_size: int
    gate: str | None

    @property
    def both(self) -> tuple[Weight, Weight]:
        """[target_vocab_size, rank] and [num_lines, rank]."""
        between = Axis(self.rank)
        before = Weight((StoredTensor(self.before, (Axis(self.target_vocab_size), between)),))
        return before, Weight((StoredTensor(self.behind, (Axis(self.num_lines), between)),), "linear")

    @property
    def of_gate(self) -> Sequence[Weight]:
        """[rank, hidden + rank] and [rank], where there is a gate."""
        if self.gate is None:
            return ()
        shape = (Axis(self.rank), Axis(self.hidden_size + self.rank))
        weight = Weight((StoredTensor(f"{self.gate}.weight", shape),), "linear")
        return weight, Weight((StoredTensor(f"{self.gate}.bias", shape[:1]),))

    def weights(self) -> Sequence[Weight]:
        """All that there is."""
        return (*self.both, *self.of_gate)

    def build(self, reader: WeightReader) -> MarkovBias:
        """What computes it."""
        from trtrun.heads.dflash_head import MarkovBias

        before, behind = self.both
        gate = reader.linear(*self.of_gate) if self.of_gate else None
        return MarkovBias(reader.tensor(before), reader.linear(behind), gate)


@dataclass(frozen=True)
class DFlashPlan:
    """The head of a directory.

    Attributes:
        name: of its kind, for people.
        reads: of the target, for people.
        embedding_and_head: the own ones, or which of the target's it computes with.
        target_hidden_size: of the target.
        taps: see HeadsPlan.
        stored: shape of its layers.
        fc: of the target's states at all taps, side by side.
        context_norm: behind fc.
        layers: in order.
        final_norm: behind the last.
        rope: how it rotates.
        mask_token: stands for a token that is not known.
        from_newest: whether what is behind the row's newest token says the first draft token; else what is behind the
            first mask token does.
        is_causal: whether tokens of a draft do not see those behind them.
        markov: what the token before adds to logits; None without.
        num_logits: tokens that are drafted of a row.
        block: that it was trained to look at together, the row's newest one included.
    """

    name: str
    reads: str
    embedding_and_head: EmbeddingAndHeadPlan
    target_hidden_size: int
    taps: tuple[int, ...]
    stored: ModelShape
    fc: JoiningPlan
    context_norm: NormPlan
    layers: tuple[DecoderPlan, ...]
    final_norm: NormPlan
    rope: RopeConfig
    mask_token: int
    from_newest: bool
    is_causal: bool
    markov: MarkovPlan | None
    num_logits: int
    block: int

    @property
    def files(self) -> Checkpoint:
        return self.embedding_and_head.files

    @cached_property
    def weights(self) -> Sequence[Weight]:
        own = [*self.embedding_and_head.weights(), *(() if self.markov is None else self.markov.weights())]
        norms = (self.context_norm.weight, self.final_norm.weight)
        return [*own, *self.fc.weights(), *norms, *(weight for layer in self.layers for weight in layer.weights())]

    def target_weights(self, target: ModelConfig) -> Sequence[Weight]:
        return self.embedding_and_head.of_target(target)

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Bytes of states at the taps as they are gathered and laid side by side, and of what a layer holds, whose
        queries and keys are rotated by themselves, too.
        """
        shape, taken = self.stored, len(self.taps) * self.target_hidden_size
        rotated = len(shape.queries.held(share)) + 2 * len(shape.keys.held(share))
        return (3 * taken + 6 * shape.hidden_size + 3 * rotated) * item_bytes + self.layers[0].token_bytes(
            share, item_bytes
        )

    def describe(self) -> str:
        count = len(self.layers)
        layers = "1 layer" if count == 1 else f"{count} layers"
        markov = "" if self.markov is None else " and a Markov head"
        known = f"{self.embedding_and_head.describe()}, blocks of {self.block}"
        return f"{self.name} head of {layers}{markov}, {known}, reading {self.reads}"

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> DFlashHead:
        """Make the head on this rank.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.heads.dflash_head import DFlashHead
        from trtrun.layers.rotary import RotaryEmbedding

        own = self.embedding_and_head.build(reader, target, communicator)
        return DFlashHead(
            dtype=target.dtype,
            device=target.device,
            hidden_size=self.stored.hidden_size,
            kv_heads=len(self.stored.keys.units(reader.share)),
            head_dim=self.stored.head_dim,
            fc=reader.linear(*self.fc.both),
            context_norm=self.context_norm.build(reader),
            layers=[layer.build(reader) for layer in self.layers],
            final_norm=self.final_norm.build(reader),
            rotary=RotaryEmbedding(self.rope, self.stored.head_dim, target.dtype, reader.device),
            embedding=own.embedding,
            logits=own.logits,
            markov=None if self.markov is None else self.markov.build(reader),
            mask_token=self.mask_token,
            from_newest=self.from_newest,
            is_causal=self.is_causal,
        )
