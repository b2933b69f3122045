"""When an engine of one process hangs, as its frontend sees it."""

from __future__ import annotations

import pytest

from launch.serve.engine.keeper import EngineWatch, is_watched
from launch.serve.engine.messages import Heartbeat, Standing
from trtrun.configuration.config import make_config


def heartbeat(*standings: tuple[str, float, float | None]) -> Heartbeat:
    """A heartbeat that tells of threads: what each does, how long it stands still in it, and how long it may."""
    return Heartbeat(
        standings=tuple(
            Standing(rank=0, phase="round", doing=doing, seconds=still, still_seconds=still, limit=limit)
            for doing, still, limit in standings
        )
    )


BETWEEN = heartbeat(("idle after round 7", 0.5, 60.0))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_of() -> tuple[EngineWatch, Clock]:
    clock = Clock()
    return EngineWatch(60.0, 600.0, clock), clock


def pass_by(watch: EngineWatch, clock: Clock, seconds: float, heartbeat: Heartbeat | None = None) -> str | None:
    """Look once a heartbeat, and hear one where there is one."""
    found = None
    for _ in range(int(seconds / watch.interval)):
        clock.now += watch.interval
        if heartbeat is not None:
            watch.hear(heartbeat)
        found = watch.find_fault()
    return found


def test_an_engine_that_tells_nothing_any_more_hangs() -> None:
    watch, clock = watch_of()
    watch.hear(BETWEEN)
    assert pass_by(watch, clock, 59) is None
    assert pass_by(watch, clock, 3) == "it is silent for 60 s, last seen idle after round 7"
    watch.hear(BETWEEN)
    assert pass_by(watch, clock, 59) is None


def test_a_round_that_stands_still_hangs_and_a_rest_does_not() -> None:
    watch, clock = watch_of()
    assert pass_by(watch, clock, 500, BETWEEN) is None
    assert pass_by(watch, clock, 500, heartbeat(("in round 8 (verifying)", 59.0, 60.0))) is None
    assert watch.late_phase is None
    still = heartbeat(("in round 8 (verifying)", 61.0, 60.0))
    assert pass_by(watch, clock, 1, still) == "it stands still in round 8 (verifying) for longer than 60 s"
    assert watch.late_phase == "round"


def test_each_thread_has_a_limit_of_its_own() -> None:
    watch, clock = watch_of()
    reading = ("in loading adapter 'x'", 299.0, 300.0)
    assert pass_by(watch, clock, 500, heartbeat(("idle after round 7", 0.5, 60.0), reading)) is None
    assert pass_by(watch, clock, 500, heartbeat(("in round 8 (verifying)", 99.0, None), reading)) is None
    late = ("in loading adapter 'x'", 301.0, 300.0)
    cause = "it stands still in loading adapter 'x' for longer than 300 s"
    assert pass_by(watch, clock, 1, heartbeat(("in round 8 (verifying)", 0.5, 60.0), late)) == cause


def test_the_start_of_a_job_of_ranks_is_watched_by_these() -> None:
    clock = Clock()
    watch = EngineWatch(120.0, None, clock)
    assert pass_by(watch, clock, 9000) is None
    watch.hear(BETWEEN)
    assert pass_by(watch, clock, 122) == "it is silent for 120 s, last seen idle after round 7"


def test_an_engine_that_is_not_up_in_time_hangs_and_the_next_one_has_its_own_time() -> None:
    watch, clock = watch_of()
    late = "it has not started within 600 s (launch.start_seconds)"
    assert pass_by(watch, clock, 599) is None
    assert pass_by(watch, clock, 2) == late
    assert pass_by(watch, clock, 599) is None  # it was ended, and is started again
    watch.hear(BETWEEN)
    assert pass_by(watch, clock, 1, BETWEEN) is None
    watch.forget()
    assert pass_by(watch, clock, 599) is None
    assert pass_by(watch, clock, 2) == late


def test_a_front_that_stood_still_does_not_count_that_time_against_a_start() -> None:
    watch, clock = watch_of()
    assert pass_by(watch, clock, 300) is None
    clock.now += 1000
    assert pass_by(watch, clock, 299) is None
    assert pass_by(watch, clock, 3) is not None


def test_a_front_that_was_stopped_itself_accuses_nobody() -> None:
    watch, clock = watch_of()
    watch.hear(BETWEEN)
    assert watch.find_fault() is None
    clock.now += 500
    assert watch.find_fault() is None
    assert pass_by(watch, clock, 59) is None
    assert pass_by(watch, clock, 3) is not None


@pytest.mark.parametrize(("target", "is_alone"), [("cpu:0", True), ("cpu:1", False)])
def test_ranks_watch_each_other(target: str, is_alone: bool) -> None:
    models = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
    models["target"]["devices"] = [target]
    assert is_watched(make_config(models)) is is_alone
