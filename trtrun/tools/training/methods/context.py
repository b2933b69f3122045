"""What a method is made from. Plain data: it knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trtrun.tools.training.data import DataRow
from trtrun.tools.training.models import Target
from trtrun.tools.training.settings import TrainingSettings


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
