"""How a rank waits: it spins for as long as it usually waits there, where cores are free for that, and then naps.

MPI's own blocking calls burn a core while they wait. A rank that may wait long polls instead: through a `Waiter`, one
for each place where it waits, which learns how long the waits there take; or through `wait_until`, where nothing is
there to be learned.

A nap lasts 1/64 of the time waited so far, between 50 µs and 2 ms: waiting costs about a hundredth more than it must,
and an idle rank wakes 500 times a second, which costs it a few hundredths of a core. What a waiter has learned changes
that: before the earliest moment at which something usually comes naps are 1/8 of the time waited, and around the
usual moment they are the shorter the nearer it is. Measured on 2 busy cores: of a wait of 30 ms ± 0.3 ms the end is
seen 0.09 ms late, with 4 % of a core, where one that learns nothing is 0.3 ms late and takes 12 %.

Where others have use for the core after all, as programs beside the job do, a rank that spins is seen to pause between
two tries. It then naps for a while: one that sleeps is let in first when it wakes, one that spun waits for its turn.

Knows nothing of what is waited for, nor how many cores there are: who makes a waiter says whether it may spin.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUICK_TRIES = 16
SHORTEST_NAP_S = 50e-6
LONGEST_NAP_S = 2e-3
NAP_SHARE = 1 / 64
EARLY_NAP_SHARE = 1 / 8
"""Share of the time waited, before anything is to be expected; and of the distance from the usual moment, around it."""

EARLY_SHARE = 7 / 8
"""Share of the earliest moment. Long naps end well before it: what comes during one counts as if it came at its end,
and waits would seem longer and longer."""

REMEMBERED = 32
LONGEST_SPIN_S = 50e-3
"""About the longest round in which a late message matters: in longer ones a nap is little against the wait."""
SPIN_MARGIN = 1.5
LOST_CORE_S = 0.5e-3
"""Between two tries; they are microseconds apart on a core of one's own."""
WAITS_WITHOUT_CORE = 8
"""Waits that nap after a core was lost, before spinning is tried again."""
LONGEST_LEARNED_S = 1.0
"""Beyond it nobody had anything to send; that says nothing of how long the next wait will be."""

_SET_TIMER_SLACK, _GET_TIMER_SLACK = 29, 30  # of prctl(2)


class Waiter:
    """One place where a rank waits, and what it has learned of the waits there. For one thread at a time.

    The figures come from the last 32 waits that were waits at all: something was not there at the first try, and came
    within a second.
    """

    def __init__(
        self,
        may_spin: bool,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make a waiter that has learned nothing yet, and so naps.

        Args:
            may_spin: whether a core is free for this thread while it waits; else it only naps.
            clock: seconds.
            sleep: takes seconds.
        """
        self._may_spin = may_spin
        self._clock = clock
        self._sleep = sleep
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._spin_s = 0.0
        self._naps_due = 0
        self._early_s = 0.0
        self._usual_s = 0.0

    def wait(self, test: Callable[[], bool], timeout: float | None = None) -> bool:
        """Call `test` until it returns true; spin or sleep between the calls.

        Args:
            test: tried at once and again and again; should return quickly.
            timeout: seconds after which to give up; None waits for ever, 0 tries once.

        Returns:
            True as soon as `test` did, False when the timeout passed first.
        """
        if test():
            return True
        if timeout is not None and timeout <= 0:
            return False
        start = self._clock()
        self._reckon()  # now, as nobody is there yet, and not when a message has come and should be read
        if not self._spin(test, start, timeout) and not self._nap(test, start, timeout):
            return False
        waited = self._clock() - start
        if waited <= LONGEST_LEARNED_S:
            self._recent.append(waited)
        return True

    def _reckon(self) -> None:
        """Bring the figures up to date with the last waits."""
        if not self._recent:
            return
        waits = sorted(self._recent)
        self._early_s = EARLY_SHARE * waits[len(waits) // 10]
        self._usual_s = waits[len(waits) // 2]
        if self._may_spin:
            # Longer waits are not worth spinning for, so they must not make the shorter ones look unusual.
            short = [wait for wait in waits if wait <= LONGEST_SPIN_S]
            self._spin_s = min(SPIN_MARGIN * short[len(short) * 9 // 10], LONGEST_SPIN_S) if short else 0.0

    def _spin(self, test: Callable[[], bool], start: float, timeout: float | None) -> bool:
        """Try without a nap: a few times in any case, and for as long as a wait usually takes where that is allowed."""
        # Yielding lets the peer run where ranks outnumber cores; on an idle core it returns at once.
        for _ in range(QUICK_TRIES):
            os.sched_yield()
            if test():
                return True
        if self._naps_due:
            self._naps_due -= 1
            return False
        stop = start + (self._spin_s if timeout is None else min(self._spin_s, timeout))
        last = now = self._clock()
        while now < stop:
            os.sched_yield()
            if test():
                return True
            now = self._clock()
            if now - last > LOST_CORE_S:
                self._naps_due = WAITS_WITHOUT_CORE
                return False
            last = now
        return False

    def _nap(self, test: Callable[[], bool], start: float, timeout: float | None) -> bool:
        with _exact_naps():
            while True:
                waited = self._clock() - start
                if timeout is not None and waited >= timeout:
                    return test()
                nap = self._next_nap(waited)
                self._sleep(nap if timeout is None else min(nap, timeout - waited))
                if test():
                    return True

    def _next_nap(self, waited: float) -> float:
        """Seconds to sleep after having waited for `waited` seconds."""
        if waited < self._early_s:
            nap = min(max(waited * EARLY_NAP_SHARE, self._early_s * EARLY_NAP_SHARE / 2), self._early_s - waited)
        elif self._usual_s:
            nap = min(waited * NAP_SHARE, abs(waited - self._usual_s) * EARLY_NAP_SHARE)
        else:
            nap = waited * NAP_SHARE
        return min(max(nap, SHORTEST_NAP_S), LONGEST_NAP_S)


def wait_until(test: Callable[[], bool], timeout: float | None = None) -> bool:
    """Call `test` until it returns true; sleep between the calls. For waits from which nothing is to be learned.

    Args:
        test: tried at once and after every nap; should return quickly.
        timeout: seconds after which to give up; None waits for ever, 0 tries once.

    Returns:
        True as soon as `test` did, False when the timeout passed first.
    """
    return Waiter(may_spin=False).wait(test, timeout)


@contextmanager
def _exact_naps() -> Iterator[None]:
    """Let naps of this thread end on time. Linux adds 50 µs to every sleep, to wake several threads at once.

    The thread gets its own slack back at the end: it may be one of the user's program.
    """
    if _prctl is None:
        yield
        return
    slack = _prctl(_GET_TIMER_SLACK, 0, 0, 0, 0)
    _prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        if slack > 0:
            _prctl(_SET_TIMER_SLACK, slack, 0, 0, 0)


def _find_prctl() -> Callable[[int, int, int, int, int], int] | None:
    """Linux's prctl(2); None on other systems."""
    try:
        function = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int, int], int] = function
    return found


_prctl = _find_prctl()
