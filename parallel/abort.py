"""The last thing that a process does: say one line, end the job, and never hang while doing so.

MPI's abort may wait for ever, for a launcher that is cut off or stopped, and it may do so holding the interpreter's
lock. So a timer of C code is set before anything is tried. The same timer can instead write this process's stacks when
its threads stop running; there is one such timer in a process, which is why both are here.

A job in which a rank has failed cannot end as MPI ends, which waits for all ranks: `abort_at_exit` lets the normal end
of a process, when its program is over, be the end of every rank. Nor can one that may lose ranks and go on: a rank that
dies while others are in MPI's end leaves them there. `leave_at_exit` lets each process end by itself. And a program
that is over need not take apart all that it has imported, which with torch takes half a second of a core:
`skip_teardown`. This module does not know who is at fault, nor what the line says.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

logger = logging.getLogger(__name__)
# A program that sets up no logging has read the text on stderr: Python would print it there once more.
logger.addHandler(logging.NullHandler())

ABORT_SECONDS = 5.0
"""How long ending may take; then the process just exits."""

STATUS = 1
STDERR = 2

_lock = threading.Lock()
_is_ending = False
_exit_status: int | None = None
_leaves_alone = False
_program_status: int | None = None
_is_standing_by = False


def begin_ending() -> None:
    """Begin to end: this process ends within ABORT_SECONDS, whatever else happens in it.

    A second thread that comes here while the first one ends the job stays here: one line is enough.
    """
    global _is_ending
    with _lock:
        first, _is_ending = not _is_ending, True
        if first:
            # Not a Python timer: it could not run while a native call holds the interpreter's lock.
            silent = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(ABORT_SECONDS, exit=True, file=silent)
    while not first:
        time.sleep(ABORT_SECONDS)


def say(text: str) -> None:
    """Write to stderr past all buffers, in as few pieces as the system allows, so that ranks' texts do not mix.

    A log file that this process keeps gets it too.
    """
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    rest = memoryview(text.encode(errors="replace"))
    with suppress(OSError):
        while rest:
            rest = rest[os.write(STDERR, rest) :]
    stack = sys.exc_info()[0] is not None
    # Last: it may wait for a lock of the main thread.
    logger.error("%s", text.strip(), exc_info=stack, extra={"file_only": True})


def end_world(status: int = STATUS) -> NoReturn:
    """End every rank of the MPI world, or at least this process. `begin_ending` comes first."""
    # mpirun forwards stderr and learns of the abort by different ways: let the line come before its own words.
    time.sleep(0.05)
    module = sys.modules.get("mpi4py.MPI")
    with suppress(Exception):
        if module is not None and module.Is_initialized() and not module.Is_finalized():
            module.COMM_WORLD.Abort(status)
    os._exit(status)


def stand_by() -> None:
    """Be ready for what follows: what `atexit` gets later has its turn before."""
    global _is_standing_by
    if not _is_standing_by:
        _is_standing_by = True
        atexit.register(_end)


def abort_at_exit(status: int = STATUS) -> None:
    """Let the end of this process, whenever it comes, end every rank of the MPI world, with this status.

    0 is for a job that is done but for ranks that never end by themselves.
    """
    global _exit_status
    _exit_status = status
    stand_by()


def leave_at_exit() -> None:
    """Let the end of this process pass by MPI's own end, which may wait for ever for ranks that are gone.

    The exit status is then 0, also after `sys.exit` with another one, which nobody can ask for: `abort_at_exit` comes
    before this, for those who want one. Where an exception ended the program it is 1, and every rank's.
    """
    global _leaves_alone
    _leaves_alone = True
    stand_by()


def skip_teardown(status: int) -> None:
    """Let the end of this process, once its threads and what `atexit` has are done, be without Python's teardown.

    Args:
        status: of its exit. A stdout that cannot take what is left for it ends the process in Python's own way, which
            tells so.
    """
    global _program_status
    _program_status = status
    stand_by()


def passes_by_mpi() -> bool:
    """Whether this process will end without MPI's own end, which would hang."""
    return _exit_status is not None or _leaves_alone


def _end() -> None:
    if passes_by_mpi():
        _end_without_mpi()
    elif _program_status is not None:
        _end_without_teardown(_program_status)


def _end_without_teardown(status: int) -> None:
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
    os._exit(status)


def _end_without_mpi() -> None:
    status = _exit_status
    if status is None and getattr(sys, "last_value", None) is not None:
        status = STATUS
    if status is not None:
        begin_ending()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if status is not None:
        end_world(status)
    os._exit(0)


def ending_on_error(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for a thread: an exception in it is a defect, and ends the job instead of the thread alone."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            begin_ending()
            say(f"trtrun: {type(error).__name__} in the heartbeat's thread\n{traceback.format_exc()}")
            end_world()

    return run


def write_stacks_after(seconds: float) -> None:
    """Write the stacks of all threads to stderr unless this is called again, or cancelled, within `seconds`.

    The timer is C code: it does its work where no thread of Python can run any more.
    """
    with _lock:
        if not _is_ending:
            with suppress(OSError, ValueError, RuntimeError):  # stderr may be closed
                faulthandler.dump_traceback_later(seconds, file=STDERR)


def cancel_stacks() -> None:
    """Take back `write_stacks_after`."""
    with _lock:
        if not _is_ending:
            faulthandler.cancel_dump_traceback_later()
