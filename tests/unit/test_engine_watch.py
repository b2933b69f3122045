"""An engine that hangs is told from one in a long round, and from a front that could not listen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint
from pipelines import make_llm, prompt_of

from launch.serve.engine_watch import END_SECONDS, EngineWatch
from parallel.watchdog import activity
from parallel.watchdog.activity import Activity
from trtrun import LLM, SamplingParams
from trtrun.roles.launched_round import DecidedRound

LIMIT = 8.0
BEAT = 1.0


class Watched:
    """An engine that answers each question as it is told to, and what the watch says of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer: float | None = 0.0
        self.events: list[str] = []
        self.num_asked = 0
        self.watch = EngineWatch(
            LIMIT,
            self.ask,
            on_hang=self.events.append,
            on_recovery=lambda: self.events.append("recovered"),
            on_overdue=lambda: self.events.append("overdue"),
            clock=lambda: self.now,
        )
        self.watch.begin()

    def ask(self) -> None:
        self.num_asked += 1
        if self.answer is not None:
            self.watch.hear(self.answer)

    def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT)):
            self.now += BEAT
            self.watch.look()


def test_an_engine_that_answers_is_asked_every_beat_and_never_hangs() -> None:
    watched = Watched()
    watched.go_on(5 * LIMIT)
    watched.answer = LIMIT - 2 * BEAT  # a layer of a long round
    watched.go_on(5 * LIMIT)
    assert watched.events == [] and watched.num_asked == 10 * LIMIT / BEAT


def test_one_that_says_nothing_hangs_once_and_is_overdue_once() -> None:
    watched = Watched()
    watched.answer = None
    watched.go_on(LIMIT)
    assert watched.events == [] and not watched.watch.is_hanging
    watched.go_on(BEAT)
    (cause,) = watched.events
    assert cause == "the engine hangs: it has not answered for 8 s (launch.heartbeat_seconds)"
    assert watched.watch.is_hanging
    watched.go_on(END_SECONDS - BEAT)
    assert watched.events == [cause]
    watched.go_on(3 * END_SECONDS)
    assert watched.events == [cause, "overdue"]
    watched.watch.end()
    watched.go_on(3 * LIMIT)
    assert len(watched.events) == 2 and not watched.watch.is_hanging


def test_one_whose_round_stands_still_hangs_until_it_gets_on() -> None:
    watched = Watched()
    watched.answer = LIMIT + BEAT
    watched.go_on(2 * BEAT)
    assert watched.events == ["the engine hangs: its round has got no further for 8 s (launch.heartbeat_seconds)"]
    watched.answer = 0.0
    watched.go_on(2 * BEAT)
    assert watched.events[1:] == ["recovered"] and not watched.watch.is_hanging


def test_a_front_that_was_stopped_has_no_news_of_the_engine() -> None:
    watched = Watched()
    watched.go_on(3 * BEAT)
    watched.now += 100 * LIMIT
    watched.watch.look()
    assert watched.events == []
    watched.answer = None
    watched.go_on(LIMIT + 2 * BEAT)
    assert len(watched.events) == 1


def test_a_round_of_one_process_is_looked_at_from_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a long prompt are progress; a round that waits for its device makes none."""
    now = 0.0
    seen: list[float] = []
    loaded: list[LLM] = []
    finish, advance = DecidedRound.finish, Activity.advance

    def advance_late(activity: Activity) -> None:
        nonlocal now
        now += 50.0
        seen.append(look())
        advance(activity)

    def finish_late(decided: DecidedRound) -> Any:
        nonlocal now
        now += 500.0
        seen.append(look())
        return finish(decided)

    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Activity, "advance", advance_late)
    monkeypatch.setattr(DecidedRound, "finish", finish_late)

    def look() -> float:
        with ThreadPoolExecutor(1) as pool:
            return sum(pool.map(lambda llm: llm.engine.unwatched_seconds, loaded))

    with make_llm(make_checkpoint(tmp_path / "target", seed=1)) as llm:
        loaded.append(llm)
        seen.clear()
        now += 5000.0
        assert look() == 0.0, "it rests"
        llm.generate([prompt_of(30)], SamplingParams(max_tokens=1))
        now += 5000.0
        assert look() == 0.0
    assert seen[-1] == 500.0 and len(seen) > 2 and set(seen[:-1]) == {50.0}
