"""All that a child has started: every process of the session that it leads, and their end.

It knows processes, and nothing of what they do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CLEAR_SECONDS = 5.0
"""How long processes may take to be gone once they are killed."""


def session_processes(session: int) -> Iterator[int]:
    """Every living process of a session: mpirun gives each rank a process group of its own, but the same session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # pid (name) state parent group session …; the name may hold spaces and parentheses.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            yield int(entry.name)


def kill_session(session: int) -> bool:
    """Kill every process of a session.

    Returns:
        Whether there was one.
    """
    found = False
    for process in session_processes(session):
        found = True
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    return found


def clear_session(session: int) -> None:
    """Kill every process of a session and see them gone: whoever starts the job again needs what they hold."""
    deadline = time.monotonic() + CLEAR_SECONDS
    while kill_session(session) and time.monotonic() < deadline:
        time.sleep(0.01)
