"""The trace of a benchmark: spans of the timed runs as a file that chrome://tracing and Perfetto open.

The file is JSON in the Trace Event Format: a process for each rank, complete events ("X") in microseconds, and a
summary of how idle each rank was. It knows spans and who sits where. It does not know how spans are taken.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.batch.journal import check_output, working_path
from launch.batch.options import Workload, is_stream
from parallel.topology import Role, Topology
from trtrun.errors import ConfigError
from trtrun.timing.spans import ENGINES, ORCHESTRATOR, IdleTime, RankSpans

if TYPE_CHECKING:
    from trtrun.api.llm import LLM

MOST_SPANS = 300_000
"""Of all ranks and runs together, about: some 40 MB of file, and as much memory on rank 0."""
SPANS_A_ROUND = 4
"""Of one rank, about."""

_RUNS_THREAD = 0
_THREADS = {ORCHESTRATOR: 1, ENGINES: 2}
"""Rows of a process, from the top down."""


@dataclass(frozen=True)
class TracedRun:
    """What every rank did in one timed run."""

    mode: str
    workload: Workload
    ranks: list[RankSpans]


def check_trace(path: str) -> None:
    """Raise ConfigError when a trace cannot be written to `path`; the file is not touched."""
    check_output(path)
    if is_stream(path):
        raise ConfigError(f"--trace {path}: a trace needs a file")
    folder = working_path(path).parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--trace {path}: nothing may be written into {folder}")


class BenchTrace:
    """The spans of a benchmark's timed runs; of none where no file is named.

    Attributes:
        path: of the file, or None.
    """

    def __init__(self, path: str | None, topology: Topology, num_runs: int) -> None:
        """Keep up to MOST_SPANS spans of `num_runs` runs, as many rounds from the start of each."""
        self.path = path
        self._topology = topology
        per_round = (topology.world_size + 1) * SPANS_A_ROUND
        self._most_rounds = max(1, MOST_SPANS // (per_round * max(1, num_runs)))
        self._runs: list[TracedRun] = []

    @contextmanager
    def run(self, llm: LLM, mode: str, workload: Workload) -> Iterator[None]:
        """Trace one timed run. Logs are started before it and collected after it."""
        if self.path is None:
            yield
            return
        orchestrator = llm.engine.orchestrator
        orchestrator.start_trace(self._most_rounds)
        yield
        self._runs.append(TracedRun(mode, workload, orchestrator.take_trace()))

    def figures(self, mode: str, workload: Workload) -> dict[str, float]:
        """What the JSON of a case says beside its own: the target leader's share of time idle, 0 to 1."""
        idle = self._idle_time(mode, workload, self._topology.target_leader, ENGINES)
        return {"target_idle_share": round(idle.share, 4)} if idle.elapsed else {}

    def write(self) -> None:
        """Write the file, whole or not at all; nothing where none is named.

        Raises:
            OSError: it cannot be written.
        """
        if self.path is None:
            return
        partial = working_path(self.path)
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ')
            file.write(json.dumps(self.summary()))
            file.write(',\n"traceEvents": [')
            separator = "\n"
            for event in self._events():
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("\n]}\n")
        partial.replace(Path(self.path).resolve())

    def summary(self) -> dict[str, Any]:
        """How idle every rank was in every case, what was left out, and how far clocks may be off."""
        places = [(spans.rank, spans.part) for spans in self._runs[0].ranks] if self._runs else []
        cases = dict.fromkeys((run.workload, run.mode) for run in self._runs)
        idle = [
            asdict(workload)
            | {"mode": mode, "rank": rank, "part": part, "name": self._topology.describe(rank)}
            | _idle_figures(self._idle_time(mode, workload, rank, part))
            for workload, mode in cases
            for rank, part in places
        ]
        dropped = [max((spans.num_dropped_rounds for spans in run.ranks), default=0) for run in self._runs]
        clocks = [
            {"run": number, "rank": spans.rank}
            | {
                f"{name}_us": round(1e6 * value, 3)
                for name, value in zip(("offset", "error"), spans.clock, strict=True)
            }
            for number, run in enumerate(self._runs)
            for spans in run.ranks
            if spans.part == ENGINES
        ]
        return {
            "runs": [_label(number, run) for number, run in enumerate(self._runs)],
            "num_dropped_rounds": sum(dropped),
            "idle": idle,
            "clocks": clocks,
        }

    def _idle_time(self, mode: str, workload: Workload, rank: int, part: str) -> IdleTime:
        idle = IdleTime()
        waits = _waits(self._topology, rank)
        for run in self._runs:
            if (run.mode, run.workload) == (mode, workload):
                for spans in run.ranks:
                    if (spans.rank, spans.part) == (rank, part):
                        idle.add_run(spans.spans, waits)
        return idle

    def _events(self) -> Iterator[dict[str, Any]]:
        """Names of the rows first, then everything that took time."""
        threads = {0: {_RUNS_THREAD: "timed runs"}}
        for spans in self._runs[0].ranks if self._runs else ():
            roles = [role for role in self._topology.roles(spans.rank) if role is not Role.ORCHESTRATOR]
            name = ORCHESTRATOR if spans.part == ORCHESTRATOR else "+".join(roles)
            threads.setdefault(spans.rank, {})[_THREADS[spans.part]] = name
        for rank, names in threads.items():
            yield _name_of("process_name", rank, 0, {"name": self._topology.describe(rank)})
            yield _name_of("process_sort_index", rank, 0, {"sort_index": rank})
            for thread, name in names.items():
                yield _name_of("thread_name", rank, thread, {"name": name})
                yield _name_of("thread_sort_index", rank, thread, {"sort_index": thread})
        starts = [spans.spans[0].start for run in self._runs for spans in run.ranks if spans.spans]
        origin = min(starts, default=0.0)
        for number, run in enumerate(self._runs):
            yield from _events_of_run(number, run, origin)


