"""How a rank waits: a few quick tries, then naps whose length follows the time already waited.

MPI's own blocking calls burn a core while they wait. A rank that may wait long polls through `wait_until` instead. A
nap lasts 1/64 of the time waited so far, between 50 µs and 2 ms: a message that comes soon is seen at once, waiting
costs about a sixty-fourth more than it must, and an idle rank wakes 500 times a second, which costs it under 5 % of a
core. Knows nothing of what is waited for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

QUICK_TRIES = 16
SHORTEST_NAP_S = 50e-6
LONGEST_NAP_S = 2e-3
NAP_SHARE = 1 / 64


def wait_until(test: Callable[[], bool], timeout: float | None = None) -> bool:
    """Call `test` until it returns true; sleep between the calls.

    Args:
        test: tried at once and after every nap; should return quickly.
        timeout: seconds after which to give up; None waits for ever, 0 tries once.

    Returns:
        True as soon as `test` did, False when the timeout passed first.
    """
    if test():
        return True
    if timeout is not None and timeout <= 0:
        return False
    for _ in range(QUICK_TRIES):
        # Yielding lets the peer run where ranks outnumber cores; on an idle core it returns at once.
        os.sched_yield()
        if test():
            return True
    start = time.perf_counter()
    while True:
        waited = time.perf_counter() - start
        if timeout is not None and waited >= timeout:
            return test()
        nap = min(max(waited * NAP_SHARE, SHORTEST_NAP_S), LONGEST_NAP_S)
        time.sleep(nap if timeout is None else min(nap, timeout - waited))
        if test():
            return True
