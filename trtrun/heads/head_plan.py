"""The one plan of heads that are decoder layers over a fusion of the target's hidden states: EAGLE, EAGLE-3, DFlash and
DSpark say beside it what is their own (eagle_plan.py, dflash_plan.py).

It needs no torch but where it builds. Names of tensors come from the reader of files (head_reading.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.layers.rope import RopeConfig
from trtrun.linear.quantization import QUANTIZATIONS, Quantization
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.layer_plan import ModelShape
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.weight import Axis, StoredTensor, Weight

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.heads.decoder_head import HeadParts
    from trtrun.heads.heads import HeadsTarget
    from trtrun.models.config import ModelConfig
    from trtrun.weights.weight_reader import WeightReader


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
class DecoderHeadPlan:
    """The head of a directory, a part of a `HeadsPlan`.

    Attributes:
        name: of its kind, for people.
        reads: of the target, for people.
        embedding_and_head: its own ones, or which of the target's it computes with.
        target_hidden_size: of the target.
        taps: boundaries of the target's residual stream that it reads.
        stored: shape of its layers.
        layers: ordinary layers, in order.
        rope: how it rotates.
        files_of: the target whose own files have it, as that has stored it; None where it has files of its own.
        plain: names of tensors that those files have plainly, whatever they say of others.
    """

    name: str
    reads: str
    embedding_and_head: EmbeddingAndHeadPlan
    target_hidden_size: int
    taps: tuple[int, ...]
    stored: ModelShape
    layers: tuple[DecoderPlan, ...]
    rope: RopeConfig
    files_of: ModelConfig | None = field(default=None, kw_only=True)
    plain: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def files(self) -> Checkpoint | None:
        """Where it is, with headers read; None where these are the target's."""
        return self.embedding_and_head.files

    def held(self, weight: Weight) -> Quantization:
        """How a weight of it is held.

        Raises:
            CheckpointError: see `ModelConfig.quantization_of`.
        """
        plain = QUANTIZATIONS.get("none")
        if self.files_of is None or self.plain.issuperset(part.name for part in weight.parts):
            return plain
        return self.files_of.quantization_of(weight, plain)

    @cached_property
    def weights(self) -> Sequence[Weight]:
        """All that a rank holds of it, by shares."""
        layers = (weight for layer in self.layers for weight in layer.weights())
        return [*self.embedding_and_head.weights(), *self.own_weights(), *layers]

    def own_weights(self) -> Sequence[Weight]:
        """Weights of its kind alone: the fusion, norms, and layers that are not ordinary."""
        raise NotImplementedError

    def target_weights(self, target: ModelConfig) -> Sequence[Weight]:
        """Weights of the target that it computes with, too."""
        return self.embedding_and_head.of_target(target)

    def build_parts(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> HeadParts:
        """Make what all kinds of heads have.

        Raises:
            CheckpointError: d2t and t2d do not agree, or name what is no token.
        """
        from trtrun.heads.decoder_head import HeadParts
        from trtrun.layers.rotary import RotaryEmbedding

        own = self.embedding_and_head.build(reader, target, communicator)
        return HeadParts(
            dtype=target.dtype,
            device=target.device,
            hidden_size=self.stored.hidden_size,
            keeps=self.stored.keeps(reader.share),
            rotary=RotaryEmbedding(self.rope, self.stored.head_dim, target.dtype, reader.device),
            embedding=own.embedding,
            logits=own.logits,
        )


def count_layers(count: int) -> str:
    """A number of layers, for people."""
    return "1 layer" if count == 1 else f"{count} layers"
