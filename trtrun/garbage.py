"""Python's garbage collection, which rounds and streams wait for: it looks through all objects that have come into
being since it last did, most of which are modules and engines that stay.

It knows the process that it is asked in. It does not know what a start makes.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_COUNTS_OBJECTS = "triton"
"""Module that tells the terminal at the end of every object that is left over."""


MOST_UNCOLLECTED = 2000
"""Objects that may come into being between two collections once a start is over: these take a millisecond or three.
With 100,000, as starts have it, an hour of load had nine of 60 to 160 ms, in which every stream waits."""


def leave_out_what_is() -> None:
    """Collect garbage now, and leave what remains out of later collections: what comes to be garbage of it stays until
    `collect_all`, or to the end of the process. Later ones are short."""
    gc.collect()
    gc.freeze()
    between, *others = gc.get_threshold()
    gc.set_threshold(min(between, MOST_UNCOLLECTED), *others)
    atexit.unregister(_take_back_at_exit)
    atexit.register(_take_back_at_exit)


@contextmanager
def leaving_out_what_is() -> Iterator[None]:
    """As `leave_out_what_is`, to the end of the block, where nothing was left out before: for processes that may go on
    and make other engines."""
    was_left_out, threshold = gc.get_freeze_count() > 0, gc.get_threshold()
    leave_out_what_is()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if not was_left_out:
            gc.unfreeze()


def collect_all() -> None:
    """Collect garbage of what was left out, too: for a process that has done with an engine, whose memory somebody
    else is to have."""
    gc.unfreeze()
    gc.collect()


def _take_back_at_exit() -> None:
    """The last collection takes a tenth of a second where it looks through all, which is of use to nobody else."""
    if _COUNTS_OBJECTS in sys.modules:
        gc.unfreeze()
