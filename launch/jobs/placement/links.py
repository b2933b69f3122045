"""Which ranks talk to each other, about what, and over which transport: from the topology alone.

The rule is `parallel.transports.open_communicator`'s, told ahead of time: a group of one is solo; NCCL serves a group
whose ranks all have a GPU of their own that NCCL can use; MPI serves the rest, staging what lies on a GPU through host
memory. Plans and reports always travel as host bytes, and the heartbeat beside MPI. Pure: it knows ranks and hosts, and
starts, opens and measures nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from parallel.topology import Topology


class Kind(enum.StrEnum):
    """What carries the messages of one group of ranks."""

    SOLO = "solo"
    MPI = "mpi"
    NCCL = "nccl"


class Transport(enum.StrEnum):
    """How bytes get from one rank to another."""

    SAME_PROCESS = "same process"
    MPI_SHARED_MEMORY = "MPI, shared memory"
    MPI_NETWORK = "MPI over network"
    STAGED_SHARED_MEMORY = "MPI with host staging, one host"
    STAGED_NETWORK = "MPI with host staging, over network"
    NCCL_ONE_HOST = "NCCL, one host"
    NCCL_NETWORK = "NCCL over network"
    TCP_ONE_HOST = "TCP, one host"
    TCP_NETWORK = "TCP over network"


class Carries(enum.StrEnum):
    """What travels on a link."""

    CONTROL = "plans and reports"
    HEARTBEAT = "heartbeat"
    DRAFT_SUMS = "draft all_reduce"
    TARGET_SUMS = "target all_reduce"
    DRAFT = "draft tokens"
    DRAFT_PROBS = "draft tokens, draft_probs"
    VERDICT = "verdict"
    VERDICT_AND_HIDDEN = "verdict, hidden states"


@dataclass(frozen=True)
class RankLink:
    """Two ranks that talk.

    Attributes:
        carries: what they say.
        ranks: world ranks. Drafts and verdicts go from the first to the second, the rest both ways. A rank twice
            stands for two engines in one process.
        transport: how it gets there.
    """

    carries: Carries
    ranks: tuple[int, int]
    transport: Transport


GROUPS = ("draft", "target", "workers")
"""Names of the groups in `parallel.groups.Groups`; drafts and verdicts travel in the last."""


def group_ranks(topology: Topology, name: str) -> tuple[int, ...]:
    """World ranks of one of GROUPS."""
    return {"draft": topology.draft_ranks, "target": topology.target_ranks, "workers": topology.worker_ranks}[name]


def expect_kinds(topology: Topology, nccl: bool) -> dict[str, Kind]:
    """What will carry each group's messages.

    Args:
        topology: who sits where. Its slots are different devices, as NCCL wants them.
        nccl: whether NCCL can be used where there are GPUs: CuPy with NCCL is installed on every host.
    """

    def expect(ranks: Sequence[int]) -> Kind:
        if len(ranks) < 2:
            return Kind.SOLO
        return Kind.NCCL if nccl and all(_on_gpu(topology, rank) for rank in ranks) else Kind.MPI

    return {name: expect(group_ranks(topology, name)) for name in GROUPS}


def list_links(
    topology: Topology, kinds: Mapping[str, Kind], sends_probs: bool, sends_hidden: bool = False
) -> tuple[RankLink, ...]:
    """Every pair of ranks that will talk, in the order control, heartbeat, all_reduce, drafts, verdicts.

    Args:
        topology: who sits where.
        kinds: what carries each group, by name (`expect_kinds`, or what was opened).
        sends_probs: whether draft probabilities travel beside the tokens (speculation.use_logits).
        sends_hidden: whether the target's hidden states travel to draft ranks, which have a head.
    """
    return tuple(_walk_links(topology, kinds, sends_probs, sends_hidden))


def _walk_links(
    topology: Topology, kinds: Mapping[str, Kind], sends_probs: bool, sends_hidden: bool
) -> Iterator[RankLink]:
    orchestrator = topology.orchestrator_rank
    for rank in topology.worker_ranks:
        place = Transport.SAME_PROCESS if rank == orchestrator else _over_mpi(topology, orchestrator, rank)
        yield RankLink(Carries.CONTROL, (orchestrator, rank), place)
    for rank in topology.worker_ranks:
        if rank != orchestrator:
            over = Transport.TCP_NETWORK if spans_hosts(topology, (orchestrator, rank)) else Transport.TCP_ONE_HOST
            yield RankLink(Carries.HEARTBEAT, (orchestrator, rank), over)
    for name, carries in (("draft", Carries.DRAFT_SUMS), ("target", Carries.TARGET_SUMS)):
        for first, second in combinations(sorted(group_ranks(topology, name)), 2):
            yield RankLink(carries, (first, second), _choose(topology, kinds[name], first, second))
    drafting = topology.draft_leader
    if drafting is not None:
        for rank in topology.target_ranks:
            carries = Carries.DRAFT_PROBS if sends_probs and rank == topology.target_leader else Carries.DRAFT
            yield RankLink(carries, (drafting, rank), _choose(topology, kinds["workers"], drafting, rank))
    for rank in topology.worker_ranks:
        # The link hands a verdict to every other engine rank; a draft in the target leader's process reads it in place.
        if rank != topology.target_leader or rank in topology.draft_ranks:
            transport = _choose(topology, kinds["workers"], topology.target_leader, rank)
            is_told = sends_hidden and rank in topology.draft_ranks
            carries = Carries.VERDICT_AND_HIDDEN if is_told else Carries.VERDICT
            yield RankLink(carries, (topology.target_leader, rank), transport)


def spans_hosts(topology: Topology, ranks: Iterable[int]) -> bool:
    """Whether ranks sit on more than one host."""
    return len({topology.host(rank) for rank in ranks}) > 1


def _choose(topology: Topology, kind: Kind, first: int, second: int) -> Transport:
    """How tensors of two ranks of a group travel."""
    if first == second:
        return Transport.SAME_PROCESS
    if kind is Kind.NCCL:
        return Transport.NCCL_NETWORK if spans_hosts(topology, (first, second)) else Transport.NCCL_ONE_HOST
    if not (_on_gpu(topology, first) or _on_gpu(topology, second)):
        return _over_mpi(topology, first, second)
    return Transport.STAGED_NETWORK if spans_hosts(topology, (first, second)) else Transport.STAGED_SHARED_MEMORY


def _over_mpi(topology: Topology, first: int, second: int) -> Transport:
    """How host bytes travel."""
    return Transport.MPI_NETWORK if spans_hosts(topology, (first, second)) else Transport.MPI_SHARED_MEMORY


def _on_gpu(topology: Topology, rank: int) -> bool:
    slot = topology.slot(rank)
    return slot is not None and slot.device.startswith("cuda")


@dataclass(frozen=True)
class LinkRow:
    """Links that carry the same over the same transport, as one row of a table."""

    carries: Carries
    ranks: str
    transport: Transport


def summarize_links(links: Sequence[RankLink]) -> tuple[LinkRow, ...]:
    """Put links that differ only in their ranks into one row: "1→2 1→3", "2–5, all pairs"."""
    rows: dict[tuple[Carries, Transport], list[tuple[int, int]]] = {}
    for link in links:
        rows.setdefault((link.carries, link.transport), []).append(link.ranks)
    return tuple(LinkRow(carries, _show_pairs(carries, pairs), how) for (carries, how), pairs in rows.items())


def show_ranks(ranks: Iterable[int]) -> str:
    """Numbers for people: 1, 2, 3, 7 → "1–3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{'–' if len(run) > 2 else ', '}{run[-1]}" for run in runs
    )


def _show_pairs(carries: Carries, pairs: Sequence[tuple[int, int]]) -> str:
    """The pairs of one row. All but sums have one rank in common on the left."""
    first = {pair[0] for pair in pairs}
    if carries in (Carries.DRAFT_SUMS, Carries.TARGET_SUMS):
        members = sorted({rank for pair in pairs for rank in pair})
        if len(pairs) == len(members) * (len(members) - 1) // 2 and len(members) > 2:
            return f"{show_ranks(members)}, all pairs"
        return " ".join(f"{one}↔{other}" for one, other in pairs)
    arrow = "↔" if carries in (Carries.CONTROL, Carries.HEARTBEAT) else "→"
    assert len(first) == 1
    return f"{first.pop()}{arrow}{show_ranks(pair[1] for pair in pairs)}"
