"""A process by a name that no later process gets, told to another process, which may be on the same host.

By it rank 0 ends a rank that does not answer, where it can: process numbers are used again, and the same number on
another host is another process. It knows Linux and nothing of ranks.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


def own_process() -> dict[str, Any]:
    """This process's name, ready for JSON: its place (a running system and its name space), number and start."""
    return {"place": _place(), "number": os.getpid(), "started": _started(os.getpid())}


def kill_process(name: object) -> bool:
    """Kill a process of this host, also one that is stopped.

    Args:
        name: from `own_process`.

    Returns:
        Whether the process was there to be killed. False for one of another host, and where the name makes no sense.
    """
    if not isinstance(name, dict) or not isinstance(number := name.get("number"), int) or number <= 1:
        return False
    if name.get("place") != _place() or name.get("place") == "":
        return False
    with suppress(OSError):
        descriptor = os.pidfd_open(number)
        try:
            # The descriptor stands for the process of this moment; its start says whether that is the one.
            if _started(number) == name.get("started") is not None:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(number: int) -> str | None:
    """When a process started, in the system's own count."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
