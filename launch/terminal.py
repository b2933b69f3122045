"""Progress bars on stderr and tables on stdout, as fits the user's terminal or file.

A rank cannot look for itself: its stderr is a pipe to mpirun and its stdout a pseudo-terminal, whatever the user has.
So the parent process passes along in the environment what it sees.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from launch.mpi.job import is_reporting_rank
from launch.mpi.mpirun import OUTPUT_VARIABLE, TERMINAL_VARIABLE
from parallel.mpi_rank import find_mpi_rank

if TYPE_CHECKING:
    from rich.console import Console


def terminal_width() -> int | None:
    """Columns of the terminal behind stderr, or None when there is none."""
    given = os.environ.get(TERMINAL_VARIABLE, "")
    if given.isdecimal():
        return max(20, int(given))
    if not sys.stderr.isatty():
        return None
    from rich.console import Console  # not at the top: most ranks have no use for it

    return Console(stderr=True).width


REDRAW_SECONDS = 0.1
_CLEAR_REST = "\033[K"

PLAIN_WIDTH = 120
"""Columns of tables in files and pipes, which have no width of their own."""


def output_console() -> Console:
    """A console on standard output; with colours only where the user's standard output is a terminal."""
    from rich.console import Console

    if OUTPUT_VARIABLE in os.environ or find_mpi_rank() is not None:
        is_terminal = os.environ.get(OUTPUT_VARIABLE) == "1"
    else:
        is_terminal = sys.stdout.isatty()
    width = terminal_width() if is_terminal else PLAIN_WIDTH
    # Rich's own guess of a width inside a rank would be that of mpirun's pseudo-terminal.
    return Console(force_terminal=is_terminal, width=width, highlight=False, emoji=False, markup=False)


class Bar:
    """One progress bar on one line; does nothing without a terminal, and on ranks that do not talk to the user.

    It only ever returns to the start of its line. Bars that move the cursor up would erase text of a rank that reaches
    the terminal by way of stdout before the bar's end does by way of stderr.

    Args:
        title: what makes progress.
        in_bytes: the numbers are bytes.
    """

    def __init__(self, title: str, in_bytes: bool = False) -> None:
        self._title = title
        self._in_bytes = in_bytes
        self._width = terminal_width() if is_reporting_rank() else None
        self._drawn_at = -REDRAW_SECONDS
        self._is_drawn = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total`, a few times a second at most."""
        now = time.monotonic()
        if self._width is None or total <= 0 or (now - self._drawn_at < REDRAW_SECONDS and done < total):
            return
        self._drawn_at = now
        count = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB" if self._in_bytes else f"{done} of {total}"
        room = min(40, self._width - len(self._title) - len(count) - 5)
        filled = "#" * (max(0, room) * min(done, total) // total)
        self._write(f"\r{self._title} [{filled:<{max(0, room)}}] {count}"[: self._width] + _CLEAR_REST)
        self._is_drawn = True

    def close(self) -> None:
        """Take the bar away."""
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r" + _CLEAR_REST)

    def _write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
