"""`trtrun plan`: what a job would take, told without loading weights or starting ranks.

Bytes and blocks come from the functions that the engines use at start, so the plan is what happens, as long as the
memory that is free stays the same. What only another host knows, such as its free memory, is left open and said so.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.table import Table

from launch.jobs.check.preflight import (
    check_models,
    check_tokenizers,
    check_visible_weights,
    describe_gpus,
    missing_devices,
)
from launch.jobs.mpi.job import Job
from launch.jobs.mpi.mpirun import show_command
from launch.jobs.placement.allocation import is_local
from launch.jobs.placement.devices import count_host_slots
from launch.jobs.placement.links import RankLink, expect_kinds, list_links, summarize_links
from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan.start import StartPlan, plan_start, print_start
from launch.jobs.terminal import output_console
from parallel.topology import Topology
from trtrun.configuration.device_lists import kind_of
from trtrun.kvcache.sizing import (
    StoreSize,
    blocks_of_tokens,
    format_bytes,
    free_bytes_of_slot,
    tokens_of_blocks,
)
from trtrun.loading.stored_report import describe_kept, describe_weights
from trtrun.memory.expert_cuts import HeldModel, describe_expert_cuts
from trtrun.memory.spaces import describe_states, describe_windows
from trtrun.start.job_spec import DraftTranslation
from trtrun.weights.weight import Share

UNKNOWN = "-"


@dataclass(frozen=True)
class RankPlan:
    """One rank of the plan. Bytes; `kv_tokens` is the same on every rank with a device: one block table serves all.

    `working_bytes` is an upper bound of what rounds need besides; GPUs measure it at start. `window_tokens` are those
    that layers with windows hold of all rows together; 0 where they keep all.
    None stands for what is not known here: free memory of another host, and KV stores that depend on it.
    """

    rank: int
    host: str
    device: str
    role: str
    draft_shard_bytes: int = 0
    target_shard_bytes: int = 0
    working_bytes: int = 0
    free_bytes: int | None = 0
    kv_bytes: int | None = 0
    kv_tokens: int | None = 0
    window_tokens: int | None = 0


@dataclass(frozen=True)
class JobPlan:
    """The whole plan.

    Attributes:
        ranks: in rank order.
        hosts: in the order of their first ranks.
        world_size: processes.
        threads: CPU threads of each slot.
        max_seq_len: most tokens of one request.
        kv_tokens: tokens that the rows can hold together; None where other hosts decide.
        draft_dtype, target_dtype: what the engines compute in; None without a draft.
        parallel_drafting: whether all tokens of a draft come from one forward of the draft model.
        translation: of a draft with another tokenizer than the target's; None where they are the same.
        heads: that draft from what the target computes, such as "4 Medusa heads"; their bytes are the draft shards',
            on the target's ranks or on one of their own. None without.
        links: every pair of ranks that talk, and how.
        command: what starts the job.
        script: the batch script of the job, where it was asked for.
        start: what it takes from the command to ready.
        notes: what the plan could not know, or had to assume.
    """

    ranks: tuple[RankPlan, ...]
    hosts: tuple[str, ...]
    world_size: int
    threads: int
    max_seq_len: int
    kv_tokens: int | None
    draft_dtype: str | None
    target_dtype: str
    parallel_drafting: bool
    translation: DraftTranslation | None
    heads: str | None
    links: tuple[RankLink, ...]
    command: str
    script: str | None
    start: StartPlan
    notes: tuple[str, ...]


def make_plan(job: Job, simulated_hosts: Sequence[str] = (), script: str | None = None) -> JobPlan:
    """Work out what every rank would hold.

    Args:
        job: to plan.
        simulated_hosts: hosts that stand for those of an allocation to come.
        script: the job's batch script, to be shown with the plan.

    Raises:
        TrtrunError: the job could not start, or would not fit; one line says why.
    """
    spec, config, topology = job.spec, job.config, job.topology
    check_models(spec)
    check_tokenizers(spec)
    unseen = list(check_visible_weights(spec, simulated_hosts))
    memory = JobMemory.read(spec)
    here = {host for host in topology.hosts if host not in simulated_hosts and is_local(host)}
    absent = missing_devices(topology) if here else []
    ranks = [_plan_rank(rank, memory, here, bool(absent)) for rank in range(topology.world_size)]
    placed = [rank for rank in ranks if topology.slot(rank.rank) is not None]
    known = [(rank.kv_tokens, rank.window_tokens or 0) for rank in placed if rank.kv_tokens is not None]
    stored = tuple(map(min, zip(*known, strict=True))) if len(known) == len(placed) else None
    kv_tokens = None if stored is None else stored[0]
    nccl, nccl_note = _expect_nccl(topology, bool(absent))
    notes = [*_note_hosts(simulated_hosts), *unseen]
    if absent:
        be = "is" if len(absent) == 1 else "are"
        notes.append(f"warning: {', '.join(absent)} {be} not on this host: it has {describe_gpus()}")
    notes += nccl_note
    unknown = [rank for rank in placed if rank.free_bytes is None]
    notes += _note_memory(unknown, kv_tokens, min((tokens for tokens, _ in known), default=None))
    notes += _note_stored(memory)
    if script is None and (loss := job.describe_lost_survival()) is not None:
        notes.append(loss)
    return JobPlan(
        ranks=tuple(_share_blocks(rank, memory, stored) for rank in ranks),
        hosts=tuple(dict.fromkeys(rank.host for rank in ranks)),
        world_size=topology.world_size,
        threads=job.threads,
        max_seq_len=memory.context,
        kv_tokens=kv_tokens,
        draft_dtype=None if memory.draft is None else _dtype_name(memory.draft.dtype),
        target_dtype=_dtype_name(memory.target.dtype),
        parallel_drafting=spec.models.mask_token is not None,
        translation=DraftTranslation.of(spec),
        heads=None if memory.heads is None else memory.heads.describe(),
        links=list_links(
            topology, expect_kinds(topology, nccl), config.speculation.use_logits, sends_hidden=config.heads_apart
        ),
        command=show_command(job.command()),
        script=script,
        start=plan_start(memory, here, absent, nccl),
        notes=tuple(notes),
    )


def print_plan(plan: JobPlan, as_json: bool) -> None:
    """Show the plan on standard output, as tables or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(plan)))
        return
    table = Table(title=None)
    for name in ("rank", "host", "device", "role", "draft shard", "target shard", "free", "KV store", "KV tokens"):
        table.add_column(name, justify="left" if name in ("host", "device", "role") else "right", no_wrap=True)
    for rank in plan.ranks:
        sizes = (rank.draft_shard_bytes, rank.target_shard_bytes, rank.free_bytes, rank.kv_bytes)
        cells = [format_bytes(size) if size else UNKNOWN for size in sizes]
        tokens = str(rank.kv_tokens) if rank.kv_tokens else UNKNOWN
        table.add_row(str(rank.rank), rank.host, rank.device, rank.role, *cells, tokens)
    console = output_console()
    console.print(table)
    links = Table(title=None)
    for name in ("what travels", "ranks", "over"):
        links.add_column(name)
    for row in summarize_links(plan.links):
        links.add_row(row.carries, row.ranks, row.transport)
    console.print(links)
    draft = f"draft {plan.draft_dtype}" if plan.draft_dtype else plan.heads or "no draft"
    dtypes = f"target {plan.target_dtype}, {draft}"
    dtypes += " (drafts in parallel: all tokens in one forward)" if plan.parallel_drafting else ""
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    hosts = f" on {len(plan.hosts)} hosts" if len(plan.hosts) > 1 else ""
    print(f"{processes}{hosts}, CPU threads of each: {plan.threads}; {dtypes}; up to {plan.max_seq_len} tokens a row")
    if plan.translation is not None:
        print(plan.translation.describe())
    print(_describe_rounds(plan))
    if held := max(rank.window_tokens or 0 for rank in plan.ranks):
        print(f"layers with windows hold {held} tokens of all rows together")
    print_start(console, plan.start)
    for note in plan.notes:
        print(note)
    print(plan.command if plan.script is None else plan.script)


