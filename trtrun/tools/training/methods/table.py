"""The methods of training by name, what each of them must do, and what it is made from.

A method is a module beside this one, with a function `make`, and an entry in METHODS. The table itself loads neither
torch nor a method, so that a wrong name is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trtrun.errors import ConfigError, nearest
from trtrun.tools.training.settings import TrainingSettings

if TYPE_CHECKING:
    import torch

    from trtrun.tools.training.data import DataRow
    from trtrun.tools.training.models import Target


@dataclass(frozen=True)
class MethodContext:
    """Models and settings of a run.

    Attributes:
        settings: of the run.
        device: to compute on.
        target: frozen; None where the method does without it.
        target_path: of its checkpoint.
        target_vocab_size: tokens that it knows, padding included.
        draft: checkpoint to start from, if there is one.
        rows: to train on.
    """

    settings: TrainingSettings
    device: torch.device
    target: Target | None
    target_path: Path
    target_vocab_size: int
    draft: Path | None
    rows: Sequence[DataRow]


class DraftTraining(Protocol):
    """One method, with the drafter that it trains.

    Attributes:
        model: what is trained; its parameters are float32.
        num_depths: depths that have a loss of their own: draft tokens of a round.
    """

    model: Any
    num_depths: int

    def check(self, rows: Sequence[DataRow]) -> None:
        """Raise ConfigError for rows that cannot be trained on."""

    def prepare(self, rows: Sequence[DataRow], step: int, indexes: Sequence[int]) -> Any:
        """What `counts` and `losses` take of some rows. Random choices depend on the seed, the step and each row's
        place in the step's batch alone, never on the ranks."""

    def counts(self, prepared: Any) -> torch.Tensor:
        """[num_depths] float32: places whose loss counts, by depth."""

    def losses(self, prepared: Any) -> torch.Tensor:
        """[num_depths] float32: the loss by depth, summed over places; with gradients."""

    def matches(self, rows: Sequence[DataRow]) -> list[torch.Tensor]:
        """Whether greedy draft tokens are the data's: for each row [places, num_depths] bool on the CPU.

        Place t is where t tokens of the completion are known; its drafts are for t + 1, t + 2, …, and those beyond the
        row's end are no match.
        """

    def finish(self) -> None:
        """Round the weights to what `save` writes, so that what is measured is what is written."""

    def save(self, directory: Path) -> None:
        """Write the drafter's config.json, weights and what else runtimes read, into an empty directory."""


@dataclass(frozen=True)
class Method:
    """An entry of the table.

    Attributes:
        module: its `make` loads the drafter of a MethodContext.
        needs_target: tells of the settings whether the target is run.
        starts_from_draft: whether it trains the weights of a checkpoint; others make a drafter for the target.
        defaults: of settings, where they are not those of TrainingSettings.
    """

    module: str
    needs_target: Callable[[TrainingSettings], bool]
    starts_from_draft: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def make(self, context: MethodContext) -> DraftTraining:
        """Load the drafter; see the module for what is raised."""
        training: DraftTraining = import_module(self.module).make(context)
        return training


METHODS: dict[str, Method] = {
    "pard": Method(
        "trtrun.tools.training.methods.pard",
        needs_target=lambda settings: settings.divergence > 0,
        starts_from_draft=True,
    ),
    "medusa": Method("trtrun.tools.training.methods.medusa", needs_target=lambda settings: True),
    "eagle3": Method(
        "trtrun.tools.training.methods.eagle3",
        needs_target=lambda settings: True,
        # Those of SpecForge, and the weights of depths as the paper's authors have them.
        defaults={
            "num_tokens": 7,
            "learning_rate": 1e-4,
            "clip_norm": 0.5,
            "cross_entropy": 0.0,
            "depth_decay": 0.8,
        },
    ),
}
"""All methods by name."""


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METHODS:
        raise ConfigError(f"--method: unknown method '{name}'{nearest(name, METHODS)}")
    return METHODS[name]
