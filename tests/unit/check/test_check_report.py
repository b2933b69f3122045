"""What `trtrun check` shows of a group that has measured how it sums."""

from __future__ import annotations

import json

import pytest

from launch.jobs.check.report import CheckReport, LinkReport, print_report, report_json
from parallel.communicator import SumTiming
from parallel.probe import Timing

SUMS = (
    SumTiming(8192, "peer memory, one shot", {"peer memory, one shot": 5.1, "NCCL": 12.3}),
    SumTiming(8388608, "NCCL", {"peer memory, two shots": 71.0, "NCCL": 60.5}),
)


def make_report(sums: tuple[SumTiming, ...]) -> CheckReport:
    link = LinkReport("target all_reduce", (1, 2), "NCCL, one host", (), Timing(1e-5, 1e11), sums=sums)
    return CheckReport((), (), (), (link,), 1.0)


def test_times_of_sums_are_a_table_that_names_the_way_used(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(make_report(SUMS))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["8 KiB", "5.1", "12.3", "-", "peer memory, one shot"] in rows
    assert ["8192 KiB", "-", "60.5", "71.0", "NCCL"] in rows


def test_without_times_there_is_no_such_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(make_report(()))
    assert "KiB" not in capsys.readouterr().out


def test_times_of_sums_are_in_the_json() -> None:
    (link,) = json.loads(report_json(make_report(SUMS)))["links"]
    assert link["sums"][0] == {
        "nbytes": 8192,
        "way": "peer memory, one shot",
        "microseconds": {"peer memory, one shot": 5.1, "NCCL": 12.3},
    }
