"""The end of a process whose program is over, without Python's teardown.

Before it ends Python takes apart all that was imported. With torch that takes half a second of a core, a process; every
rank has it, and what waits for the command waits for it. Nothing of it is of use: files are closed, ranks are let go.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress

_status: int | None = None


def prepare_to_end() -> None:
    """Take the last turn of all that Python does at its end: to be called before anything else registers with it."""
    atexit.register(_end)


def end_with(status: int) -> None:
    """Let the end of this process, once its threads and what `atexit` has are done, be without a teardown.

    Args:
        status: of its exit. A stdout that can't take what is left for it ends the process in Python's own way, which
            tells so.
    """
    global _status
    _status = status


def _end() -> None:
    if _status is None:
        return
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # full, closed by us, none
        return
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    logging.shutdown()
    os._exit(_status)
