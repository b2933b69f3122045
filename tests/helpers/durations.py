"""What each test takes: seconds by the clock, and seconds of a core, those of processes that it starts among them.

scripts/test.sh has each process of pytest write a file of these, and makes build/test-durations.json of them; called as
a program this prints the dearest files and folders of that. Seconds of a core are comparable between machines that are
busy; seconds by the clock tell what tests wait for. It does not know what tests do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
WORTH_LOOKING = 0.2
"""Seconds of a test behind which processes are looked for that it may have started."""

STAGES = ("setup", "call", "teardown")


class Durations:
    """Takes the times of the tests of this process.

    Args:
        folder: where they are written when the session ends.
        phase: what part of the suite this is.
    """

    def __init__(self, folder: Path, phase: str) -> None:
        self._path = folder / f"{phase}-{os.getpid()}.json"
        self._phase = phase
        self._rows: dict[str, dict[str, Any]] = {}
        self._below = 0.0
        self._used = own_core_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """What the processes below this one, and itself, have used of a core by the test's end."""
        started = time.monotonic()
        try:
            return (yield)
        finally:
            # Looking through all processes takes some milliseconds. What is not seen here is seen behind a later test.
            if time.monotonic() - started > WORTH_LOOKING:
                self._below = core_seconds_below(os.getpid())
            used = own_core_seconds() + self._below
            row = self._rows.setdefault(item.nodeid, {})
            row["core"] = row.get("core", 0.0) + used - self._used
            self._used = used

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Seconds by the clock of the three stages of a test."""
        self._rows.setdefault(report.nodeid, {})[report.when or "call"] = report.duration

    def pytest_sessionfinish(self) -> None:
        """Write them."""
        rows = [{"test": name, "phase": self._phase, **row} for name, row in self._rows.items()]
        self._path.write_text(json.dumps(rows))


def own_core_seconds() -> float:
    """What this process has used so far, and those that it started and waited for."""
    return sum(os.times()[:4])


def core_seconds_below(process: int) -> float:
    """What the running processes have used so far that descend from one, and those that they waited for. Those that
    others adopted are not seen."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended; who waits for it has its time then
        used[int(entry)] = sum(map(int, fields[11:15])) / TICKS
        children.setdefault(int(fields[1]), []).append(int(entry))
    total, waiting = 0.0, list(children.get(process, []))
    while waiting:
        child = waiting.pop()
        total += used[child]
        waiting += children.get(child, [])
    return total


def merge(folder: Path, target: Path) -> None:
    """One file of those of all processes: a list of tests, the dearest first."""
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]
    for row in rows:
        row.update({name: round(row.get(name, 0.0), 3) for name in ("core", *STAGES)})
    target.parent.mkdir(parents=True, exist_ok=True)
    rows.sort(key=lambda row: -max(row["core"], sum(row[stage] for stage in STAGES)))
    target.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def table(rows: Iterable[dict[str, Any]], num_files: int) -> str:
    """Seconds by phase and folder, and of the dearest files, as Markdown."""
    sums: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in ("core", "clock", "tests")}
    for row in rows:
        file = row["test"].partition("::")[0]
        parts = Path(file).parts
        folder = "/".join(parts[: 3 if parts[1] in ("unit", "e2e") else 2])
        for key in ((row["phase"],), (row["phase"], folder), (row["phase"], folder, file)):
            sums["core"][key] += row["core"]
            sums["clock"][key] += sum(row[stage] for stage in STAGES)
            sums["tests"][key] += 1
    lines = ["| phase | folder or file | tests | seconds of a core | by the clock |", "|---|---|---|---|---|"]
    for depth, most in ((1, None), (2, 30), (3, num_files)):
        keys = sorted((key for key in sums["core"] if len(key) == depth), key=lambda key: -sums["core"][key])[:most]
        for key in keys:
            name = key[-1] if depth > 1 else "all"
            lines.append(
                f"| {key[0]} | {name} | {sums['tests'][key]} | {sums['core'][key]:.0f} | {sums['clock'][key]:.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "merge":
        merge(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(table(json.loads(Path(sys.argv[1]).read_text()), num_files=40))