def _events_of_run(number: int, run: TracedRun, origin: float) -> Iterator[dict[str, Any]]:
    logged = [spans.spans for spans in run.ranks if spans.spans]
    if not logged:
        return
    first, last = min(spans[0].start for spans in logged), max(spans[-1].end for spans in logged)
    label = _label(number, run)
    yield _complete(label, "run", (0, _RUNS_THREAD), (first - origin, last - origin), {"run": number})
    for spans in run.ranks:
        place = (spans.rank, _THREADS[spans.part])
        for span in spans.spans:
            times = (span.start - origin, span.end - origin)
            yield _complete(span.name, spans.part, place, times, {"round": span.round_index, "run": number})


def _complete(
    name: str, category: str, place: tuple[int, int], times: tuple[float, float], arguments: dict[str, int]
) -> dict[str, Any]:
    """A complete event at a place (rank, thread). Times are rounded to nanoseconds before they become microseconds, so
    that spans that follow each other without a gap do so in the file."""
    start, end = (round(1e9 * seconds) for seconds in times)
    return {
        "name": name, "cat": category, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3,
        "pid": place[0], "tid": place[1], "args": arguments,
    }  # fmt: skip


def _name_of(kind: str, rank: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A metadata event."""
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _label(number: int, run: TracedRun) -> str:
    return f"run {number}: {run.mode}, {run.workload}"


def _waits(topology: Topology, rank: int) -> frozenset[str]:
    """Names of the spans in which a rank waits: a draft's transfer is its sending, a target's is the wait for it."""
    drafts = Role.DRAFT in topology.roles(rank)
    return frozenset({"waiting"} if drafts else {"waiting", "transferring"})


def _idle_figures(idle: IdleTime) -> dict[str, float]:
    return {
        "num_rounds": idle.num_rounds,
        "idle_share": round(idle.share, 4),
        "idle_ms_a_round": round(1e3 * idle.idle / max(1, idle.num_rounds), 6),
    }
