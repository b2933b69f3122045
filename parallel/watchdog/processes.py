"""A process by a name that no later process gets, and the stack of its main thread.

By its name rank 0 ends a rank that does not answer, where it can: process numbers are used again, and the same number
on another host is another process. The stack is text; it is taken by another thread of the process, and says whether
the main thread waits for another rank: it knows which files of this package wait for peers. What a stack says about a
job is decided elsewhere (fault_attribution.py).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, MethodType
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


MOST_FRAMES = 20
"""The innermost ones: further out stands only how the program was started."""

MOST_CHARACTERS = 100_000
_PACKAGE = Path(__file__).resolve().parents[1]
WAITING_FILES = frozenset(
    str(_PACKAGE / name)
    for name in ("communicator.py", "control.py", "groups.py", "link.py", "messages.py", "waiting.py")
)
WAITING_FOLDER = str(_PACKAGE / "transports")


@dataclass(frozen=True)
class Stack:
    """One rank's main thread at one moment.

    Attributes:
        text: as in a traceback, the innermost call last.
        waits: whether it is inside a call that waits for other ranks.
    """

    text: str
    waits: bool


def main_stack(thread: int) -> Stack:
    """The stack of this process's main thread, whatever it is doing, as far as Python knows.

    Args:
        thread: identifier of the thread, see `Activity`.
    """
    frame = sys._current_frames().get(thread)
    # The thread may go on while its frames are read; each line is true, if not all of the same moment.
    frames = list(islice(_outward(frame), MOST_FRAMES))
    places = [(entry, entry.f_lineno) for entry in reversed(frames)]
    summary = traceback.StackSummary.extract(iter(places), lookup_lines=False)
    text = "".join(traceback.format_list(summary))[-MOST_CHARACTERS:]
    return Stack(text or "  no frame of Python\n", any(waits_for_peers(entry.f_code.co_filename) for entry in frames))


def named(method: Callable[[], None], name: str) -> Callable[[], None]:
    """Wrap a method under another name, which stands in every stack of a thread that runs it.

    Stacks that C code writes (`abort.write_stacks_after`) say nothing of the process; so a rank's name gets in.
    """
    assert isinstance(method, MethodType)
    function = method.__func__
    code = function.__code__.replace(co_name=name)
    return MethodType(FunctionType(code, function.__globals__, name, None, function.__closure__), method.__self__)


def waits_for_peers(file: str) -> bool:
    """Whether the code of a source file calls nothing but waits for other ranks."""
    return file in WAITING_FILES or str(Path(file).parent) == WAITING_FOLDER


def show_stacks(stacks: Mapping[str, Stack]) -> str:
    """Stacks by the names of their ranks as text for the user; ranks that stand at the same place share it."""
    names: dict[str, list[str]] = {}
    for name, stack in stacks.items():
        names.setdefault(stack.text, []).append(name)
    return "".join(
        f"--- main thread of {', '.join(group)}, innermost call last:\n{text}" for text, group in names.items()
    )


def _outward(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
