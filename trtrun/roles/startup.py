"""From a configuration to running engines: communicators, weights, KV stores, first use of everything.

Every rank that holds a device runs this at start and ends with a `Worker`. Nothing is left to initialise under load. It
does not know requests, nor how ranks tell each other how many blocks all of them can hold (rendezvous.py).
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from parallel.communicator import Communicator
from parallel.groups import Groups
from parallel.link import Link
from parallel.topology import Role, Slot, Topology
from parallel.watchdog.activity import Activity, Phase
from trtrun.config import DraftSection, ModelSection, RuntimeConfig
from trtrun.drafting_methods import METHODS
from trtrun.engine.graphs import capture_for
from trtrun.engine.rows import RowState
from trtrun.engine.runner import Engine
from trtrun.engine.warmup import warm_up
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kernels.choice import kernels_for
from trtrun.kvcache.sizing import (
    SlotDemand,
    blocks_of_tokens,
    count_kv_blocks,
    default_fraction,
    free_bytes_of_slot,
    tokens_of_blocks,
    useful_blocks,
)
from trtrun.kvcache.store import KVStore
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.decoder import CausalLM
from trtrun.models.loading import LoadReport, load_model, shard_bytes
from trtrun.outputs import RankReport
from trtrun.roles.worker import Worker
from trtrun.speculation.drafters import DRAFTERS, Drafter, Workplace

Progress = Callable[[int, int], None]
"""Bytes of weights that are in place so far and in the end, on this rank."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def device_of(slot: Slot) -> torch.device:
    """The torch device of a slot. A CPU slot's number tells processes apart; torch knows one CPU."""
    return torch.device(slot.device if slot.device.startswith("cuda") else "cpu")


def resolve_dtype(section: ModelSection, config: ModelConfig) -> torch.dtype:
    """The dtype to compute in: the section's, or the checkpoint's for `auto`."""
    return config.checkpoint_dtype if section.dtype == "auto" else DTYPES[section.dtype]


def quantization_of(section: ModelSection) -> str:
    """How the engine's weights are held, by name; a target's as they are."""
    return section.quantization if isinstance(section, DraftSection) else "none"


def target_context(config: RuntimeConfig, model: ModelConfig) -> int:
    """Most tokens of one request.

    Raises:
        ConfigError: scheduler.max_seq_len is beyond the target's context.
    """
    wanted = config.scheduler.max_seq_len
    if wanted is not None and wanted > model.max_position_embeddings:
        raise ConfigError(
            f"scheduler.max_seq_len is {wanted}, but the target's context is {model.max_position_embeddings} tokens"
        )
    return wanted or model.max_position_embeddings


@dataclass
class _LoadedEngine:
    """One engine rank with its weights and without a KV store."""

    model: CausalLM
    report: LoadReport
    communicator: Communicator


