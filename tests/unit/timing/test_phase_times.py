"""Phase times: events are read once the device has passed them and never waited for; parts of a round add up to it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import make_llm, prompt_of, useless_draft

from trtrun import SamplingParams
from trtrun.timing.phase_clock import DevicePhases, HostPhases, phase_clock
from trtrun.timing.telemetry import ROUND_PARTS, RunStatistics, round_parts


class Device:
    """A stream with a clock: marks are queued when they are recorded, and passed when the device gets to them."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.queue: list[Mark] = []
        self.made = 0

    def mark(self) -> Mark:
        self.made += 1
        return Mark(self)

    def run(self, milliseconds: float, marks: int = 1) -> None:
        """Work for a while, then pass marks."""
        self.milliseconds += milliseconds
        for _ in range(marks):
            self.queue.pop(0).passed = self.milliseconds


class Mark:
    """An event that refuses to be read before the device is there, where a real one would raise or wait."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed: float | None = None

    def record(self, stream: object = None) -> None:
        assert self not in self.device.queue, "an event was used again before it was passed"
        self.passed = None
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: Mark) -> float:
        assert self.passed is not None and end.passed is not None, "an event was read before it was passed"
        return end.passed - self.passed

    def synchronize(self) -> None:
        raise AssertionError("a phase clock waited for the device")


def play_round(clock: DevicePhases) -> None:
    clock.start(0)
    clock.end("drafting")
    clock.end("verifying")


def test_events_give_the_times_of_the_device_and_not_of_launching() -> None:
    device = Device()
    clock = DevicePhases(device.mark, lambda: None)
    for _ in range(3):
        play_round(clock)
        device.run(7.0)
        device.run(1.0)
        device.run(4.5)
        assert clock.take() == pytest.approx({"drafting": 0.001, "verifying": 0.0045})
        assert clock.take() == {}
    assert device.made == 3, "events are used again"


def test_events_that_the_device_has_not_passed_are_left_for_a_later_report() -> None:
    device = Device()
    clock = DevicePhases(device.mark, lambda: None)
    play_round(clock)
    device.run(0.0, marks=2)
    assert clock.take() == {}, "the first round's last event is still ahead of the device"
    play_round(clock)
    device.run(3.0)
    assert clock.take() == pytest.approx({"drafting": 0.0, "verifying": 0.003})
    play_round(clock)
    device.run(1.0, marks=3)
    device.run(2.0, marks=3)
    assert clock.take() == pytest.approx({"drafting": 0.0, "verifying": 0.0}), "times of two rounds together"
    assert device.made == 6


def test_times_are_taken_while_the_next_round_is_launched() -> None:
    """As where a round with guided rows has to have the verdict before it first."""
    device = Device()
    clock = DevicePhases(device.mark, lambda: None)
    play_round(clock)
    clock.start(1)
    device.run(2.0, marks=4)
    assert clock.take() == pytest.approx({"drafting": 0.0, "verifying": 0.0})
    clock.end("verifying")
    device.run(3.0)
    assert clock.take() == pytest.approx({"verifying": 0.003})


def test_a_round_that_was_cut_short_does_no_harm() -> None:
    """An interrupt in the middle of a round leaves its events behind."""
    device = Device()
    clock = DevicePhases(device.mark, lambda: None)
    clock.start(0)
    clock.start(0)
    clock.end("drafting")
    play_round(clock)
    device.run(0.0, marks=1)
    device.run(1.0, marks=1)
    device.run(2.0, marks=1)
    assert clock.take() == pytest.approx({"drafting": 0.002})
    device.run(4.0, marks=3)
    assert clock.take() == pytest.approx({"drafting": 0.0, "verifying": 0.0})


def test_the_host_is_timed_by_the_clock() -> None:
    ticks: Iterator[float] = iter([1.0, 1.5, 3.5, 10.0, 10.25])
    clock = HostPhases(lambda: next(ticks))
    clock.start(0)
    clock.end("drafting")
    clock.end("verifying")
    clock.start(0)
    clock.end("drafting")
    assert clock.take() == {"drafting": 0.75, "verifying": 2.0}
    assert clock.take() == {}
    assert isinstance(phase_clock(torch.device("cpu")), HostPhases)
    assert isinstance(phase_clock(torch.device("cuda")), DevicePhases)


def statistics(**times: float) -> dict[str, Any]:
    """The totals of a run that measured `times`."""
    totals = RunStatistics()
    for name, seconds in times.items():
        assert hasattr(totals, name)
        setattr(totals, name, float(seconds))
    return totals.as_dict()


def test_what_overlaps_is_counted_once() -> None:
    # One process: the engines work while the orchestrator waits.
    alone = statistics(drafting=2, transferring=1, verifying=5, committing=0.5, orchestrating=1.5, waiting=9)
    assert round_parts(alone, 12.0) == pytest.approx(dict(zip(ROUND_PARTS, (2, 1, 5, 1, 0.5, 1, 1.5), strict=True)))
    # A draft in another process: the target leader's transfer is mostly its wait for that draft.
    apart = statistics(drafting=2, drafting_elsewhere=2, transferring=2.5, verifying=5, orchestrating=1, waiting=8)
    assert round_parts(apart, 9.0) == pytest.approx(dict(zip(ROUND_PARTS, (2, 0.5, 5, 1, 0, 0.5, 0), strict=True)))
    # A plan sent ahead: committing and most of planning ran beside the engines.
    ahead = statistics(drafting=3, verifying=6, committing=1, orchestrating=2, waiting=7.5)
    assert round_parts(ahead, 9.6) == pytest.approx(dict(zip(ROUND_PARTS, (3, 0, 6, 0.5, 0, 0, 0.1), strict=True)))


def test_parts_add_up_whatever_was_measured() -> None:
    generator = random.Random(3)
    for _ in range(500):
        names = ("drafting", "transferring", "verifying", "orchestrating", "waiting")
        times = {name: generator.choice((0.0, generator.random())) for name in names}
        totals = statistics(
            **times,
            drafting_elsewhere=generator.choice((0.0, 1.0)) * times["drafting"],
            committing=generator.random() * times["orchestrating"],
        )
        elapsed = times["orchestrating"] + times["waiting"] + generator.choice((0.0, generator.random()))
        parts = round_parts(totals, elapsed)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(elapsed, abs=1e-9)


def test_a_real_run_reports_every_phase(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    with make_llm(target, useless_draft(tmp_path / "draft")) as llm:
        llm.generate([prompt_of(9), prompt_of(20)], SamplingParams(max_tokens=12))
        totals = llm.statistics()
    engines = totals["drafting_s"] + totals["transferring_s"] + totals["verifying_s"]
    assert 0 < totals["committing_s"] < totals["orchestrating_s"]
    assert totals["drafting_s"] > 0 and totals["verifying_s"] > 0 and totals["drafting_elsewhere_s"] == 0
    assert engines < totals["waiting_s"], "in one process the engines work while the orchestrator waits"
