"""Python's garbage collection, which rounds and streams wait for: it looks through all objects that have come into
being since it last did, most of which are modules and engines that stay.

It knows the process that it is asked in. It does not know what a start makes.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def leave_out_what_is() -> None:
    """Collect garbage now, and leave what remains out of later collections: what comes to be garbage of it stays to the
    end of the process. That collects all, as Triton tells the terminal of every object that is left over."""
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


@contextmanager
def leaving_out_what_is() -> Iterator[None]:
    """As `leave_out_what_is`, to the end of the block: for processes that may go on and make other engines."""
    leave_out_what_is()
    try:
        yield
    finally:
        gc.unfreeze()
