"""Heads that draft from what the target computes: what a method with heads has in its directory, told from headers.

A kind of heads is a function here by the name of its drafting method: it looks at a directory's tensors and plans what
each rank holds of them, as a family plans layers (layer_plan.py). Checks, `trtrun plan` and loading (loading.py) ask
plans and know no kind. Names and shapes of tensors say what heads are; a config.json counts for what these do not show.

It does without torch. It does not know what heads propose, or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import Quantization
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import ModelShape
from trtrun.registry import Registry
from trtrun.weights.checkpoint import SINGLE_FILE, Checkpoint
from trtrun.weights.weight import Share, Weight

if TYPE_CHECKING:
    import torch

    from parallel.communicator import Communicator
    from trtrun.weights.weight_reader import WeightReader

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""The name of FasterDecoding's trainer and of TGI, which may stand beside a model's own file."""

HEADS_FILES = (MEDUSA_FILE, SINGLE_FILE)
"""Names of a file with heads."""


class HeadsTarget(Protocol):
    """What heads know of the target: a whole model's rank, or its embedding and head (`TargetEmbeddingAndHead`)."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of its weights."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden]."""
        ...

    def stored_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] int64 → [n, hidden]: rows of the embedding as files have them, without the target's factor."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the end → [n, vocab_size] float32."""
        ...


class HeadsPlan(Protocol):
    """The heads of one directory, as far as they are used."""

    @property
    def files(self) -> Checkpoint | None:
        """Where they are, with headers read; None where these are the target's."""
        ...

    def held(self, weight: Weight) -> Quantization:
        """How a weight of theirs is held.

        Raises:
            CheckpointError: see `ModelConfig.quantization_of`.
        """
        ...

    @property
    def weights(self) -> Sequence[Weight]:
        """All that a rank holds of them, by shares."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """At which boundaries of the target's residual stream they read (`Taps`), in their order."""
        ...

    @property
    def stored(self) -> ModelShape | None:
        """Their layers that attend: in keys and values of every token, which they keep in blocks of their own beside
        the target's, or in those that the target keeps, and keep none. None where none attend."""
        ...

    @property
    def num_logits(self) -> int:
        """How many rows of logits they make of a row of the batch at a time."""
        ...

    def target_weights(self, target: ModelConfig) -> Sequence[Weight]:
        """Weights of the target that they compute with, too: its embedding, its head."""
        ...

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        """Upper bound of what a rank holds at once of each token that it feeds them, in activations of `item_bytes`
        each; 0 where they are fed rows alone."""
        ...

    def describe(self) -> str:
        """Describe them in words, such as "5 Medusa heads"."""
        ...

    def build(self, reader: WeightReader, target: HeadsTarget, communicator: Communicator) -> object:
        """What computes them on this rank: whatever the method's drafter takes (speculation/protocols.py)."""
        ...


HEADS: Registry[Callable[[Path, ModelConfig, SpeculationSection], HeadsPlan]] = Registry("method with heads")
"""By method: (directory, target, the method's section) → plan. Raises CheckpointError where they are not heads for the
target, or cannot draft what the section asks for."""


def read_heads(path: Path, target: ModelConfig, section: SpeculationSection, num_ranks: int = 1) -> HeadsPlan:
    """The heads in a directory, of the drafting method that the section names.

    Raises:
        CheckpointError: the directory has none, they do not fit the target, or cannot be shared out over its
            `num_ranks` ranks; one line.
    """
    try:
        plan = HEADS.get(section.method)(path, target, section)
        for weight in plan.weights:
            weight.cut(Share(0, num_ranks))
        return plan
    except CheckpointError as error:
        raise type(error)(f"heads: {error}") from None
