"""From a configuration to running engines: communicators, weights, KV stores, first use of everything.

Every rank that holds a device runs this at start and ends with a `Worker`. Nothing is left to initialise under load. It
does not know requests, nor how ranks tell each other how many blocks all of them can hold (job.py).
"""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

import torch

from parallel.errors import ParallelError
from parallel.groups import Groups
from parallel.topology import Slot
from parallel.watchdog.activity import Activity, Phase
from trtrun.core.outputs import RankReport
from trtrun.engine.heads.head_rows import HeadRows
from trtrun.engine.runner import Engine
from trtrun.errors import CheckpointError, ConfigError, TrtrunError
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.triton.support import triton_works
from trtrun.kvcache.sizing import (
    SlotMemory,
    StoreSize,
    count_kv_blocks,
    default_fraction,
    format_bytes,
    free_bytes_of_slot,
    tokens_of_blocks,
)
from trtrun.linear.layer import AdaptedLayers
from trtrun.loading.loading import load_model
from trtrun.loading.stored_report import describe_kept, describe_weights
from trtrun.loading.weight_check import choose_default
from trtrun.memory.largest_round import measure_largest_round
from trtrun.memory.memory_requirements import HiddenKind, resolve_dtype, round_shape
from trtrun.memory.spaces import adapter_space, most_useful_blocks, place_demand
from trtrun.rounds.round import Worker
from trtrun.speculation.suffixes.corpus import SortedCorpus
from trtrun.start.beside_engines import RankHeads, load_adapters, load_corpus
from trtrun.start.engine_caches import EngineCache
from trtrun.start.engine_maker import EngineMaker, LoadedEngine
from trtrun.start.job_spec import DraftTranslation, JobSpec
from trtrun.start.kernels_ahead import KernelsAhead, kinds_of_kernels
from trtrun.start.policies import device_kind
from trtrun.start.rank_parts import RankParts
from trtrun.start.worker_factory import WorkerFactory
from trtrun.weights.weight import Share

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Bytes of weights that are in place so far and in the end, on this rank."""


def device_of(slot: Slot) -> torch.device:
    """The torch device of a slot. A CPU slot's number tells processes apart; torch knows one CPU."""
    return torch.device(slot.device if slot.device.startswith("cuda") else "cpu")


