"""What a training run was asked for, and its ranks: one a device, each with both models whole, and none beside them.

It knows devices and how a job is started (`launch.jobs.mpi.job`). It does not know what ranks compute.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.jobs.mpi.job import Job
from parallel.topology import Slot, Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import is_unknown
from trtrun.configuration.topology import make_topology
from trtrun.configuration.yaml_source import read_values
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


@dataclass(frozen=True)
class TrainingTopology(Topology):
    """Data-parallel ranks. The runtime has no word for them: they count as target ranks of groups of one."""

    def describe(self, rank: int) -> str:
        """Name a rank for messages."""
        slot = self.slots[rank]
        return f"training rank {rank} ({f'{slot.host} {slot.device}'.strip()})"


def read_training_values(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """`read_values` for a training run: a file without a draft is one whose target runs alone, as the drafter is yet to
    be made.

    Raises:
        ConfigError: see `read_values`.
    """
    values = read_values(path, overrides)
    speculation = values.get("speculation") or {}
    # What is no method stays, for the configuration to say so.
    if values.get("draft") is None and isinstance(speculation, dict) and not is_unknown(speculation):
        values["speculation"] = {**speculation, "method": "none"}
    return values


def place_training_ranks(config: RuntimeConfig) -> Topology:
    """One rank for each device that the configuration names, the draft's first.

    Raises:
        PlacementError: the device lists do not fit together.
    """
    placed = make_topology(config)
    slots = tuple(Slot(slot.device, rank, None, rank, slot.host) for rank, slot in enumerate(placed.slots))
    return TrainingTopology(slots, slots[0].host)


@dataclass(frozen=True)
class TrainingJob(Job):
    """A job of training ranks."""

    def __post_init__(self) -> None:
        """Place the ranks."""
        super().__post_init__()
        object.__setattr__(self, "topology", place_training_ranks(self.config))
