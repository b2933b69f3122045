"""How long a start will take, from the command to ready, by phase and why: what is known is counted, what was measured
elsewhere is called an estimate and names what was measured, and the rest is told as work, without seconds.

Seconds are those of docs/performance.md, which has machine, models and method in "First runs" and in "Pacing": what is
estimated comes from there alone. This module knows the order of a start (trtrun/start/startup.py). It does not know how
bytes, graphs and marks are found (start_ranks.py), or what anything takes on this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan.start_ranks import Kernels, ModelFiles, RankStart, RankStarts, inspect_files, of_all
from launch.jobs.plan.start_work import describe_cpu_kernels, describe_weights, shorten_start
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.start.kernels_ahead import count_processes
from trtrun.start.policies import KeptPacing, count_first_rounds

_PACING_PHASE = "measured rounds"
_LEAST_BLOCKS = 2  # what limits of rounds here do not depend on

Seconds = tuple[float, float]
"""From, to."""

_NO_TIME = (0.0, 0.0)

COLD = (7.1, 11.6, 19.9, 21.2, 24.3, 24.8, 25.4)
WARM = (4.3, 5.2, 5.2, 5.2, 8.3, 8.7, 9.3)
"""Since the command began, until the end of: imports, weights, kernels, the largest round, all kernels once and graphs,
a round of each kind, measured rounds. Without the second and third of cold starts warm ones had nothing to do there."""

PAIR = "an 8B-shaped pair on one H100"
NUM_GRAPHS = 192
NUM_PROCESSES = 15


class Measured(NamedTuple):
    """Seconds, and of what."""

    seconds: Seconds
    basis: str


def _between(step: int, runs: tuple[tuple[float, ...], ...] = (COLD, WARM)) -> Seconds:
    """What the step behind `step` others took, in the fastest and the slowest of runs."""
    found = [round(run[step] - (run[step - 1] if step else 0.0), 1) for run in runs]
    return min(found), max(found)


IMPORTS = Measured(_between(0), "two machines with an H100")
MADE_UP_COLD = Measured(_between(1, (COLD,)), f"{PAIR}, products compared for the first time")
MADE_UP_WARM = Measured(_between(1, (WARM,)), PAIR)
COMPILED = Measured(_between(2, (COLD,)), f"{PAIR}, {NUM_PROCESSES} processes")
LARGEST_ROUND = Measured(_between(3, (COLD,)), PAIR)
KINDS_OF_ROUNDS = Measured(_between(5), PAIR)
MEASURED_ROUNDS = Measured((0.1, 0.6), "the start's rounds in `Pacing`: none is begun that would not be done in 0.5 s")
MEASURED_AHEAD = Measured((0.1, 1.1), "as measured rounds are: none is begun that would not be done in 1 s")

_GRAPHS = _between(4)

CPU_RUN = "a run of one short prompt on four CPU ranks and two cores took 4.6 to 4.8 s in all, most of it this"
TWO_GPUS = "two H200, an 8B with target TP 2: 23.1 s to ready with cold caches, 14.8 s with warm ones"


def graph_seconds(count: int) -> Measured:
    """All kernels once and so many graphs, as many more seconds as there are more graphs."""
    low, high = (seconds * count / NUM_GRAPHS for seconds in _GRAPHS)
    return Measured(
        (low, high), f"{_GRAPHS[1]:g} s for {NUM_GRAPHS} graphs of 32 and 4 layers; more layers take longer"
    )


@dataclass(frozen=True)
class StartPhase:
    """Something that a start does.

    Attributes:
        name: of the phase.
        work: what is done, for this job.
        seconds: an estimate, from and to; None where nothing was measured that it could be told from.
        basis: what was measured; empty without an estimate, or where nothing is to be done.
    """

    name: str
    work: str
    seconds: Seconds | None = None
    basis: str = ""


@dataclass(frozen=True)
class StartPlan:
    """What a start will take.

    Attributes:
        ranks: those with a device, in order.
        kernels: see `RankStart`, of all ranks together.
        phases: in their order.
        seconds: of all phases that have an estimate; None where that is too little of them.
        shorter: what would make the start shorter, where anything would.
    """

    ranks: tuple[RankStart, ...]
    kernels: Kernels
    phases: tuple[StartPhase, ...]
    seconds: Seconds | None
    shorter: tuple[str, ...]


def plan_start(memory: JobMemory, here: Collection[str], absent: Collection[str], nccl: bool) -> StartPlan:
    """Tell what starting a job will take; see `RankStarts`.

    Raises:
        TrtrunError: a model's weights cannot be looked at for another reason than that they are not here.
    """
    config = memory.config
    sections = {"draft": config.draft, "target": config.target}
    shards = {"draft": memory.draft, "target": memory.target}
    files = {
        role: inspect_files(section, of_role.model, for_target=role == "target")
        for role, section in sections.items()
        if section is not None and (of_role := shards[role]) is not None
    }
    starts = RankStarts(memory, files, here, absent, nccl)
    ranks = starts.look()
    on_gpus = any(slot.device.startswith("cuda") for slot in memory.topology.slots)
    kernels = of_all(ranks)
    phases = [
        *_begin(memory, on_gpus=on_gpus, nccl=nccl),
        _weights(memory, files, ranks, kernels, here),
        *(_gpu_phases(memory, starts, ranks, kernels) if on_gpus else _cpu_phases(memory)),
        *_rounds(memory, starts),
    ]
    known = [phase.seconds for phase in phases if phase.seconds is not None]
    total = round(sum(low for low, _ in known), 1), round(sum(high for _, high in known), 1)
    # Without imports, which come first everywhere, the rest would be read as the whole.
    seconds = total if phases[0].seconds is not None else None
    measures = any(phase.name == _PACING_PHASE and phase.seconds != _NO_TIME for phase in phases)
    shorter = shorten_start(memory, starts, files, kernels, measures_rounds=measures)
    return StartPlan(ranks, kernels, tuple(phases), seconds, tuple(shorter))


def print_start(console: Console, plan: StartPlan) -> None:
    """Show what starting takes, behind what the job takes."""
    table = Table(title=None)
    for name in ("until it is ready", "what is done", "about", "as measured of"):
        table.add_column(name, ratio={"what is done": 2, "as measured of": 1}.get(name))
    for phase in plan.phases:
        table.add_row(phase.name, phase.work, _format(phase.seconds), phase.basis)
    console.print(table)
    unmeasured = [phase.name for phase in plan.phases if phase.seconds is None]
    beside = f", and beside that {', '.join(unmeasured)}, of which there is no figure" if unmeasured else ""
    if plan.seconds is not None:
        print(f"ready after about {_format(plan.seconds)}{beside}: an estimate by docs/performance.md")
    for advice in plan.shorter:
        print(f"shorter: {advice}")


def _format(seconds: Seconds | None) -> str:
    if seconds is None:
        return "-"
    low, high = (f"{value:.1f}" for value in seconds)
    return f"{high} s" if low == high else f"{low} to {high} s"


def _estimate(name: str, work: str, found: Measured) -> StartPhase:
    return StartPhase(name, work, found.seconds, found.basis)


def _begin(memory: JobMemory, *, on_gpus: bool, nccl: bool) -> Iterator[StartPhase]:
    """Until the ranks know each other."""
    count, work = memory.topology.world_size, "torch, trtrun and the configuration"
    if on_gpus:
        yield _estimate("imports", work, IMPORTS)
    else:
        yield StartPhase("imports", work, None, CPU_RUN)
    if count > 1:
        groups = [shards.tp_size for shards in (memory.draft, memory.target) if shards and shards.tp_size > 1]
        sums = f", NCCL {' and '.join(f'{size} GPUs' for size in groups)}" if on_gpus and nccl and groups else ""
        yield StartPhase("links", f"MPI connects {count} processes{sums}", None, TWO_GPUS if sums else "")


def _weights(
    memory: JobMemory,
    files: Mapping[str, ModelFiles],
    ranks: Collection[RankStart],
    kernels: Kernels,
    here: Collection[str],
) -> StartPhase:
    work = describe_weights(memory, files, ranks, here)
    if all(of_role.is_made_up for of_role in files.values()) and kernels != "none":
        both = {"found": [MADE_UP_WARM], "missing": [MADE_UP_COLD]}
        return _range("weights", work, both.get(kernels, [MADE_UP_WARM, MADE_UP_COLD]))
    return StartPhase("weights", work)


def _range(name: str, work: str, found: list[Measured]) -> StartPhase:
    seconds = min(item.seconds[0] for item in found), max(item.seconds[1] for item in found)
    return StartPhase(name, work, seconds, found[-1].basis)


def _gpu_phases(
    memory: JobMemory, starts: RankStarts, ranks: Collection[RankStart], kernels: Kernels
) -> Iterator[StartPhase]:
    yield _compilation(memory, starts, ranks, kernels)
    if kernels == "found":
        yield StartPhase("largest round", "its memory is known from an earlier start", (0.0, 0.0))
    else:
        unless = ", unless an earlier start has left what it found" if kernels == "unknown" else ""
        phase = _estimate("largest round", f"run once for the memory that it takes{unless}", LARGEST_ROUND)
        yield _or_nothing(phase) if kernels == "unknown" else phase
    graphs = Counter(rank.graphs for rank in ranks)
    if set(graphs) == {0}:
        why = "cuda_graphs is off" if not memory.config.cuda_graphs else "sums over ranks go without NCCL"
        yield StartPhase("graphs", f"no CUDA graphs ({why}); all kernels run once")
        return
    told = [f"{rank.graphs} on rank {rank.rank}" for rank in ranks]
    work = f"all kernels once, and CUDA graphs: {', '.join(told)}"
    yield _estimate("graphs", work, graph_seconds(max(graphs)))


def _or_nothing(phase: StartPhase) -> StartPhase:
    assert phase.seconds is not None
    return StartPhase(phase.name, phase.work, (0.0, phase.seconds[1]), phase.basis)


def _compilation(memory: JobMemory, starts: RankStarts, ranks: Collection[RankStart], kernels: Kernels) -> StartPhase:
    if kernels == "none":
        return StartPhase("kernels", "nothing is compiled, as there is no Triton here: torch's run", (0.0, 0.0))
    if kernels == "found":
        return StartPhase("kernels", "those of this very job are in Triton's cache", (0.0, 0.0))
    topology = memory.topology
    if kernels == "unknown":
        hosts = {slot.host for slot in topology.slots if not starts.is_visible(slot)}
        where = f"on {', '.join(sorted(hosts))}" if any(hosts) else "not on this host"
        work = f"not known here whether Triton's cache has them: the GPUs are {where}. Compiled side by side where not"
        return _or_nothing(_estimate("kernels", work, COMPILED))
    lacking = [str(rank.rank) for rank in ranks if rank.kernels == "missing"]
    count = min(count_processes(len(topology.slots_of_host(slot.host))) for slot in topology.slots)
    which = f"rank{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}"
    work = f"Triton's cache has none of a start like this for {which}: compiled in {count} processes a rank"
    if count < NUM_PROCESSES:
        took = f"{COMPILED.seconds[0]:g} s with more processes: {COMPILED.basis}"
        return StartPhase("kernels", work, None, took)
    return _estimate("kernels", work, COMPILED)


def _cpu_phases(memory: JobMemory) -> Iterator[StartPhase]:
    dtypes = {shards.dtype for shards in (memory.draft, memory.target) if shards is not None}
    yield StartPhase("kernels", describe_cpu_kernels(has_own=bool(dtypes & {torch.bfloat16, torch.float32})))
    yield StartPhase("KV store", "its size follows from shapes; forwards of one row run once, without CUDA graphs")


def _rounds(memory: JobMemory, starts: RankStarts) -> Iterator[StartPhase]:
    config, draft = memory.config, memory.draft
    draft_context = draft.model.max_position_embeddings if draft is not None else None
    limits = SchedulerLimits.of(config, memory.context, draft_context, _LEAST_BLOCKS)
    practised, paced, ahead = count_first_rounds(config, limits)
    if practised:
        yield _estimate("rounds of each kind", f"{practised}, for their first use", KINDS_OF_ROUNDS)
    if ahead:
        work = f"up to {ahead}, for what drafting ahead gains (speculation.ahead)"
        yield _estimate("rounds drafted ahead", work, MEASURED_AHEAD)
    if not paced:
        return
    kinds = starts.device_kinds()
    if kinds is not None and KeptPacing.of(config, kinds).read()[0] is not None:
        yield StartPhase(_PACING_PHASE, "none: an earlier run has left what rounds cost", _NO_TIME)
        return
    unless = ", unless an earlier run has left it" if kinds is None else ""
    work = f"up to {paced}, for what rounds cost (speculation.pacing){unless}"
    phase = _estimate(_PACING_PHASE, work, MEASURED_ROUNDS)
    yield _or_nothing(phase) if unless else phase
