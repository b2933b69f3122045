"""Heads on one rank: beside the target's share, or on a rank of their own, with what they need of the target's weights.

It knows the configuration, plans of heads and bytes. It does not know engines, or how rounds run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parallel.communicator import Communicator
from parallel.groups import Groups
from trtrun.configuration.config import RuntimeConfig
from trtrun.heads.heads import HEADS_FILES, HeadsPlan, HeadsTarget
from trtrun.kvcache.sizing import SlotMemory
from trtrun.loading.loading import (
    LoadReport,
    embedding_and_head_bytes,
    heads_bytes,
    load_embedding_and_head,
    load_heads,
)
from trtrun.loading.model_settings import JobModels
from trtrun.memory.memory_requirements import head_working_bytes, kv_bytes_per_block, resolve_dtype
from trtrun.models.config import ModelConfig
from trtrun.start.job_spec import JobSpec
from trtrun.weights.model_files import hash_model_files


def demand_apart(config: RuntimeConfig, models: JobModels, plan: HeadsPlan, device: torch.device) -> SlotMemory:
    """What heads on a rank of their own need there."""
    dtype = resolve_dtype(config.target, models.target)
    assert plan.stored is not None, "heads that keep nothing sit on the target's ranks"
    return SlotMemory(
        heads_bytes(plan, 0, 1, dtype) + _ends_bytes(config, models.target, plan, device),
        kv_bytes_per_block(config, plan.stored, 1, dtype),
        head_working_bytes(config, models, plan, device),
    )


def _ends_bytes(config: RuntimeConfig, target: ModelConfig, plan: HeadsPlan, device: torch.device) -> int:
    dtype = resolve_dtype(config.target, target)
    return embedding_and_head_bytes(target, plan.target_weights(target), dtype, device, config.target.quantization)


@dataclass
class RankHeads:
    """What one rank knows of heads, and has of them.

    Attributes:
        spec: of the job.
        plan: of the heads, on ranks that have them and on the target's, which tap what they read; None elsewhere.
        are_here: whether this rank has them.
        loaded: what they compute; None until then, and where they are not.
        report: what loading them cost.
    """

    spec: JobSpec
    plan: HeadsPlan | None
    are_here: bool
    loaded: object | None = None
    report: LoadReport = field(default_factory=lambda: LoadReport(0, 0))

    @classmethod
    def read(cls, spec: JobSpec, groups: Groups) -> RankHeads:
        """Look at the heads' directory, where a rank with these groups has use for it.

        Raises:
            CheckpointError: there are none, or they do not fit the target.
        """
        group = groups.draft if spec.config.heads_apart else groups.target
        knows = group is not None or groups.target is not None
        plan = spec.heads if knows else None
        return cls(spec, plan, plan is not None and group is not None)

    @property
    def plan_here(self) -> HeadsPlan | None:
        """Of heads that this rank has."""
        return self.plan if self.are_here else None

    @property
    def plan_apart(self) -> HeadsPlan | None:
        """Of heads that this rank has, and nothing else."""
        return self.plan_here if self.spec.config.heads_apart else None

    @property
    def keep(self) -> bool:
        """Whether this rank has heads that keep keys and values of every token."""
        return self.plan_here is not None and self.plan_here.stored is not None

    def load_beside(self, target: HeadsTarget, communicator: Communicator) -> None:
        """Read this rank's share of them, beside the target or what there is of it.

        Raises:
            CheckpointError: a tensor holds what it must not.
        """
        if self.plan_here is not None:
            self.loaded, self.report = load_heads(
                self.plan_here, target, communicator, target.dtype, kv_format=self.spec.config.kv_cache.dtype
            )

    def load_apart(self, communicator: Communicator, device: torch.device) -> None:
        """Read them on a rank of their own, and what of the target they compute with.

        Raises:
            CheckpointError: anything wrong with the files, in one line.
        """
        plan, target, section = self.plan_apart, self.spec.target, self.spec.config.target
        assert plan is not None
        dtype = resolve_dtype(section, target)
        loaded = load_embedding_and_head(section, target, plan.target_weights(target), communicator, device, dtype)
        self.load_beside(loaded, communicator)
        size = self.report.shard_bytes + _ends_bytes(self.spec.config, target, plan, device)
        self.report = LoadReport(self.report.bytes_read + loaded.bytes_read, size)

    def hashes(self) -> list[str]:
        """Of the files that this rank has read: the heads', and where it has nothing else the target's."""
        if self.plan_here is None:
            return []
        section = self.spec.config.target
        of_target = [hash_model_files(section.model, section.load_format != "dummy")]
        own = hash_model_files(self.plan_here.files.path, single_files=HEADS_FILES)
        return [*(of_target if self.plan_apart is not None else []), own]
