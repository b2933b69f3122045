"""What `trtrun train-drafter` was asked for, beside the configuration. Plain data, quick to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtrun.tools.training.settings import TrainingSettings


@dataclass(frozen=True)
class TrainOptions:
    """Files and settings.

    Attributes:
        data: JSON lines files of training data.
        output: directory of the drafter.
        start: checkpoint to start from; None takes the configuration's draft.
        resume: go on from the last checkpoint in `output`.
        settings: of the training.
    """

    data: Sequence[Path]
    output: Path
    start: Path | None
    resume: bool
    settings: TrainingSettings
