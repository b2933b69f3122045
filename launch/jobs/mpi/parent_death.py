"""A process that ends when the one that started it dies, even by SIGKILL: the kernel sees to it, once it is asked.

It knows processes and nothing of what they do. Linux alone has this; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1

_PROGRAM = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks, makes sure that the parent did not die before, and becomes the command."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have this process end, by a signal, with the one that started it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The words of a child of this process that runs a command and ends with this process.

    The child asks for that itself, in a Python that starts in some hundredths of a second: code that runs between fork
    and exec (`preexec_fn`) may hang in a process of several threads.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