class RankStartup:
    """Brings one rank's engines up, in two steps: `load`, then `finish` with the number of blocks for all ranks."""

    def __init__(
        self, config: RuntimeConfig, topology: Topology, rank: int, groups: Groups, activity: Activity | None = None
    ) -> None:
        slot = topology.slot(rank)
        assert slot is not None, "only ranks with a device start engines"
        self._activity = activity or Activity()
        self._config = config
        self._topology = topology
        self._rank = rank
        self._slot = slot
        self._groups = groups
        self._device = device_of(slot)
        self._target_config = read_model_config(config.target.model)
        self._draft_config = read_model_config(config.draft.model) if config.draft is not None else None
        self._context = target_context(config, self._target_config)
        self._engines: dict[str, _LoadedEngine] = {}

    def load(self, progress: Progress) -> int:
        """Read this rank's slices of the weights.

        Returns:
            KV blocks that this rank could hold, the null block included.

        Raises:
            CheckpointError: a model directory is damaged or not supported.
            ConfigError: the weights or the KV store do not fit.
        """
        self._activity.start(Phase.WEIGHTS)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        free = free_bytes_of_slot(self._slot.device, len(self._topology.slots_of_host(self._slot.host)))
        demand = self._demand()
        blocks = count_kv_blocks(
            free,
            demand,
            fraction=self._config.kv_cache.free_memory_fraction or default_fraction(self._slot.device),
            block_size=self._config.kv_cache.block_size,
            max_tokens=self._config.kv_cache.max_tokens,
            most_useful=most_useful_blocks(self._config, self._context),
            where=self._topology.describe(self._rank),
        )
        done = 0
        for role, section, config, communicator in self._parts():
            dtype = resolve_dtype(section, config)
            size = self._shard_bytes(section, config, communicator)

            def report(read: int, total: int, before: int = done, size: int = size) -> None:
                # Files may hold more or less than the device: what counts is how much of the shard is there.
                ready = before + size * read // total
                self._activity.start(Phase.WEIGHTS, ready, demand.shard_bytes)
                progress(ready, demand.shard_bytes)

            try:
                model, loaded = load_model(
                    section.model,
                    communicator,
                    self._device,
                    dtype,
                    report,
                    batch_invariant=role == "target",
                    quantization=quantization_of(section),
                )
            except CheckpointError as error:
                raise CheckpointError(f"{role}: {error}") from None
            done += size
            self._engines[role] = _LoadedEngine(model, loaded, communicator)
        self._activity.start(Phase.LOADED)
        return blocks

    def finish(self, num_blocks: int) -> tuple[Worker, RankReport]:
        """Allocate the KV stores, run every kernel once, and put the engines to work."""
        self._activity.start(Phase.ALLOCATING)
        engines = {role: self._make_engine(loaded, num_blocks) for role, loaded in self._engines.items()}
        self._activity.start(Phase.WARMING_UP)
        for engine in engines.values():
            warm_up(engine, self._config.draft_len)
        placement = METHODS[self._config.speculation.method].placement
        worker = Worker(
            link=Link(self._topology, self._rank, self._groups.workers),
            drafter=self._make_drafter(engines) if placement in self._topology.roles(self._rank) else None,
            target=engines.get("target"),
            drafts_in_place=placement is Role.TARGET,
            leads_draft=self._rank == self._drafting_leader(placement),
            leads_target=self._rank == self._topology.target_leader,
            use_logits=self._config.speculation.use_logits,
            activity=self._activity,
        )
        self._activity.rest()
        return worker, self._report(num_blocks)

    def _drafting_leader(self, placement: Role | None) -> int | None:
        """The first of the ranks that draft; None where none do."""
        return self._topology.target_leader if placement is Role.TARGET else self._topology.draft_leader

    def _make_drafter(self, engines: Mapping[str, Engine]) -> Drafter:
        section, vocab_size = self._config.speculation, self._target_config.vocab_size
        return DRAFTERS.get(section.method)(Workplace(section, engines.get("draft"), engines.get("target"), vocab_size))

    def _parts(self) -> list[tuple[str, ModelSection, ModelConfig, Communicator]]:
        """This rank's engines: role, section, model configuration and tensor-parallel group."""
        parts: list[tuple[str, ModelSection, ModelConfig, Communicator]] = []
        if self._groups.draft is not None and self._config.draft is not None and self._draft_config is not None:
            parts.append(("draft", self._config.draft, self._draft_config, self._groups.draft))
        if self._groups.target is not None:
            parts.append(("target", self._config.target, self._target_config, self._groups.target))
        return parts

    def _demand(self) -> SlotDemand:
        weights = block = 0
        for _, section, model, communicator in self._parts():
            dtype = resolve_dtype(section, model)
            weights += self._shard_bytes(section, model, communicator)
            block += kv_bytes_per_block(model, communicator.size, self._config.kv_cache.block_size, dtype)
        return SlotDemand(weights, block)

    def _shard_bytes(self, section: ModelSection, model: ModelConfig, communicator: Communicator) -> int:
        dtype = resolve_dtype(section, model)
        return shard_bytes(model, communicator.rank, communicator.size, dtype, self._device, quantization_of(section))

    def _make_engine(self, loaded: _LoadedEngine, num_blocks: int) -> Engine:
        model, config = loaded.model, self._config
        store = KVStore(
            model.config.num_layers,
            num_blocks,
            model.kv_heads,
            config.kv_cache.block_size,
            model.config.head_dim,
            model.dtype,
            self._device,
        )
        if self._device.type == "cpu":
            # As much as one forward may write: enough for the first requests to run at full speed, and little beside
            # the weights. The rest of a store, which may be half of the memory, costs nothing until it is used.
            store.commit(min(num_blocks, blocks_of_tokens(config.scheduler.max_num_tokens, config.kv_cache.block_size)))
        rows = RowState(
            config.scheduler.max_batch_size,
            self._context,
            config.kv_cache.block_size,
            config.speculation.draft_len,
            min(model.config.vocab_size, self._target_config.vocab_size),
            self._device,
        )
        graphs = config.cuda_graphs and loaded.communicator.is_capturable
        return Engine(model, store, rows, capture_for(self._device) if graphs else None)

    def _report(self, num_blocks: int) -> RankReport:
        loaded = [engine.report for engine in self._engines.values()]
        models = [engine.model for engine in self._engines.values()]
        block_size = self._config.kv_cache.block_size
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            role="+".join(self._topology.roles(self._rank)),
            device=self._slot.device,
            bytes_read=sum(report.bytes_read for report in loaded),
            shard_bytes=sum(report.shard_bytes for report in loaded),
            kv_bytes=num_blocks * self._demand().bytes_per_block,
            kv_tokens=tokens_of_blocks(num_blocks, block_size),
            kernels="+".join(sorted({kernels_for(model.device, model.dtype) for model in models})),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )


def most_useful_blocks(config: RuntimeConfig, context: int) -> int:
    """Blocks beyond which running requests could use no more (see `kvcache.sizing.useful_blocks`)."""
    return useful_blocks(
        config.scheduler.max_batch_size,
        context,
        config.kv_cache.block_size,
        config.draft_len,
        config.scheduler.plans_ahead,
    )


def kv_bytes_per_block(model: ModelConfig, tp_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank of an engine with `tp_size` ranks."""
    kv_heads = max(1, model.num_kv_heads // tp_size)
    return KVStore.bytes_per_block(model.num_layers, kv_heads, block_size, model.head_dim, dtype)
