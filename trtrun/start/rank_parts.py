"""The engines of one rank before they are loaded: whose weights, in which group, and what they need of its device.

It knows a configuration, groups and the configurations of models. It does not load anything.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from parallel.communicator import Communicator
from parallel.groups import Groups
from trtrun.configuration.engine_sections import ModelSection
from trtrun.kvcache.sizing import SlotMemory
from trtrun.loading.loading import heads_bytes, shard_bytes
from trtrun.memory.memory_requirements import (
    StoreBytes,
    adapter_slots_bytes,
    engine_working_bytes,
    resolve_dtype,
    store_bytes,
)
from trtrun.memory.spaces import snapshot_bytes
from trtrun.models.config import ModelConfig
from trtrun.start.beside_engines import RankHeads, adapter_hashes, corpus_bytes, demand_apart
from trtrun.start.job_spec import JobSpec
from trtrun.weights.model_files import hash_model_files


class Part(NamedTuple):
    """One engine of a rank: its role, section, model configuration and tensor-parallel group."""

    role: str
    section: ModelSection
    model: ModelConfig
    communicator: Communicator


class RankParts:
    """The engines of one rank, the draft's first."""

    def __init__(
        self,
        spec: JobSpec,
        groups: Groups,
        heads: RankHeads,
        device: torch.device,
    ) -> None:
        """Name the engines of a rank with these groups."""
        self._spec = spec
        self._config = spec.config
        self._groups = groups
        self._heads = heads
        self._device = device

    @cached_property
    def all(self) -> list[Part]:
        """Engines with weights here."""
        parts: list[Part] = []
        if self._groups.draft is not None and self._config.draft is not None:
            parts.append(Part("draft", self._config.draft, self._spec.model_of("draft"), self._groups.draft))
        if self._groups.target is not None:
            parts.append(Part("target", self._config.target, self._spec.target, self._groups.target))
        return parts

    def demand(self) -> SlotMemory:
        """What this rank's engines need; the memory of a round by its shapes."""
        if self._heads.plan_apart is not None:
            return demand_apart(self._config, self._spec.models, self._heads.plan_apart, self._device)
        weights, working, snapshots, stored = 0, 0, 0, StoreBytes(0, 0)
        for role, section, model, communicator in self.all:
            dtype = resolve_dtype(section, model)
            heads = self._heads.plan if role == "target" else None
            heads_here = self._heads.plan_here if role == "target" else None
            weights += self.shard_bytes(section, model, communicator)
            weights += adapter_slots_bytes(self._config, role, section, model, communicator.rank)
            if heads_here is not None:
                weights += heads_bytes(heads_here, communicator.rank, communicator.size, dtype, self._device.type)
            if role == "target":
                weights += corpus_bytes(self._config)
            stored = stored.plus(store_bytes(self._config, self._spec.models, role, heads_here, dtype))
            snapshots += snapshot_bytes(self._config, self._spec.models, role)
            working += engine_working_bytes(
                self._config, self._spec.models, role, communicator.rank, self._device, heads
            )
        return SlotMemory(weights, stored.per_block, working, stored.per_place, snapshots)

    def shard_bytes(self, section: ModelSection, model: ModelConfig, communicator: Communicator) -> int:
        """Bytes of the weights of one engine."""
        dtype = resolve_dtype(section, model)
        return shard_bytes(model, communicator.rank, communicator.size, dtype, self._device, section.quantization)

    def adapter_bytes(self) -> int:
        """Bytes of slots for adapters."""
        return sum(
            adapter_slots_bytes(self._config, role, section, model, communicator.rank)
            for role, section, model, communicator in self.all
        )

    def files_hash(self) -> str:
        """Hash of the files of all models, heads and adapters, by which hosts find out that theirs differ."""
        hashes = [hash_model_files(part.section.model, part.section.load_format != "dummy") for part in self.all]
        return "+".join([*hashes, *self._heads.hashes(), *adapter_hashes(self._config)])
