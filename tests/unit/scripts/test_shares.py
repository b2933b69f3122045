"""tests/helpers/shares.py: every test has its place, files stay together, and each process gets its part of either
kind."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from shares import SECONDS, deal

TESTS = Path(__file__).resolve().parents[2]
E2E = TESTS / "e2e"
PATHS = [
    (TESTS if folder == "unit" else E2E) / folder / f"test_{file}.py"
    for folder, files, tests in (("cli", 30, 11), ("hosts", 5, 5), ("serve", 14, 9), ("slurm", 3, 6), ("unit", 280, 20))
    for file in range(files)
    for _ in range(tests)
]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_each_process_has_its_part_of_what_starts_processes_and_ends_with_the_rest(num_processes: int) -> None:
    order = deal(PATHS, num_processes)
    assert sorted(order) == list(range(len(PATHS)))
    total = sum(SECONDS.get(path.parent.name, 0) for path in PATHS)
    for share in range(num_processes):
        # As pytest-xdist hands them out.
        own = [PATHS[place] for place in order[: len(order) // (num_processes - share)]]
        order = order[len(own) :]
        assert sum(SECONDS.get(path.parent.name, 0) for path in own) == pytest.approx(total / num_processes, rel=0.1)
        kinds = [(kind, len(list(paths))) for kind, paths in groupby(path.parent.name == "unit" for path in own)]
        assert len(kinds) > 10 and kinds[-1] > (True, len(own) / 10)
        # Only the first and the last file of the others may be in two shares.
        of_file = [len(list(places)) for path, places in groupby(own) if path.parent.name == "unit"]
        assert sum(count != 20 for count in of_file) <= 2
        assert len({path for path, _ in groupby(own)}) == len([path for path, _ in groupby(own)])


def test_few_tests_keep_their_order_within_a_kind() -> None:
    few = [path for path in PATHS if path.parent.name != "unit"]
    assert sorted(deal(few, 3)) == list(range(len(few)))
    assert deal([], 2) == []
    assert deal(PATHS[-40:], 2) == list(range(40))
