"""What a DFlash or DSpark head consists of on each rank of the target, and how it is built (DFlash:
arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

It knows weights and shapes. It does not know where files have them (dflash_layouts.py), or how a head computes
(heads/dflash_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from trtrun.heads.head_plan import DecoderHeadPlan, JoiningPlan, count_layers
from trtrun.models.layer_plan import NormPlan
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.dflash_head import DFlashHead, MarkovBias
    from trtrun.heads.heads import HeadsTarget
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
class DFlashPlan(DecoderHeadPlan):
    """The head of a directory.

    Attributes:
        fc: of the target's states at all taps, side by side.
        context_norm: behind fc.
        final_norm: behind the last layer.
        mask_token: stands for a token that is not known.
        from_newest: whether what is behind the row's newest token says the first draft token; else what is behind the
            first mask token does.
        is_causal: whether tokens of a draft do not see those behind them.
        markov: what the token before adds to logits; None without.
        num_logits: tokens that are drafted of a row.
        block: that it was trained to look at together, the row's newest one included.
    """

    fc: JoiningPlan
    context_norm: NormPlan
    final_norm: NormPlan
    mask_token: int
    from_newest: bool
    is_causal: bool
    markov: MarkovPlan | None
    num_logits: int
    block: int

    @override
    def own_weights(self) -> Sequence[Weight]:
        markov = () if self.markov is None else self.markov.weights()
        return [*markov, *self.fc.weights(), self.context_norm.weight, self.final_norm.weight]

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Bytes of states at the taps as they are gathered and laid side by side, and of what a layer holds, whose
        queries and keys are rotated by themselves, too."""
        shape, taken = self.stored, len(self.taps) * self.target_hidden_size
        rotated = len(shape.queries.held(share)) + 2 * len(shape.keys.held(share))
        of_layer = self.layers[0].token_bytes(share, item_bytes)
        return (3 * taken + 6 * shape.hidden_size + 3 * rotated) * item_bytes + of_layer

    def describe(self) -> str:
        """Describe it in words."""
        layers = count_layers(len(self.layers))
        markov = "" if self.markov is None else " and a Markov head"
        known = f"{self.embedding_and_head.describe()}, blocks of {self.block}"
        return f"{self.name} head of {layers}{markov}, {known}, reading {self.reads}"

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> DFlashHead:
        """Make the head on this rank.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.heads.dflash_head import DFlashHead

        return DFlashHead(
            self.build_parts(reader, target, communicator),
            fc=reader.linear(*self.fc.both),
            context_norm=self.context_norm.build(reader),
            layers=[layer.build(reader) for layer in self.layers],
            final_norm=self.final_norm.build(reader),
            markov=None if self.markov is None else self.markov.build(reader),
            mask_token=self.mask_token,
            from_newest=self.from_newest,
            is_causal=self.is_causal,
        )
