"""What each rank of a job needs: bytes of weights and of KV blocks, from both models' config.json.

The numbers come from the functions that the engines use at start. It knows models and devices by name. It does not know
what a host can give: callers say how much is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallel.topology import Slot, Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_sections import ModelSection
from trtrun.errors import ConfigError
from trtrun.heads.heads import HeadsPlan
from trtrun.kvcache.sizing import SlotMemory, StoreSize, count_kv_blocks, default_fraction
from trtrun.loading.loading import heads_bytes, shard_bytes
from trtrun.loading.model_settings import JobModels
from trtrun.memory.memory_requirements import (
    StoreBytes,
    adapter_slots_bytes,
    engine_working_bytes,
    resolve_dtype,
    store_bytes,
)
from trtrun.memory.spaces import most_useful_blocks, place_demand, snapshot_bytes
from trtrun.models.config import ModelConfig
from trtrun.start.beside_engines import corpus_bytes, demand_apart
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import device_of
from trtrun.weights.checkpoint import NoWeightsError


@dataclass(frozen=True)
class ModelShards:
    """One engine's model, split over `tp_size` ranks."""

    section: ModelSection
    model: ModelConfig
    dtype: torch.dtype

    @property
    def tp_size(self) -> int:
        """Ranks of the engine."""
        return len(self.section.devices)

    def shard_bytes(self, index: int | None, device: torch.device) -> int:
        """Bytes of one rank's weights; 0 where `index` is None, on a rank that does not hold the engine."""
        if index is None:
            return 0
        return shard_bytes(self.model, index, self.tp_size, self.dtype, device, self.section.quantization)


