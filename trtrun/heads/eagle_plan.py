"""What an EAGLE or MTP head consists of on each rank of the target, and how it is built (EAGLE: Li et al. 2024,
arXiv:2401.15077; EAGLE-3: Li et al. 2025, arXiv:2503.01840; MTP: arXiv:2412.19437).

It knows weights and shapes. It does not know where files have them (eagle_layouts.py, mtp_layouts.py), or how a head
computes (heads/eagle_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from trtrun.heads.head_plan import DecoderHeadPlan, JoiningPlan, count_layers
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.decoder_plan import GatedMLPPlan
from trtrun.models.layer_plan import NormPlan
from trtrun.models.mtp_plan import MTPPlan
from trtrun.weights.weight import Share, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.eagle_head import EagleHead, FirstLayer, FusedLayer, JoinedLayer, MTPLayer, TapFusion
    from trtrun.heads.heads import HeadsTarget
    from trtrun.weights.weight_reader import WeightReader


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
        from trtrun.heads.eagle_head import TapFusion

        norms = [norm.build(reader) for norm in self.tap_norms]
        return TapFusion(
            reader.linear(*self.fc.both), norms, None if self.joint_norm is None else self.joint_norm.build(reader)
        )


class FirstLayerPlan(Protocol):
    """The first layer, which reads a token's embedding beside a hidden state."""

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        ...

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Upper bound of what a rank holds of a token in attention and behind it, in activations of `item_bytes`."""
        ...

    def build(self, reader: WeightReader) -> FirstLayer:
        """The layer on the reader's rank."""
        ...


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

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return (self.attention.token_numbers(share) + self.mlp.token_numbers(share)) * item_bytes

    def build(self, reader: WeightReader) -> JoinedLayer:
        """The layer on the reader's rank."""
        from trtrun.heads.eagle_head import JoinedLayer

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

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return (self.attention.token_numbers(share) + self.mlp.token_numbers(share)) * item_bytes

    def build(self, reader: WeightReader) -> FusedLayer:
        """The layer on the reader's rank."""
        from trtrun.heads.eagle_head import FusedLayer

        return FusedLayer(
            self.input_norm.build(reader),
            self.hidden_norm.build(reader),
            self.attention.build(reader),
            self.post_attention_norm.build(reader),
            self.mlp.build(reader),
            self.norm_before_residual,
        )


@dataclass(frozen=True)
class MTPLayerPlan:
    """A layer for multi-token prediction as the target's family plans it.

    Attributes:
        fc: of embedding and hidden state, in this order.
        mtp: the rest of it.
    """

    fc: JoiningPlan
    mtp: MTPPlan

    def weights(self) -> Sequence[Weight]:
        """All of the layer's."""
        norms = (self.mtp.embedding_norm.weight, self.mtp.hidden_norm.weight)
        return (*self.fc.weights(), *norms, *self.mtp.layer.weights())

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        return self.mtp.layer.token_bytes(share, item_bytes)

    def build(self, reader: WeightReader) -> MTPLayer:
        """The layer on the reader's rank."""
        from trtrun.heads.eagle_head import MTPLayer

        return MTPLayer(
            self.mtp.embedding_norm.build(reader),
            self.mtp.hidden_norm.build(reader),
            reader.linear(*self.fc.both),
            self.mtp.layer.build(reader),
        )


@dataclass(frozen=True)
class EaglePlan(DecoderHeadPlan):
    """The head of a directory; `layers` are those behind the first one.

    Attributes:
        fusion: what makes one hidden state of those at all taps; None where there is one, which is read as it is.
        first: its first layer.
        final_norm: behind the last layer; None where there is none, as in EAGLE.
        norm_output: whether the next step reads what leaves the final norm, not what enters it.
    """

    fusion: FusionPlan | None
    first: FirstLayerPlan
    final_norm: NormPlan | None
    norm_output: bool

    num_logits = 1

    @override
    def own_weights(self) -> Sequence[Weight]:
        fusion = () if self.fusion is None else self.fusion.weights()
        norm = () if self.final_norm is None else (self.final_norm.weight,)
        return [*fusion, *norm, *self.first.weights()]

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Bytes of states at the taps as they are gathered, normed and laid side by side; of its embedding, normed and
        beside the hidden state; and of what a layer holds."""
        hidden, taken = self.stored.hidden_size, len(self.taps) * self.target_hidden_size
        held = 3 * taken + 12 * hidden
        if share.size > 1:
            held += 3 * hidden * (share.size + 2)
        norms_in_float32 = 3 * max(hidden, taken, len(self.stored.queries.held(share))) * 4
        return held * item_bytes + self.first.token_bytes(share, item_bytes) + norms_in_float32

    def describe(self) -> str:
        """Describe it in words."""
        layers = count_layers(1 + len(self.layers))
        return f"{self.name} head of {layers} and {self.embedding_and_head.describe()}, reading {self.reads}"

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> EagleHead:
        """Make the head on this rank.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.heads.eagle_head import EagleHead

        return EagleHead(
            self.build_parts(reader, target, communicator),
            fusion=None if self.fusion is None else self.fusion.build(reader),
            first=self.first.build(reader),
            layers=[layer.build(reader) for layer in self.layers],
            final_norm=None if self.final_norm is None else self.final_norm.build(reader),
            norm_output=self.norm_output,
        )
