"""Heads that draft on the target's ranks: what a method with heads has in its directory, told from headers.

A kind of heads is a function here by the name of its drafting method: it looks at a directory's tensors and plans what
each rank holds of them, as a family plans layers (layer_plan.py). Checks, `trtrun plan` and loading (loading.py) ask
plans and know no kind. Heads have no config.json that counts: names and shapes of tensors say what they are.

It does without torch. It does not know what heads propose, or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtrun.errors import CheckpointError
from trtrun.models.checkpoint import SINGLE_FILE, Checkpoint
from trtrun.models.config import ModelConfig
from trtrun.models.weights import Weight
from trtrun.registry import Registry

if TYPE_CHECKING:
    from parallel.communicator import Communicator
    from trtrun.models.decoder import CausalLM
    from trtrun.models.weight_reader import WeightReader

HEADS_FILES = ("medusa_lm_head.safetensors", SINGLE_FILE)
"""Names of a file with heads. The first is that of FasterDecoding's trainer and of TGI, beside a model's own file."""


class HeadsPlan(Protocol):
    """The heads of one directory, as far as they are used."""

    @property
    def files(self) -> Checkpoint:
        """Where they are, with headers read."""
        ...

    @property
    def weights(self) -> Sequence[Weight]:
        """All that a rank holds of them, by shares."""
        ...

    def describe(self) -> str:
        """For people, such as "5 Medusa heads"."""
        ...

    def build(self, reader: WeightReader, target: CausalLM, communicator: Communicator) -> object:
        """What computes them on this rank: whatever the method's drafter takes (speculation/protocols.py)."""
        ...


HEADS: Registry[Callable[[Path, ModelConfig, int], HeadsPlan]] = Registry("method with heads")
"""By method: (directory, target, draft_len) → plan. Raises CheckpointError where they are not heads for the target, or
too few to draft so many tokens."""


def read_heads(method: str, path: Path, target: ModelConfig, draft_len: int) -> HeadsPlan:
    """The heads in a directory, by the name of the drafting method.

    Raises:
        CheckpointError: the directory has none, or they do not fit the target; one line.
    """
    try:
        return HEADS.get(method)(path, target, draft_len)
    except CheckpointError as error:
        raise type(error)(f"heads: {error}") from None
