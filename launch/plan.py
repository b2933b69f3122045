"""`trtrun plan`: what a job would take, told without loading weights or starting ranks.

Bytes and blocks come from the functions that the engines use at start, so the plan is what happens, as long as the
memory that is free stays the same.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from launch.devices import count_host_slots
from launch.job import Job
from launch.mpirun import show_command
from launch.preflight import check_job
from launch.terminal import output_console
from parallel.topology import Topology
from trtrun.config import ModelSection, RuntimeConfig
from trtrun.kvcache.sizing import (
    SlotDemand,
    count_kv_blocks,
    default_fraction,
    format_bytes,
    free_bytes_of_slot,
    tokens_of_blocks,
)
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.loading import shard_bytes
from trtrun.roles.startup import kv_bytes_per_block, most_useful_blocks, resolve_dtype, target_context


@dataclass(frozen=True)
class RankPlan:
    """One rank of the plan. Bytes; `kv_tokens` is the same on every rank with a device: one block table serves all."""

    rank: int
    host: str
    device: str
    role: str
    draft_shard_bytes: int = 0
    target_shard_bytes: int = 0
    free_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True)
class JobPlan:
    """The whole plan.

    Attributes:
        ranks: in rank order.
        world_size: processes.
        threads: CPU threads of each slot.
        max_seq_len: most tokens of one request.
        kv_tokens: tokens that the rows can hold together.
        draft_dtype, target_dtype: what the engines compute in; None without a draft.
        command: what starts the job.
    """

    ranks: tuple[RankPlan, ...]
    world_size: int
    threads: int
    max_seq_len: int
    kv_tokens: int
    draft_dtype: str | None
    target_dtype: str
    command: str


@dataclass(frozen=True)
class _Engine:
    """One engine's model, split over `tp_size` ranks."""

    section: ModelSection
    model: ModelConfig
    dtype: torch.dtype

    @property
    def tp_size(self) -> int:
        return len(self.section.devices)

    def shard_bytes(self, index: int | None, device: torch.device) -> int:
        return 0 if index is None else shard_bytes(self.model, index, self.tp_size, self.dtype, device)

    def block_bytes(self, index: int | None, block_size: int) -> int:
        return 0 if index is None else kv_bytes_per_block(self.model, self.tp_size, block_size, self.dtype)


def make_plan(job: Job) -> JobPlan:
    """Work out what every rank would hold.

    Raises:
        TrtrunError: the job could not start, or would not fit; one line says why.
    """
    config, topology = job.config, job.topology
    check_job(config, topology)
    target = _read_engine(config.target)
    draft = _read_engine(config.draft) if config.draft is not None else None
    context = target_context(config, target.model)
    ranks = [_plan_rank(rank, config, topology, draft, target, context) for rank in range(topology.world_size)]
    kv_tokens = min(rank.kv_tokens for rank in ranks if topology.slot(rank.rank) is not None)
    blocks = kv_tokens // config.kv_cache.block_size + 1
    return JobPlan(
        ranks=tuple(_share_blocks(rank, config, topology, draft, target, blocks) for rank in ranks),
        world_size=topology.world_size,
        threads=job.threads,
        max_seq_len=context,
        kv_tokens=kv_tokens,
        draft_dtype=None if draft is None else _dtype_name(draft.dtype),
        target_dtype=_dtype_name(target.dtype),
        command=show_command(job.command()),
    )


def print_plan(plan: JobPlan, as_json: bool) -> None:
    """Show the plan on standard output, as a table or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(plan)))
        return
    table = Table(title=None)
    for name in ("rank", "host", "device", "role", "draft shard", "target shard", "free", "KV store", "KV tokens"):
        table.add_column(name, justify="left" if name in ("host", "device", "role") else "right", no_wrap=True)
    for rank in plan.ranks:
        sizes = (rank.draft_shard_bytes, rank.target_shard_bytes, rank.free_bytes, rank.kv_bytes)
        cells = [format_bytes(size) if size else "-" for size in sizes]
        table.add_row(
            str(rank.rank), rank.host, rank.device, rank.role, *cells, str(rank.kv_tokens) if rank.kv_tokens else "-"
        )
    output_console().print(table)
    dtypes = f"target {plan.target_dtype}" + (f", draft {plan.draft_dtype}" if plan.draft_dtype else ", no draft")
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    print(f"{processes}, CPU threads of each: {plan.threads}; {dtypes}; up to {plan.max_seq_len} tokens a row")
    print(plan.command)


def _read_engine(section: ModelSection) -> _Engine:
    model = read_model_config(section.model)
    return _Engine(section, model, resolve_dtype(section, model))


def _plan_rank(
    rank: int, config: RuntimeConfig, topology: Topology, draft: _Engine | None, target: _Engine, context: int
) -> RankPlan:
    """One rank by itself: its KV tokens are what it could hold alone."""
    role = "+".join(topology.roles(rank))
    host = socket.gethostname()
    slot = topology.slot(rank)
    if slot is None:
        return RankPlan(rank, host, "host", role)
    device = torch.device(slot.device if slot.device.startswith("cuda") else "cpu")
    block_size = config.kv_cache.block_size
    draft_bytes = draft.shard_bytes(slot.draft_index, device) if draft is not None else 0
    target_bytes = target.shard_bytes(slot.target_index, device)
    free = free_bytes_of_slot(slot.device, count_host_slots(topology, slot.host))
    blocks = count_kv_blocks(
        free,
        SlotDemand(draft_bytes + target_bytes, _block_bytes(rank, topology, draft, target, block_size)),
        fraction=config.kv_cache.free_memory_fraction or default_fraction(slot.device),
        block_size=block_size,
        max_tokens=config.kv_cache.max_tokens,
        most_useful=most_useful_blocks(config, context),
        where=topology.describe(rank),
    )
    tokens = tokens_of_blocks(blocks, block_size)
    return RankPlan(rank, host, slot.device, role, draft_bytes, target_bytes, free, 0, tokens)


def _share_blocks(
    rank: RankPlan, config: RuntimeConfig, topology: Topology, draft: _Engine | None, target: _Engine, blocks: int
) -> RankPlan:
    """The rank with the number of blocks that all ranks can hold."""
    if topology.slot(rank.rank) is None:
        return rank
    block_size = config.kv_cache.block_size
    kv_bytes = blocks * _block_bytes(rank.rank, topology, draft, target, block_size)
    values = {**asdict(rank), "kv_bytes": kv_bytes, "kv_tokens": tokens_of_blocks(blocks, block_size)}
    return RankPlan(**values)


def _block_bytes(rank: int, topology: Topology, draft: _Engine | None, target: _Engine, block_size: int) -> int:
    slot = topology.slot(rank)
    if slot is None:
        return 0
    drafted = draft.block_bytes(slot.draft_index, block_size) if draft is not None else 0
    return drafted + target.block_bytes(slot.target_index, block_size)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