def _describe_rounds(plan: JobPlan) -> str:
    """The memory of the largest round, which lies between the weights and the KV store."""
    most = max(rank.working_bytes for rank in plan.ranks)
    on_gpus = any(rank.device.startswith("cuda") for rank in plan.ranks)
    measured = "; GPUs measure it at start" if on_gpus else ""
    return f"beside weights and KV a round needs up to {format_bytes(most)} on a rank, by its shapes{measured}"


def _plan_rank(rank: int, memory: JobMemory, here: set[str], gpus_absent: bool) -> RankPlan:
    """One rank by itself: its KV tokens are what it could hold alone, None where that is not known."""
    topology, config = memory.topology, memory.config
    role = "+".join(topology.roles(rank))
    host = topology.host(rank) or socket.gethostname()
    slot = topology.slot(rank)
    if slot is None:
        return RankPlan(rank, host, "host", role)
    drafted, verified = memory.shard_bytes(rank)
    is_known = slot.host in here and not (gpus_absent and slot.device.startswith("cuda"))
    free = free_bytes_of_slot(slot.device, count_host_slots(topology, slot.host)) if is_known else None
    tokens: int | None = None
    in_windows: int | None = None
    if free is not None or config.kv_cache.max_tokens is not None:
        # With max_tokens the rule gives every host that has the room the same answer.
        found = memory.count_blocks(rank, sys.maxsize if free is None else free, topology.describe(rank))
        size = config.kv_cache.block_size
        tokens = tokens_of_blocks(found.blocks, size)
        in_windows = tokens_of_blocks(found.places, size) if found.places else 0
    working = memory.working_bytes(rank)
    return RankPlan(rank, host, slot.device, role, drafted, verified, working, free, 0, tokens, in_windows)


