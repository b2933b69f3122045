"""Times plans and reports between rank 0 and workers in the middle of a run, and what a rank costs that waits for one.

    mpirun --bind-to none -n 2 python scripts/bench/bench_messages.py [--round-ms 2,20] [--rounds 100] [--rows 1]
    [--idle-s 2]

All ranks are on one host, as clocks are compared. In each round rank 0 sends a plan to every worker, each computes (a
fixed number of small products, about --round-ms long), and each reports. Ways to wait take turns, ten rounds each:

    spin     a Waiter that may spin, as ranks wait where there are cores enough
    learn    a Waiter that may not, as they wait elsewhere
    nap      naps of 1/64 of the time waited, from 50 µs on, with the system's slack: nothing is learned

"plan" and "report" are from the call that sends to the return of the call that receives, in µs; "coding here" is what
rank 0 takes to write plans and read reports, "coding there" what a worker takes to write a report; "round" is all that
a round takes beside the computing. "computing" says whether the waiting slows
the workers; "idle" is the CPU share of a worker that waits for seconds after the rounds. Figures are medians, with the
first and the last decile. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from parallel.control import ControlPlane
from parallel.topology import Slot, Topology
from parallel.waiting import LONGEST_NAP_S, NAP_SHARE, QUICK_TRIES, Waiter
from trtrun.core.nouns import RoundPlan
from trtrun.threads import count_cores
from trtrun.wire.plans import decode_plan, encode_plan
from trtrun.wire.reports import ReportArrays, RoundTimes, decode_report

FIGURES = ("plan", "report", "coding here", "coding there", "round", "computing")

TURN = 10
"""Rounds of one way before the next has its turn; the first two of a turn do not count."""


class NapOnly:
    """Waits as ranks did before they learned."""

    def wait(self, test: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the test holds; the timeout does not count."""
        if test():
            return True
        for _ in range(QUICK_TRIES):
            os.sched_yield()
            if test():
                return True
        start = time.perf_counter()
        while True:
            time.sleep(min(max((time.perf_counter() - start) * NAP_SHARE, 50e-6), LONGEST_NAP_S))
            if test():
                return True


WAYS: dict[str, Callable[[], Waiter | NapOnly]] = {
    "spin": lambda: Waiter(may_spin=True),
    "learn": lambda: Waiter(may_spin=False),
    "nap": NapOnly,
}


class Work:
    """Products of small matrices, which stay in the cache."""

    def __init__(self) -> None:
        self._matrix = np.ones((64, 64), dtype=np.float32)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._matrix @ self._matrix

    def count_for(self, seconds: float) -> int:
        """How many products take about that long."""
        times = []
        for _ in range(20):
            start = time.perf_counter()
            self.run(200)
            times.append(time.perf_counter() - start)
        return max(1, int(200 * seconds / sorted(times)[len(times) // 2]))


def make_plan(rows: int) -> RoundPlan:
    """A plan of decode rows only, numbered with the time in nanoseconds."""
    lens = np.full(rows, 5, dtype=np.int32)
    updates = np.zeros((1, 3), dtype=np.int32)
    return RoundPlan(time.perf_counter_ns(), (), (), updates, (), np.arange(rows, dtype=np.int32), lens, lens, 500)


def lead_turn(control: ControlPlane, workers: int, rows: int, figures: dict[str, list[float]]) -> None:
    """Rank 0's part of one turn."""
    for index in range(TURN):
        begun = time.perf_counter()
        payload = encode_plan(make_plan(rows))
        sent = time.perf_counter()
        control.publish(payload)
        computing = 0.0
        for _ in range(workers):
            report = control.collect()
            received = time.perf_counter()
            assert report is not None
            times = decode_report(report.payload).times
            decoded = time.perf_counter()
            computing = max(computing, times.verifying)
            if index >= 2:
                # The worker's times: when it had the plan, when it sent the report; both clocks are the host's.
                figures["plan"].append((times.drafting - sent) * 1e6)
                figures["report"].append((received - times.transferring - times.anticipating) * 1e6)
                figures["coding there"].append(times.anticipating * 1e6)
                figures["computing"].append(times.verifying * 1e6)
        if index >= 2:
            figures["coding here"].append((sent - begun + decoded - received) * 1e6)
            figures["round"].append((decoded - begun - computing) * 1e6)


def follow_turn(control: ControlPlane, work: Work, count: int, rows: int) -> None:
    """A worker's part of one turn."""
    tokens = np.zeros((rows, 6), dtype=np.int64)
    coding = 0.0  # of the report before: a report cannot say how long its own bytes took
    for _ in range(TURN):
        payload = control.receive()
        received = time.perf_counter()
        assert payload is not None
        plan = decode_plan(payload)
        started = time.perf_counter()
        work.run(count)
        ended = time.perf_counter()
        begun = time.perf_counter()
        times = RoundTimes(received, begun, ended - started, coding)
        report = ReportArrays(plan.round_index, times, tokens[:, 0], tokens[:, 0], tokens).encode()
        coding = time.perf_counter() - begun
        control.report(report)


def idle_share(world: MPI.Intracomm, control: ControlPlane, seconds: float) -> float:
    """The largest CPU share of a worker that waits for a plan; at rank 0, 0 elsewhere."""
    world.Barrier()
    if control.rank == 0:
        time.sleep(seconds)
        control.publish(b"")
        return max(world.gather(0.0) or [0.0])
    start, used = time.perf_counter(), time.process_time()
    control.receive()
    world.gather((time.process_time() - used) / (time.perf_counter() - start))
    return 0.0


def deciles(values: list[float]) -> list[float]:
    """First decile, median and last decile."""
    ordered = sorted(values)
    return [round(ordered[int(len(ordered) * share)], 1) for share in (0.1, 0.5, 0.9)]


def numbers(text: str) -> list[float]:
    """Positive numbers with commas between.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of positive numbers")
    return found


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-ms", type=numbers, default="2,20", help="computing in a round, with commas between")
    parser.add_argument("--rounds", type=int, default=100, help="of each way and each length")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--idle-s", type=float, default=2.0)
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    if world.size < 2:
        print("bench_messages.py: start two ranks or more with mpirun", file=sys.stderr)
        return 2
    workers = world.size - 1
    topology = Topology(tuple(Slot(f"cpu:{index}", index + 1, None, index) for index in range(workers)))
    control = ControlPlane(world, topology)
    control.warm_up()
    work = Work()
    entries = []
    for length in options.round_ms:
        waiters = {way: make() for way, make in WAYS.items()}
        figures: dict[str, dict[str, list[float]]] = {
            way: {name: [] for name in ("plan", "report", "coding here", "coding there", "round", "computing")}
            for way in WAYS
        }
        count = world.bcast(work.count_for(length / 1e3) if world.rank == 1 else None, root=1)
        for _ in range(-(-options.rounds // (TURN - 2))):
            for way, waiter in waiters.items():
                control._waiter = waiter
                world.Barrier()
                if world.rank == 0:
                    lead_turn(control, workers, options.rows, figures[way])
                else:
                    follow_turn(control, work, count, options.rows)
        for way, waiter in waiters.items():
            control._waiter = waiter
            idle = idle_share(world, control, options.idle_s)
            entry: dict[str, object] = {"round_ms": length, "way": way, "idle_percent": round(100 * idle, 1)}
            if world.rank == 0:
                entry |= {f"{name.replace(' ', '_')}_us": deciles(values) for name, values in figures[way].items()}
                print(", ".join(f"{name} {value}" for name, value in entry.items()), flush=True)
            entries.append(entry)
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "cores": count_cores(), "rows": options.rows, "messages": entries}))
    control.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
