"""A waiter spins for as long as it usually waits, where it may, and naps beyond; all on a clock that the test turns."""

from __future__ import annotations

import pytest

from parallel import waiting
from parallel.waiting import LONGEST_NAP_S, LONGEST_SPIN_S, QUICK_TRIES, WAITS_WITHOUT_CORE, Waiter, wait_until

TRY_S = 4e-6


class Time:
    """A clock that a try moves on by 4 µs and a sleep by its length and 10 µs; it keeps the sleeps of the last wait.

    The first try after `lost_at` takes a millisecond.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []
        self.num_tries = 0
        self.lost_at = float("inf")

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now += seconds + 10e-6

    def wait(self, waiter: Waiter, length: float, timeout: float | None = None) -> float:
        """Wait for something that comes after `length` seconds; returns the seconds by which it was seen late."""
        due = self.now + length
        self.naps.clear()
        self.num_tries = 0

        def is_there() -> bool:
            self.num_tries += 1
            self.now += TRY_S
            if self.now >= self.lost_at:
                self.now += 1e-3  # somebody else ran on this core
                self.lost_at = float("inf")
            return self.now >= due

        assert waiter.wait(is_there, timeout) == (self.now >= due)
        return self.now - due


@pytest.fixture
def time() -> Time:
    return Time()


def make(time: Time, may_spin: bool) -> Waiter:
    return Waiter(may_spin, time.clock, time.sleep)


@pytest.mark.parametrize("length", [100e-6, 3e-3, 30e-3])
def test_it_learns_to_spin_for_as_long_as_a_wait_usually_takes(time: Time, length: float) -> None:
    waiter = make(time, may_spin=True)
    time.wait(waiter, length)
    assert time.naps
    for index in range(40):
        assert time.wait(waiter, length * (1 + index % 5 / 20)) <= TRY_S
        assert not time.naps
    # Something much later than usual is slept for, after about one and a half times the usual wait.
    start = time.now
    time.wait(waiter, 20 * length)
    spun = time.now - start - sum(time.naps) - len(time.naps) * (10e-6 + TRY_S)
    assert time.naps and length < spun <= min(1.5 * 1.2 * length, LONGEST_SPIN_S) + (QUICK_TRIES + 4) * TRY_S


def test_it_spins_through_waits_of_many_lengths(time: Time) -> None:
    waiter = make(time, may_spin=True)
    for index in range(60):
        time.wait(waiter, 2e-3 * (1 + index % 5))
        assert index < 32 or not time.naps


def test_a_core_that_is_lost_is_not_spun_for(time: Time) -> None:
    waiter = make(time, may_spin=True)
    for _ in range(40):
        time.wait(waiter, 5e-3)
    assert not time.naps
    time.lost_at = time.now + 1e-3
    time.wait(waiter, 5e-3)
    assert time.naps  # in this wait
    for _ in range(WAITS_WITHOUT_CORE):
        time.wait(waiter, 5e-3)
        assert time.naps and time.num_tries <= len(time.naps) + QUICK_TRIES + 1
    time.wait(waiter, 5e-3)
    assert not time.naps  # it is tried again


def test_a_spin_is_bounded(time: Time) -> None:
    waiter = make(time, may_spin=True)
    for _ in range(40):
        time.wait(waiter, 0.9 * LONGEST_SPIN_S)
    time.wait(waiter, 3.0)
    spun = 3.0 - sum(time.naps) - len(time.naps) * (10e-6 + TRY_S)
    assert 0.9 * LONGEST_SPIN_S < spun < 1.1 * LONGEST_SPIN_S


@pytest.mark.parametrize("idle", [0.2, 0.9, 30.0])
def test_idle_times_do_not_teach_it_to_spin(time: Time, idle: float) -> None:
    waiter = make(time, may_spin=True)
    for _ in range(40):
        time.wait(waiter, idle)
    tries = time.num_tries
    assert tries <= len(time.naps) + QUICK_TRIES + 1


@pytest.mark.parametrize("idle", [0.2, 30.0])
def test_idle_times_between_rounds_do_not_unteach_it(time: Time, idle: float) -> None:
    waiter = make(time, may_spin=True)
    for _ in range(10):
        for _ in range(3):
            time.wait(waiter, 5e-3)
        time.wait(waiter, idle)
        assert len(time.naps) > idle / LONGEST_NAP_S / 2  # an idle rank sleeps
    time.wait(waiter, 5e-3)
    assert not time.naps


def test_it_follows_rounds_that_get_longer_and_shorter(time: Time) -> None:
    waiter = make(time, may_spin=True)
    for length in (1e-3, 20e-3, 0.5e-3):
        for _ in range(40):
            late = time.wait(waiter, length)
        assert late <= TRY_S and not time.naps
    time.wait(waiter, 20e-3)
    assert time.naps  # it has forgotten


@pytest.mark.parametrize("length", [100e-6, 3e-3, 30e-3, 0.3])
def test_where_it_may_not_spin_every_wait_is_slept(time: Time, length: float) -> None:
    waiter = make(time, may_spin=False)
    for _ in range(40):
        time.wait(waiter, length)
        assert time.num_tries <= len(time.naps) + QUICK_TRIES + 1


@pytest.mark.parametrize("length", [2e-3, 30e-3, 0.3])
def test_what_comes_at_the_usual_moment_is_seen_soon_and_with_few_naps(time: Time, length: float) -> None:
    waiter = make(time, may_spin=False)
    time.wait(waiter, length)
    naps = len(time.naps)
    lates = [time.wait(waiter, length * (1 + (index % 5 - 2) / 200)) for index in range(40)]
    assert max(lates[10:]) < max(length / 256, 80e-6)
    assert len(time.naps) <= naps * 0.8


@pytest.mark.parametrize("other", [5e-3, 30.0])
def test_a_few_other_waits_change_nothing_of_the_usual_moment(time: Time, other: float) -> None:
    waiter = make(time, may_spin=False)
    for _ in range(10):
        lates = [time.wait(waiter, (30 + index / 7) * 1e-3) for index in range(7 if other < 1 else 1)]
        time.wait(waiter, other)
    assert max(lates) < 30e-3 / 256


def test_long_naps_do_not_make_waits_seem_longer_and_longer(time: Time) -> None:
    waiter = make(time, may_spin=False)
    for _ in range(40):
        time.wait(waiter, 30e-3)
    for _ in range(200):
        late = time.wait(waiter, 10e-3)
    assert late < 10e-3 / 64


@pytest.mark.parametrize("length", [1e-3, 10e-3])
def test_what_comes_much_sooner_than_usual_waits_little(time: Time, length: float) -> None:
    waiter = make(time, may_spin=False)
    for _ in range(40):
        time.wait(waiter, 30e-3)
    assert time.wait(waiter, length) <= 30e-3 / 16 + TRY_S


@pytest.mark.parametrize("may_spin", [False, True])
def test_a_timeout_ends_the_wait_and_teaches_nothing(time: Time, may_spin: bool) -> None:
    waiter = make(time, may_spin)
    for _ in range(40):
        time.wait(waiter, 30e-3)
    for timeout in (1e-3, 40e-3, 0.2):
        for _ in range(40):
            late = time.wait(waiter, 10.0, timeout)
            assert timeout - 10 - 1e-3 <= late <= timeout - 10 + 1e-3
    time.wait(waiter, 30e-3)
    assert bool(time.naps) != may_spin


def test_a_timeout_of_nought_tries_once(time: Time) -> None:
    waiter = make(time, may_spin=True)
    time.wait(waiter, 1.0, timeout=0)
    assert time.num_tries == 1 and not time.naps


def test_what_is_there_at_once_was_no_wait(time: Time) -> None:
    waiter = make(time, may_spin=True)
    for _ in range(40):
        time.wait(waiter, 5e-3)
    for _ in range(100):
        time.wait(waiter, 0.0)
    time.wait(waiter, 5e-3)
    assert not time.naps


def test_naps_grow_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    monkeypatch.setattr(waiting.Waiter.__init__, "__defaults__", (time.clock, time.sleep))
    due = time.now + 1.0
    assert wait_until(lambda: time.now >= due)
    assert time.naps == sorted(time.naps) and time.naps[-1] == LONGEST_NAP_S
    assert time.now - due <= LONGEST_NAP_S
    assert not wait_until(lambda: False, timeout=0.1)


def test_a_thread_gets_its_own_timer_slack_back() -> None:
    prctl = waiting._prctl
    if prctl is None:
        pytest.skip("needs Linux")
    slacks: list[int] = []

    def sleep(seconds: float) -> None:
        slacks.append(prctl(30, 0, 0, 0, 0))
        if len(slacks) == 3:
            raise KeyboardInterrupt

    before = prctl(30, 0, 0, 0, 0)
    with pytest.raises(KeyboardInterrupt):
        Waiter(False, sleep=sleep).wait(lambda: False)
    assert slacks == [1, 1, 1] and prctl(30, 0, 0, 0, 0) == before > 1