def _share_blocks(rank: RankPlan, memory: JobMemory, stored: tuple[int, ...] | None) -> RankPlan:
    """The rank with the stores that all ranks can hold: tokens, and those that layers with windows hold."""
    if memory.topology.slot(rank.rank) is None:
        return rank
    if stored is None:
        return replace(rank, kv_bytes=None, kv_tokens=None, window_tokens=None)
    blocks, places = (blocks_of_tokens(tokens, memory.config.kv_cache.block_size) for tokens in stored)
    kv_bytes = StoreSize(blocks, places).num_bytes(memory.demand(rank.rank))
    return replace(rank, kv_bytes=kv_bytes, kv_tokens=stored[0], window_tokens=stored[1])


def _expect_nccl(topology: Topology, gpus_absent: bool) -> tuple[bool, list[str]]:
    """Whether NCCL will be there, and what to say about that."""
    gpus = [slot for slot in topology.slots if slot.device.startswith("cuda")]
    if len(gpus) < 2:
        return False, []
    if gpus_absent or not torch.cuda.is_available():
        return True, ["NCCL is taken for granted between GPUs: this host has none to try it with"]
    # Looked for and not loaded: the transport starts MPI when it is imported.
    if importlib.util.find_spec("cupy") is None:
        return False, ["GPUs talk through host memory, for CuPy is not installed: install the extra cuda12 or cuda13"]
    return True, []


def _note_hosts(simulated_hosts: Sequence[str]) -> list[str]:
    if not simulated_hosts:
        return []
    names = ", ".join(simulated_hosts) if len(simulated_hosts) < 4 else f"{simulated_hosts[0]} to {simulated_hosts[-1]}"
    stand = "stands for the host" if len(simulated_hosts) == 1 else "stand for the hosts"
    return [f"there is no allocation yet: {names} {stand} that it will have"]


def _note_memory(unknown: Sequence[RankPlan], kv_tokens: int | None, at_most: int | None) -> list[str]:
    """What is said about memory that this host cannot see."""
    if not unknown:
        return []
    own = socket.gethostname()
    hosts = ", ".join(dict.fromkeys("the missing GPUs" if rank.host == own else rank.host for rank in unknown))
    if kv_tokens is not None:
        return [f"free memory of {hosts} is not known here: whether {kv_tokens} KV tokens fit is found out there"]
    limit = f", at most {at_most} tokens by what is free here" if at_most is not None else ""
    return [
        f"free memory of {hosts} is not known here: KV tokens are decided on the hosts{limit}; "
        "kv_cache.max_tokens would set them"
    ]


def _note_stored(memory: JobMemory) -> Iterator[str]:
    """What becomes of weights that the checkpoints have quantized, what engines were built for, how keys and values
    are kept, and what cuts of experts cost."""
    for role, shards in (("target", memory.target), ("draft", memory.draft)):
        if shards is not None:
            kind = kind_of(shards.section.devices[0])
            quantization = shards.section.quantization
            held = HeldModel(shards.model, shards.tp_size, shards.dtype, torch.device(kind), quantization)
            share, name = Share(0, shards.tp_size), memory.config.kv_cache.dtype
            said = (
                describe_weights(shards.section.model, shards.model, share, shards.dtype, kind),
                describe_kept(shards.model, name, share, shards.dtype, kind),
                describe_windows(memory.config, memory.models, role),
                describe_states(memory.config, memory.models, role),
                describe_expert_cuts(held),
            )
            yield from (f"{role}: {line}" for line in said if line is not None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
