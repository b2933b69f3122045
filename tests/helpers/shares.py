"""Which process of pytest-xdist runs which tests, and in which order.

With `--dist worksteal` each process is given as many tests as the others, in the order of collection, and who is done
takes from the end of the longest queue. As collected, one process would have all tests that start processes, and wait
for them: the others would be done with tests/unit by then, and at the end the longest tests would run alone. So each
process gets as much of either kind, file by file in turn, and behind them short tests that level the ends.

It does not know what tests do: only in which folder they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

SECONDS = {"slurm": 18.0, "hosts": 12.0, "ranks": 6.0, "serve": 4.5, "cli": 4.0}
"""What a test takes in folders of tests that start processes, roughly."""

LEVELLING = 0.25
"""Part of a process's other tests that come behind all that start processes."""

Places = list[int]


def deal(paths: Sequence[Path], num_processes: int) -> Places:
    """In which order tests are to run.

    Args:
        paths: file of each test, in the order of collection.
        num_processes: that share the tests.

    Returns:
        places in `paths`: of the first process's tests, then of the second one's, and so on. Tests of a file stay
        together, but for one file of tests that start no process at each end of a share.
    """
    files = [list(places) for _, places in groupby(range(len(paths)), key=paths.__getitem__)]
    starting: list[list[Places]] = [[] for _ in range(num_processes)]
    heavy = sorted((file for file in files if _seconds(file, paths)), key=lambda file: _rank(paths[file[0]]))
    total, before = sum(_seconds(file, paths) for file in heavy), 0.0
    for file in heavy:
        middle = before + _seconds(file, paths) / 2
        starting[int(middle / total * num_processes)].append(file)
        before += _seconds(file, paths)
    others = [place for file in files if not _seconds(file, paths) for place in file]
    order: Places = []
    for share in range(num_processes):
        size = len(paths) * (share + 1) // num_processes - len(order)
        count = max(0, size - sum(map(len, starting[share])))
        own, others = others[:count], others[count:]
        order += _in_turn(starting[share], own, paths)
    return order + others


def _rank(path: Path) -> int:
    return list(SECONDS).index(_folder(path))


def _folder(path: Path) -> str:
    """The folder of `tests`, or of `tests/e2e`, that a file lies in."""
    first, *others = path.relative_to(Path(__file__).parents[1]).parts
    return others[0] if first == "e2e" else first


def _seconds(file: Places, paths: Sequence[Path]) -> float:
    return len(file) * SECONDS.get(_folder(paths[file[0]]), 0.0)


def _in_turn(starting: Sequence[Places], others: Places, paths: Sequence[Path]) -> Places:
    """Files of tests that start processes, between them files of the others, in proportion to the time."""
    total = sum(_seconds(file, paths) for file in starting)
    until_levelling = int(len(others) * (1 - LEVELLING))
    order, done, given = [], 0.0, 0
    for file in starting:
        order += file
        done += _seconds(file, paths)
        while given < done / total * until_levelling:
            of_file = paths[others[given]]
            while given < len(others) and paths[others[given]] == of_file:
                order.append(others[given])
                given += 1
    return order + others[given:]