class RankStartup:
    """Brings one rank's engines up, in two steps: `load`, then `finish` with the size of stores for all ranks."""

    def __init__(
        self,
        spec: JobSpec,
        rank: int,
        groups: Groups,
        activity: Activity | None = None,
        draft_is_lost: Callable[[], bool] = lambda: False,
        seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        slot = spec.topology.slot(rank)
        assert slot is not None, "only ranks with a device start engines"
        self._activity = activity or Activity()
        self._draft_is_lost = draft_is_lost
        self._spec = spec
        self._config = config = spec.config
        self._topology = spec.topology
        self._rank = rank
        self._slot = slot
        self._groups = groups
        self._device = device_of(slot)
        self._models = spec.models
        self._heads = RankHeads.read(spec, groups)
        self._parts = RankParts(spec, groups, self._heads, self._device)
        self._corpus: SortedCorpus | None = None
        self._engines: dict[str, LoadedEngine] = {}
        self._made = EngineMaker(
            spec,
            self._device,
            self._engines,
            self._heads.plan,
            self._heads.are_here,
            lambda engines, fed, exchange: self._worker_factory(engines, fed, 1).make_worker(exchange),
        )
        self._working_bytes = 0
        self._has_kernels = False  # an earlier start has compiled all, here and on the ranks beside this one
        self._seconds: dict[str, float] = dict(seconds)  # of the phases before
        self._lap_at = 0.0
        target, draft = groups.target is not None, groups.draft is not None
        self._cache = EngineCache([config.target if target else None, config.draft if draft else None], self._device)

    def load(self, progress: Progress) -> StoreSize:
        """Read this rank's slices of the weights, and reckon what is left for KV beside the largest round.

        On GPUs the round is run and measured, which is collective over the tensor-parallel groups.

        Returns:
            The stores that this rank could hold.

        Raises:
            CheckpointError: a model directory is damaged or not supported.
            ConfigError: the weights, a round or the KV store do not fit.
        """
        self._activity.start(Phase.WEIGHTS)
        self._lap_at = time.monotonic()
        num_ranks = len(self._topology.slots_of_host(self._slot.host))
        parts = [(role, section, group.rank, group.size) for role, section, _, group in self._parts.all]
        self._cache.begin()
        kinds = kinds_of_kernels(self._config, parts, self._heads.plan)
        longest = round_shape(self._config, self._models).max_seq_len
        self._kernels = KernelsAhead(kinds, self._device, num_ranks, longest)
        if self._kernels.working_bytes is None:
            self._cache.say_what_lacks()
        try:
            try:
                blocks = self._load_weights(progress)
            except (TrtrunError, ParallelError):
                self._agree(False)
                raise
            self._lap("weights")
            if self._agree(True):
                self._choose_sums()
                models = [engine.model for engine in self._engines.values()]
                if self._agree(all(model.has_like_layers for model in models)):
                    for model in models:
                        model.shortens_first_runs = True
                known = self._kernels.working_bytes
                if not self._agree(known is not None):
                    known = None
                    self._activity.start(Phase.WARMING_UP)
                    with suppress(torch.OutOfMemoryError):  # the rounds that are measured say it in words
                        self._kernels.compile(self._made.play_all)
                self._has_kernels = known is not None
                self._lap("kernels")
                blocks = self._count_beside(known)
                self._lap("largest round")
                self._activity.start(Phase.LOADED)
        finally:
            self._kernels.close()
        return blocks

    def _lap(self, phase: str) -> None:
        """A phase of the start ends, which began where the one before ended."""
        now = time.monotonic()
        self._seconds[phase] = round(now - self._lap_at, 3)
        self._lap_at = now

    def _agree(self, is_so: bool) -> bool:
        """Whether something is so on all ranks that this one has a group with, or that these have, and so on: that all
        have their weights, say, and can run a round together. Only on GPUs."""
        self._activity.start(Phase.LOADED)
        if self._device.type != "cuda":
            return False
        differing = int(not is_so)
        for _ in range(2):  # draft and target groups may share a rank: what one of them found reaches the other
            for _, _, _, communicator in self._parts.all:
                differing = int(communicator.all_reduce(torch.tensor([differing], device=self._device)))
        return differing == 0

    def _choose_sums(self) -> None:
        """Leave sums to the transport where some rank has no kernels that sum themselves: others would wait for it."""
        lacks = torch.tensor([int(not triton_works(self._device.type))], device=self._device)
        for _, _, _, communicator in self._parts.all:
            # Places for others are there on all ranks of a group, or on none.
            if communicator.peer_rows is not None and int(communicator.all_reduce(lacks.clone())):
                communicator.peer_rows = None

    def _load_weights(self, progress: Progress) -> StoreSize:
        """Read the weights and count blocks; on GPUs those that fit beside the weights alone."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        free = free_bytes_of_slot(self._slot.device, len(self._topology.slots_of_host(self._slot.host)))
        demand = self._parts.demand()
        if self._device.type == "cpu":
            self._working_bytes = demand.working_bytes
        blocks = self._count_blocks(free, replace(demand, working_bytes=self._working_bytes))
        done = 0
        translation = DraftTranslation.of(self._spec) if self._groups.draft is not None else None
        for role, section, config, communicator in self._parts.all:
            dtype = resolve_dtype(section, config)
            choose_default(config, section.quantization, for_target=role == "target")
            size = self._parts.shard_bytes(section, config, communicator)
            share, kind = Share(0, communicator.size), self._device.type
            for said in (
                config.rope.describe(),
                describe_weights(section.model, config, share, dtype, kind),
                describe_kept(config, self._config.kv_cache.dtype, share, dtype, kind),
                translation.describe() if role == "draft" and translation is not None else None,
            ):
                if said is not None and communicator.rank == 0:
                    _logger.info("%s: %s", role, said)

            def report(read: int, total: int, before: int = done, size: int = size) -> None:
                # Files may hold more or less than the device: what counts is how much of the shard is there.
                ready = before + size * read // total
                self._activity.start(Phase.WEIGHTS, ready, demand.shard_bytes)
                progress(ready, demand.shard_bytes)

            space = adapter_space(self._config, role)
            try:
                model, loaded = load_model(
                    section.model,
                    config,
                    communicator,
                    self._device,
                    dtype,
                    report,
                    batch_invariant=role == "target",
                    quantization=section.quantization,
                    # The target's leader decides for all; draft ranks all choose, from the same logits.
                    logits_reader=0 if role == "target" else None,
                    load_format=section.load_format,
                    kv_format=self._config.kv_cache.dtype,
                    adapted=AdaptedLayers(space) if space is not None else None,
                )
            except CheckpointError as error:
                raise CheckpointError(f"{role}: {error}") from None
            done += size
            model.on_layer = self._activity.advance
            self._engines[role] = LoadedEngine(model, loaded, communicator)
            if space is not None:
                load_adapters(self._config, role, model)
            if role == "target":
                self._heads.load_beside(model, communicator)
                self._corpus = load_corpus(self._config, config.vocab_size, communicator, self._device)
        if self._heads.plan_apart is not None:
            assert self._groups.draft is not None
            self._heads.load_apart(self._groups.draft, self._device)
        if self._heads.loaded is not None or self._parts.adapter_bytes():
            progress(demand.shard_bytes, demand.shard_bytes)
        return blocks

    def _count_blocks(self, free_bytes: int, demand: SlotMemory) -> StoreSize:
        cache = self._config.kv_cache
        return count_kv_blocks(
            free_bytes,
            demand,
            fraction=cache.free_memory_fraction or default_fraction(self._slot.device),
            block_size=cache.block_size,
            max_tokens=cache.max_tokens,
            most_useful=most_useful_blocks(self._config, self._models.context),
            where=self._topology.describe(self._rank),
            places=place_demand(self._config, self._models),
        )

    def _count_beside(self, working_bytes: int | None) -> StoreSize:
        """Count the blocks that fit on this GPU beside the weights and the largest round, which is run to measure it
        where nobody knows what it takes."""
        self._activity.start(Phase.ALLOCATING)
        where = self._topology.describe(self._rank)
        demand = self._parts.demand()
        torch.cuda.empty_cache()
        left = torch.cuda.mem_get_info(self._device)[0]
        shape = round_shape(self._config, self._models)
        try:
            self._working_bytes = working_bytes or measure_largest_round(
                self._device, lambda: self._made.trial_run(shape), shape
            )
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{where}: the largest round does not fit into the {format_bytes(left)} free beside the weights "
                f"({format_bytes(demand.shard_bytes)}); by its shapes it needs up to "
                f"{format_bytes(demand.working_bytes)}: lower scheduler.max_batch_size, scheduler.max_num_tokens or "
                "speculation.draft_len"
            ) from None
        # The weights are in place, so that what is left is beside what they really take.
        free = left + demand.shard_bytes
        # Which nobody measures: a trial run sends nothing.
        told = HiddenKind.of(self._config, self._models.target, self._heads.plan)
        under_way = told.bytes_under_way(self._models) if told is not None and "target" in self._engines else 0
        return self._count_blocks(free, replace(demand, working_bytes=self._working_bytes + under_way))

    def finish(self, size: StoreSize) -> tuple[Worker, RankReport]:
        """Allocate the KV stores, run every kernel once, and put the engines to work."""
        self._activity.start(Phase.ALLOCATING)
        self._lap_at = time.monotonic()
        engines = self._made.engines(size)
        self._activity.start(Phase.WARMING_UP)
        worker = self._worker_factory(engines, self._made.head_rows(engines), size.blocks).make_worker()
        self._made.warm_up(worker, engines, leaves_graphs=self._spec.leaves_first_uses and self._has_kernels)
        self._kernels.finish(self._working_bytes)
        self._cache.finish()
        self._lap("all kernels once, graphs")
        worker.warmup_misses.take()  # from here on somebody may wait
        self._activity.rest()
        return worker, self._report(size)

    def _worker_factory(
        self, engines: Mapping[str, Engine], head_rows: HeadRows | None, num_blocks: int
    ) -> WorkerFactory:
        return WorkerFactory(
            spec=self._spec,
            rank=self._rank,
            groups=self._groups,
            device=self._device,
            engines=engines,
            heads=self._heads,
            head_rows=head_rows,
            corpus=self._corpus,
            num_blocks=num_blocks,
            activity=self._activity,
            draft_is_lost=self._draft_is_lost,
        )

    def _report(self, size: StoreSize) -> RankReport:
        loaded = [*(engine.report for engine in self._engines.values()), self._heads.report]
        dtypes = {engine.model.dtype for engine in self._engines.values()}
        if self._heads.plan_apart is not None:
            dtypes.add(resolve_dtype(self._config.target, self._models.target))
        free, total = torch.cuda.mem_get_info(self._device) if self._device.type == "cuda" else (0, 0)
        corpus = self._corpus.num_bytes if self._corpus is not None else 0
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            role="+".join(self._topology.roles(self._rank)),
            device=self._slot.device,
            bytes_read=sum(report.bytes_read for report in loaded),
            shard_bytes=sum(report.shard_bytes for report in loaded) + corpus + self._parts.adapter_bytes(),
            working_bytes=self._working_bytes,
            kv_bytes=size.num_bytes(self._parts.demand()),
            kv_tokens=tokens_of_blocks(size.blocks, self._config.kv_cache.block_size),
            kernels="+".join(sorted({operations_of(self._device.type).name(dtype) for dtype in dtypes})),
            device_kind=device_kind(self._device),
            files_hash=self._parts.files_hash(),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            device_used_bytes=total - free,
            start_seconds=self._seconds,
        )
