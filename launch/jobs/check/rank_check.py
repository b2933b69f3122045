"""`trtrun check`, and the short check before every run: the ranks prove that they fit together, without weights.

Rank 0 leads. It collects every rank's inventory, then names one step after another; the ranks that a step concerns do
it and report. It knows steps and who takes part in them; who is late is `session`'s business, what a rank knows of its
host is `inventory`'s, messages are `parallel.probe`'s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.exit_codes import ExitCode
from launch.jobs.check.inventory import find_misfits, take_inventory
from launch.jobs.check.report import CheckReport, LinkReport, print_report, report_json
from launch.jobs.check.session import Session, SetupError
from launch.jobs.mpi.job import finish_mpi, is_reporting_rank, print_error
from launch.jobs.mpi.start_progress import DONE, STARTED, StartProgress
from launch.jobs.placement.links import GROUPS, Carries, Kind, RankLink, group_ranks, list_links, show_ranks
from parallel import probe
from parallel.communicator import Communicator, SumTiming
from parallel.errors import ControlPlaneError
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import RankFailedError
from trtrun.rounds.failures import describe_draft_loss
from trtrun.start.job_spec import DraftTranslation, JobSpec

LAUNCH_SECONDS = 8.0
"""How much of the time of `trtrun check` is for the start of mpirun and for the end of a job that hangs."""


def check_before_run(spec: JobSpec, *, looks_at_devices: bool = True) -> None:
    """The short check: the inventories of all ranks fit together. Collective over the job; a single process passes.

    The messages between ranks are tried where the job opens its communicators, so not here. An engine that stands by
    looks at no device: the one that serves has the memory.

    Raises:
        SystemExit: something is wrong, and rank 0 has told it.
        RankFailedError: on rank 0, a rank failed, or was not done in time.
    """
    place = find_mpi_rank()
    if place is None or place.size == 1:
        StartProgress().tell(DONE, "the start")
        return
    with Session.open(spec, spec.config.launch.check_seconds, looks_at_devices=looks_at_devices) as session:
        if session.rank != 0:
            session.send_inventory()
            if not session.next_order()["ok"]:
                raise SystemExit(ExitCode.DONE)  # the end of rank 0 ends the job
            return
        _, problems = session.gather_inventories()
        session.order({"step": "end", "ok": not problems})
        if problems:
            raise SystemExit(_refuse(problems))


def play_check(spec: JobSpec, as_json: bool) -> int:
    """This rank's part of `trtrun check`; rank 0 tells what was found.

    Returns:
        The exit status: refused where the ranks do not fit together, failed where messages came through wrong.

    Raises:
        RankFailedError: on rank 0, a rank failed, or was not done in time.
    """
    if not is_reporting_rank():
        follow_check(spec)
        return ExitCode.DONE
    try:
        report = lead_check(spec)
    except SetupError as error:
        if as_json:
            print(report_json(None, error.problems), flush=True)
        return _refuse(error.problems)
    except RankFailedError as error:
        if as_json:
            print(report_json(None, (str(error),)), flush=True)
        raise
    if as_json:
        print(report_json(report))
    else:
        print_report(report)
    sys.stdout.flush()
    for line in report.failures:
        print_error(line)
    finish_mpi()  # last: MPICH's mpirun may end a job, and what it says, once its first ranks are done
    return ExitCode.FAILED if report.failures else ExitCode.DONE


def lead_check(spec: JobSpec) -> CheckReport:
    """The thorough check, on rank 0 or in a job of one process.

    Raises:
        SetupError: with all that is wrong.
        RankFailedError: with the ranks that failed, or that were not done in time.
    """
    config, topology = spec.config, spec.topology
    if topology.world_size == 1:
        ranks = [take_inventory(spec, 0, is_thorough=True)]
        problems = find_misfits(ranks, topology)
        if problems:
            raise SetupError(problems)
        links = list_links(topology, dict.fromkeys(GROUPS, Kind.SOLO), _sends_probs(config), config.heads_apart)
        untried = [LinkReport.untried(link) for link in links]
        seconds = time.monotonic() - STARTED
        return CheckReport.make(topology, ranks, untried, seconds, translation=DraftTranslation.of(spec))
    seconds = config.launch.check_seconds
    until = STARTED + max(seconds / 2, seconds - LAUNCH_SECONDS)
    with Session.open(spec, until - time.monotonic(), is_thorough=True) as session:
        ranks, problems = session.gather_inventories()
        if problems:
            session.order({"step": "end", "ok": False})
            raise SetupError(problems)
        reports = list(_lead_steps(session))
        session.order({"step": "end", "ok": True})
        draft_loss = describe_draft_loss(config, topology)
        translation = DraftTranslation.of(spec)
        return CheckReport.make(topology, ranks, reports, time.monotonic() - STARTED, draft_loss, translation)


def follow_check(spec: JobSpec) -> None:
    """The thorough check on all other ranks: do what rank 0 says until it ends."""
    with Session.open(spec, spec.config.launch.check_seconds, is_thorough=True) as session:
        session.send_inventory()
        while (order := session.next_order())["step"] != "end":
            if session.rank not in order["ranks"]:
                continue
            session.begin(order["title"])
            try:
                session.send(_follow(session, order))
            except Exception as error:  # others may be waiting for this rank inside MPI, rank 0 too
                session.control.abort(f"step '{order['title']}': {type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Tried:
    """What came of a step at all of its ranks: what was wrong, with the rank it came to, and how fast it went."""

    faults: tuple[str, ...]
    timing: probe.Timing


def _refuse(problems: Sequence[str]) -> ExitCode:
    """Tell what is wrong, one line each; returns the exit status."""
    for line in problems:
        print_error(line)
    return ExitCode.REFUSED


def _lead_steps(session: Session) -> Iterator[LinkReport]:
    """All steps after the inventories, in order; yields what they found about each link."""
    topology = session.topology
    workers = topology.worker_ranks
    control = _try_control(session, workers)
    opened = session.run_step("opening the communicators", workers, session.open_groups, step="open")
    kinds = _merge_kinds(opened.values())
    links = list_links(topology, kinds, _sends_probs(session.config), session.config.heads_apart)
    pairs: dict[frozenset[int], _Tried] = {}
    for link in links:
        if link.carries is Carries.CONTROL:
            yield LinkReport.of(link, control[link.ranks[1]].faults, control[link.ranks[1]].timing)
        elif link.carries is Carries.HEARTBEAT:  # it has carried beats from the beginning
            yield LinkReport.of(link, (), None)
    for name, carries in (("draft", Carries.DRAFT_SUMS), ("target", Carries.TARGET_SUMS)):
        members = group_ranks(topology, name)
        if len(members) > 1:
            answers = session.run_step(f"{carries} of rank {show_ranks(members)}", members, step="group", name=name)
            tried = _merge(answers, {rank: f"{carries} at rank {rank}" for rank in members})
            # The ranks have agreed on them, so those of one are those of all.
            sums = [SumTiming(**timing) for timing in answers[members[0]]["sums"]]
            group_links = [link for link in links if link.carries is carries]
            yield LinkReport.of_group(group_links, tried.faults, tried.timing, sums)
    for link in links:
        if link.carries in (Carries.DRAFT, Carries.DRAFT_PROBS, Carries.VERDICT, Carries.VERDICT_AND_HIDDEN):
            yield _try_pair(session, link, pairs)


def _try_control(session: Session, workers: Sequence[int]) -> dict[int, _Tried]:
    """The links between rank 0 and each worker."""
    title = "plans and reports"
    session.start_step(title, workers, step="control")
    tried = {}
    for rank in workers:
        try:
            faults, timing = probe.probe_control(session.control, rank, probe.SIZES, session.has_failed)
        except ControlPlaneError:
            session.collect([rank])  # raises what the heartbeat has found
            raise
        tried[rank] = _Tried((f"rank {rank} to rank 0: {_shorten(faults)}",) if faults else (), timing)
    probe.end_control(session.control)
    for rank, answer in session.collect(workers).items():
        if answer["faults"]:
            wrong = f"rank 0 to rank {rank}: {_shorten(answer['faults'])}"
            tried[rank] = _Tried((*tried[rank].faults, wrong), tried[rank].timing)
    return tried


def _try_pair(session: Session, link: RankLink, tried: dict[frozenset[int], _Tried]) -> LinkReport:
    """A link between two workers; what goes both ways is tried once."""
    pair = frozenset(link.ranks)
    if len(pair) == 1:
        return LinkReport.untried(link)
    if pair not in tried:
        first, second = link.ranks
        answers = session.run_step(f"{link.carries}, rank {first} to rank {second}", pair, step="pair")
        ways = {second: f"rank {first} to rank {second}", first: f"rank {second} to rank {first}"}
        tried[pair] = _merge(answers, ways)
    return LinkReport.of(link, tried[pair].faults, tried[pair].timing)


def _merge(answers: dict[int, dict[str, Any]], ways: Mapping[int, str]) -> _Tried:
    """The reports of a step's ranks. The slowest rank's time is the link's.

    Args:
        answers: by rank.
        ways: how what was wrong came to each rank.
    """
    faults = tuple(
        f"{ways[rank]}: {_shorten(answers[rank]['faults'])}" for rank in sorted(answers) if answers[rank]["faults"]
    )
    timings = [probe.Timing(**answer["timing"]) for answer in answers.values()]
    return _Tried(
        faults, probe.Timing(max(item.latency_s for item in timings), min(item.bytes_per_s for item in timings))
    )


def _shorten(faults: Sequence[str]) -> str:
    """What was wrong in a step at one rank, as one text."""
    return faults[0] if len(faults) == 1 else f"{faults[0]}; and {len(faults) - 1} more"


def _follow(session: Session, order: dict[str, Any]) -> dict[str, Any]:
    """A worker's part of one step; returns its report."""
    if order["step"] == "control":
        return {"faults": probe.answer_control(session.control)}
    if order["step"] == "open":
        session.open_groups()
        assert session.groups is not None
        return {"kinds": {name: _kind_of(getattr(session.groups, name)) for name in GROUPS}}
    groups = session.groups
    assert groups is not None
    if order["step"] == "group":
        group = groups.draft if order["name"] == "draft" else groups.target
        assert group is not None
        faults, timing = probe.verify_group(group, probe.SIZES), asdict(probe.measure_all_reduce(group))
        return {"faults": faults, "timing": timing, "sums": [asdict(sum_timing) for sum_timing in group.sum_timings]}
    (peer,) = (rank for rank in order["ranks"] if rank != session.rank)
    workers = groups.workers
    assert workers is not None
    place = session.topology.worker_ranks.index(peer)
    faults = probe.verify_pair(workers, place, probe.SIZES)
    return {"faults": faults, "timing": asdict(probe.measure_pair(workers, place))}


def _kind_of(communicator: Communicator | None) -> str | None:
    """What carries an open group; None where this rank is no member."""
    return None if communicator is None else type(communicator).__name__.removesuffix("Communicator").lower()


def _merge_kinds(answers: Iterable[dict[str, Any]]) -> dict[str, Kind]:
    """What carries each group, from its members' reports; a group without members is solo."""
    kinds = dict.fromkeys(GROUPS, Kind.SOLO)
    for answer in answers:
        kinds |= {name: Kind(kind) for name, kind in answer["kinds"].items() if kind is not None}
    return kinds


def _sends_probs(config: RuntimeConfig) -> bool:
    return config.has_draft_engine and config.speculation.use_logits
