"""What a main thread says about itself: rounds and phases, and how long it has been in them."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

import parallel
import parallel.watchdog.activity
from parallel.watchdog.activity import NO_ROUND, Activity, Beside, Doing, Phase
from parallel.watchdog.processes import Stack, main_stack, named, show_stacks, waits_for_peers


class Clock:
    """Stands in for time.monotonic, so that spans are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(parallel.watchdog.activity, "time", clock)
    return clock


def test_a_round_goes_on_through_its_phases_and_ends_with_rest(clock: Clock) -> None:
    activity = Activity()
    activity.enter(7, Phase.DRAFTING)
    clock.now += 2
    activity.enter(7, Phase.VERIFYING)
    clock.now += 3
    assert activity.look() == Doing(Phase.VERIFYING, 7, 3.0, 3.0)
    activity.rest()
    clock.now += 1
    assert activity.look() == Doing(Phase.IDLE, 7, 1.0, 1.0)
    activity.enter(8, Phase.DRAFTING)
    assert activity.look() == Doing(Phase.DRAFTING, 8, 0.0, 0.0)


def test_each_layer_is_progress_within_a_phase(clock: Clock) -> None:
    activity = Activity()
    activity.enter(7, Phase.VERIFYING)
    clock.now += 50
    activity.advance()
    clock.now += 2
    assert activity.look() == Doing(Phase.VERIFYING, 7, 2.0, 52.0)
    activity.enter(7, Phase.REPORTING)
    assert activity.look() == Doing(Phase.REPORTING, 7, 0.0, 0.0)


def test_the_start_counts_its_phases_and_bytes(clock: Clock) -> None:
    activity = Activity()
    activity.start(Phase.WEIGHTS)
    clock.now += 4
    activity.start(Phase.WEIGHTS, 34, 100)
    doing = activity.look()
    assert (doing.phase_seconds, doing.words, doing.phase.is_start) == (4.0, "weights 34 %", True)
    activity.start(Phase.WARMING_UP)
    assert activity.look() == Doing(Phase.WARMING_UP, NO_ROUND)


def test_a_check_names_its_steps(clock: Clock) -> None:
    activity = Activity()
    activity.check("reading")
    clock.now += 4
    activity.check("verdict")
    doing = activity.look()
    assert (doing.phase_seconds, doing.words, doing.phase.is_start) == (0.0, "in the step 'verdict'", True)
    assert Doing.from_dict(doing.as_dict()) == doing
    activity.start(Phase.CONNECTING)
    assert activity.look() == Doing(Phase.CONNECTING)


def test_words_name_round_and_phase() -> None:
    assert Doing(Phase.VERIFYING, 17).words == "in round 17 (verifying)"
    assert Doing(Phase.TRAINING, 17).words == "in step 17 (training)"
    assert Doing(Phase.IDLE, 17).words == "idle after round 17"
    assert Doing(Phase.IDLE).words == "idle"
    assert Doing(Phase.WEIGHTS).words == "weights"


def test_what_is_done_travels_as_json_and_nothing_else_does() -> None:
    beside = (Beside("adapters", "loading adapter 'x'", 1.0, 2.0, 3.0),)
    doing = Doing(Phase.TRANSFERRING, 3, 1.5, 0.5, 1, 2, ticks=True, beside=beside)
    assert Doing.from_dict(json.loads(json.dumps(doing.as_dict()))) == doing
    for wrong in ({"phase": "sleeping"}, {**doing.as_dict(), "more": 1}, {}):
        with pytest.raises((TypeError, ValueError)):
            Doing.from_dict(wrong)


def test_another_thread_sees_the_stack_of_the_one_that_makes_the_marks() -> None:
    """In a program with an event loop that is not Python's main thread."""
    found: list[Stack] = []
    made, seen = threading.Event(), threading.Event()
    activities: list[Activity] = []

    def run_rounds() -> None:
        activities.append(Activity())
        made.set()
        seen.wait(60)

    thread = threading.Thread(target=run_rounds)
    thread.start()
    assert made.wait(60)
    found.append(main_stack(activities[0].thread))
    seen.set()
    thread.join()
    assert "in run_rounds" in found[0].text and "test_another_thread" not in found[0].text
    assert not found[0].waits


def test_only_code_that_serves_to_wait_waits_for_peers() -> None:
    package = Path(parallel.__file__).parent
    for waits in ("link.py", "waiting.py", "control.py", "transports/mpi.py", "transports/nccl.py"):
        assert (package / waits).is_file() and waits_for_peers(str(package / waits))
    for works in ("watchdog/heartbeat.py", "watchdog/activity.py", "../trtrun/rounds/round.py"):
        assert not waits_for_peers(str(package / works))


def test_ranks_at_the_same_place_share_a_stack() -> None:
    stacks = {"a": Stack("  one\n", True), "b": Stack("  two\n", False), "c": Stack("  one\n", True)}
    assert show_stacks(stacks) == (
        "--- main thread of a, c, innermost call last:\n  one\n--- main thread of b, innermost call last:\n  two\n"
    )


def test_a_named_method_bears_the_name_in_stacks() -> None:
    class Looker:
        name = ""

        def look(self) -> None:
            self.name = sys._getframe().f_code.co_name

    looker = Looker()
    named(looker.look, "heartbeat of rank 3")()
    assert looker.name == "heartbeat of rank 3"