@dataclass(frozen=True)
class JobMemory:
    """What each rank of a job holds of both models, whatever its host can give.

    Attributes:
        config, topology: of the job.
        models: what their config.json says.
        draft: None without one.
        target: of the run.
        heads: that draft from what the target computes, on its ranks or on one of their own; None without, or where
            they are not on this host.
    """

    config: RuntimeConfig
    topology: Topology
    models: JobModels
    draft: ModelShards | None
    target: ModelShards
    heads: HeadsPlan | None = None

    @classmethod
    def read(cls, spec: JobSpec) -> JobMemory:
        """Read both models' config.json.

        Raises:
            TrtrunError: one of them cannot be read, or is shorter than scheduler.max_seq_len.
        """
        config, draft = spec.config, None
        target = ModelShards(config.target, spec.target, resolve_dtype(config.target, spec.target))
        if config.draft is not None:
            model = spec.model_of("draft")
            draft = ModelShards(config.draft, model, resolve_dtype(config.draft, model))
        try:
            heads = spec.heads
        except NoWeightsError:
            heads = None
        return cls(config, spec.topology, spec.models, draft, target, heads)

    @property
    def context(self) -> int:
        """Most tokens of one request."""
        return self.models.context

    @property
    def heads_on_target(self) -> HeadsPlan | None:
        """Heads that the target's ranks share."""
        return None if self.config.heads_apart else self.heads

    def heads_apart(self, slot: Slot) -> SlotMemory | None:
        """What heads on a rank of their own need, on that rank; None elsewhere."""
        if self.heads is None or not self.config.heads_apart or slot.draft_index is None:
            return None
        return demand_apart(self.config, self.models, self.heads, device_of(slot))

    def shard_bytes(self, rank: int) -> tuple[int, int]:
        """Bytes of the draft's weights, or of the heads or the corpus, and of the target's on one rank."""
        slot = self.topology.slot(rank)
        if slot is None:
            return 0, 0
        device = device_of(slot)
        drafted = self.draft.shard_bytes(slot.draft_index, device) if self.draft is not None else 0
        if (apart := self.heads_apart(slot)) is not None:
            drafted += apart.shard_bytes
        if self.heads_on_target is not None and slot.target_index is not None:
            heads, target = self.heads_on_target, self.target
            drafted += heads_bytes(heads, slot.target_index, target.tp_size, target.dtype, device.type)
        if slot.target_index is not None:
            drafted += corpus_bytes(self.config)
        verified = self.target.shard_bytes(slot.target_index, device)
        drafted += self._adapter_bytes("draft", self.draft, slot.draft_index)
        return drafted, verified + self._adapter_bytes("target", self.target, slot.target_index)

    def _adapter_bytes(self, role: str, shards: ModelShards | None, index: int | None) -> int:
        """Bytes of an engine's slots for adapters on one rank of it."""
        if shards is None or index is None:
            return 0
        return adapter_slots_bytes(self.config, role, shards.section, shards.model, index)

    def store_bytes(self, rank: int) -> StoreBytes:
        """Bytes of one KV block and of one place on one rank, in both engines' stores and in the heads'."""
        slot, stored = self.topology.slot(rank), StoreBytes(0, 0)
        if slot is None:
            return stored
        if (apart := self.heads_apart(slot)) is not None:
            stored = StoreBytes(apart.bytes_per_block, 0)
        if self.draft is not None and slot.draft_index is not None:
            stored = stored.plus(store_bytes(self.config, self.models, "draft", None, self.draft.dtype))
        if slot.target_index is not None:
            of_target = store_bytes(self.config, self.models, "target", self.heads_on_target, self.target.dtype)
            stored = stored.plus(of_target)
        return stored

    def working_bytes(self, rank: int) -> int:
        """Upper bound, by shapes, of what rounds need on one rank beside weights and KV. GPUs measure it at start."""
        slot = self.topology.slot(rank)
        if slot is None:
            return 0
        if (apart := self.heads_apart(slot)) is not None:
            return apart.working_bytes
        device, total = device_of(slot), 0
        for role, index in self._engines_on(slot):
            heads = self.heads if role == "target" else None
            total += engine_working_bytes(self.config, self.models, role, index, device, heads)
        return total

    def _engines_on(self, slot: Slot) -> list[tuple[str, int]]:
        """The role of each model that a rank holds shards of, and the rank's index in that engine."""
        engines = (("draft", self.draft, slot.draft_index), ("target", self.target, slot.target_index))
        return [(role, index) for role, shards, index in engines if shards is not None and index is not None]

    def demand(self, rank: int, *, measures: bool = False) -> SlotMemory:
        """What the engines of one rank need; without the memory of a round where the rank `measures` it."""
        working = 0 if measures else self.working_bytes(rank)
        stored = self.store_bytes(rank)
        slot = self.topology.slot(rank)
        engines = [] if slot is None else self._engines_on(slot)
        snapshots = sum(snapshot_bytes(self.config, self.models, role) for role, _ in engines)
        return SlotMemory(sum(self.shard_bytes(rank)), stored.per_block, working, stored.per_place, snapshots)

    def count_blocks(self, rank: int, free_bytes: int, where: str) -> StoreSize:
        """Stores that a rank with a device can hold by itself.

        A GPU's rank measures its rounds at start: their upper bound here makes the answer smaller, but refuses nothing.

        Raises:
            ConfigError: the weights, a round or the KV store do not fit into `free_bytes`.
        """
        slot = self.topology.slot(rank)
        assert slot is not None
        try:
            return self._count_blocks(slot, free_bytes, self.demand(rank), where)
        except ConfigError:
            if not slot.device.startswith("cuda"):
                raise
            return self._count_blocks(slot, free_bytes, self.demand(rank, measures=True), where)

    def _count_blocks(self, slot: Slot, free_bytes: int, demand: SlotMemory, where: str) -> StoreSize:
        cache = self.config.kv_cache
        return count_kv_blocks(
            free_bytes,
            demand,
            fraction=cache.free_memory_fraction or default_fraction(slot.device),
            block_size=cache.block_size,
            max_tokens=cache.max_tokens,
            most_useful=most_useful_blocks(self.config, self.context),
            where=where,
            places=place_demand(self.config, self.models),
        )
