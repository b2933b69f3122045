"""What each rank of a job does at a start, as far as it is known before: bytes of weights that it reads, CUDA graphs
that it captures, and whether Triton's cache has its kernels.

Bytes, graphs and marks come from the functions that starts use. It does not know what of it takes how long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import torch

from launch.jobs.placement.memory import JobMemory, ModelShards
from launch.jobs.plan.weight_files import ModelFiles
from parallel.topology import Slot
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.model_sections import ModelSection
from trtrun.engine.batch import tile_width
from trtrun.loading.loading import heads_bytes
from trtrun.memory.memory_requirements import reads_in_place
from trtrun.sampling.distributions import NUM_KINDS
from trtrun.start.engine_caches import VARIABLE, kernels_folder
from trtrun.start.graph_counts import count_graphs
from trtrun.start.kept_pacing import device_kind
from trtrun.start.kernels_ahead import has_mark, mark_file
from trtrun.start.kinds_of_kernels import kinds_of_kernels
from trtrun.start.startup import device_of

Kernels = Literal["found", "missing", "unknown", "none"]
"""Of Triton: an earlier start like this one has left them, or none has; the GPU is not here to tell; there are none."""


@dataclass(frozen=True)
class RankStart:
    """One rank with a device.

    Attributes:
        rank: in the world.
        read_bytes: of weights that it reads from files, or that are made up.
        graphs: CUDA graphs that it captures, of both engines.
        kernels: whether its mark is in Triton's cache.
    """

    rank: int
    read_bytes: int
    graphs: int
    kernels: Kernels


class RankStarts:
    """Looks at the ranks of one job."""

    def __init__(
        self,
        memory: JobMemory,
        files: dict[str, ModelFiles],
        here: Collection[str],
        absent: Collection[str],
        nccl: bool,
    ) -> None:
        """Look from this host.

        Args:
            memory: the job, and its models.
            files: of the engines' weights, by role.
            here: hosts of the job that are this one.
            absent: GPUs that the job wants of this host, and that it does not have.
            nccl: whether GPUs talk by NCCL, which graphs can hold.
        """
        self._memory = memory
        self._files = files
        self._here = here
        self._absent = absent
        self._nccl = nccl

    def look(self) -> tuple[RankStart, ...]:
        """All ranks with a device, in order."""
        return tuple(self._look(slot) for slot in self._memory.topology.slots)

    def count_graphs(self, config: RuntimeConfig | None = None, context: int | None = None) -> int:
        """The most graphs that a rank captures, by the job's configuration or another of the same placement."""
        other = self if config is None else self._with(config, context)
        slots = self._memory.topology.slots
        return max(sum(other._graphs(slot, role) for role, *_ in other._parts(slot)) for slot in slots)

    def is_visible(self, slot: Slot) -> bool:
        """Whether the slot's device is on this host."""
        return slot.host in self._here and slot.device not in self._absent

    def device_kinds(self) -> set[str] | None:
        """The kinds of all devices, as ranks name them; None where one is not on this host."""
        slots = self._memory.topology.slots
        devices = {device_of(slot) for slot in slots}
        if not all(self.is_visible(slot) for slot in slots):
            return None
        if any(device.type == "cuda" for device in devices) and not torch.cuda.is_available():
            return None
        return {device_kind(device) for device in devices}

    def _with(self, config: RuntimeConfig, context: int | None) -> RankStarts:
        models = replace(self._memory.models, context=context or self._memory.context)
        memory = replace(self._memory, config=config, models=models)
        return RankStarts(memory, self._files, self._here, self._absent, self._nccl)

    def _look(self, slot: Slot) -> RankStart:
        parts = self._parts(slot)
        read = sum(self._files[role].read_bytes[index] for role, _, index in parts)
        heads, graphs = self._memory.heads_on_target, sum(self._graphs(slot, role) for role, *_ in parts)
        if heads is not None and slot.target_index is not None:
            target = self._memory.target
            read += heads_bytes(heads, slot.target_index, target.tp_size, target.dtype)
        if (apart := self._memory.heads_apart(slot)) is not None:
            read, graphs = apart.shard_bytes, self._graphs(slot, "draft")
        return RankStart(slot.rank, read, graphs, self._kernels(slot))

    def _parts(self, slot: Slot) -> list[tuple[str, ModelSection, int]]:
        """The slot's engines: role, section and place in the group; the draft first, as a start has them."""
        config, parts = self._memory.config, list[tuple[str, ModelSection, int]]()
        if slot.draft_index is not None and config.draft is not None:
            parts.append(("draft", config.draft, slot.draft_index))
        if slot.target_index is not None:
            parts.append(("target", config.target, slot.target_index))
        return parts

    def _graphs(self, slot: Slot, role: str) -> int:
        config = self._memory.config
        if role == "draft" and config.heads_apart:
            has_graphs = slot.device.startswith("cuda") and config.cuda_graphs
            kinds = NUM_KINDS if self._has_triton(slot) else 0
            return count_graphs(config, self._memory.models, role, None, kinds) if has_graphs else 0
        shards = self._shards(role)
        if not (slot.device.startswith("cuda") and config.cuda_graphs and (shards.tp_size == 1 or self._nccl)):
            return 0
        has_triton = self._has_triton(slot)
        tiled = has_triton and reads_in_place(config, shards.model, "cuda")
        width = tile_width(shards.model, shards.tp_size, slot.device) if tiled else None
        kinds = NUM_KINDS if has_triton else 0
        return count_graphs(config, self._memory.models, role, width, kinds)

    def _shards(self, role: str) -> ModelShards:
        shards = self._memory.draft if role == "draft" else self._memory.target
        assert shards is not None
        return shards

    def _has_triton(self, slot: Slot) -> bool:
        """Taken for granted on other hosts, and of GPUs that are not here."""
        return not self.is_visible(slot) or (find_spec("triton") is not None and torch.version.hip is None)

    def _kernels(self, slot: Slot) -> Kernels:
        if not slot.device.startswith("cuda"):
            return "none"
        if not self.is_visible(slot):
            return "unknown"
        parts = [(role, section, index, len(section.devices)) for role, section, index in self._parts(slot)]
        config = self._memory.config
        folder = config.launch.environment.get(VARIABLE) if self._memory.topology.world_size > 1 else None
        folder = folder or kernels_folder(section for _, section, _ in reversed(self._parts(slot)))
        is_told = any(role == "target" for role, *_ in parts) or config.heads_apart
        heads = self._memory.heads if is_told else None
        mark = mark_file(kinds_of_kernels(config, parts, heads), device_of(slot), folder)
        if mark is None:
            return "none"
        return "found" if has_mark(mark) else "missing"


def of_all(ranks: Collection[RankStart]) -> Kernels:
    """What becomes of the kernels of all ranks: those that share a group compile where one of them has to."""
    states = {rank.kernels for rank in ranks}
    order: tuple[Kernels, ...] = ("missing", "unknown", "found", "none")
    return next(state for state in order if state in states)
