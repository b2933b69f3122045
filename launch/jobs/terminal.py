"""Progress of long works on stderr and tables on stdout, as fits the user's terminal or file.

A rank cannot look for itself: its stderr is a pipe to mpirun and its stdout a pseudo-terminal, whatever the user has.
So the parent process passes along in the environment what it sees.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from launch.jobs.mpi.job import is_reporting_rank
from launch.jobs.mpi.mpirun import OUTPUT_VARIABLE, TERMINAL_VARIABLE
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


NEWS_VARIABLE = "TRTRUN_PROGRESS_SECONDS"
NEWS_SECONDS = 30.0
"""Between two lines about a long work where there is no terminal, unless the variable says otherwise; 0 for none."""

SILENT_SECONDS = 5.0
"""After which a bar says how long it has been there."""

SECOND = 1.0
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


def news_seconds() -> float:
    """Seconds between two lines about a long work; 0 for none."""
    try:
        return max(0.0, float(os.environ.get(NEWS_VARIABLE) or NEWS_SECONDS))
    except ValueError:
        return NEWS_SECONDS


class Bar:
    """How far a long work is: one bar on one line of a terminal; elsewhere, as in the log of a batch job, a line each
    `NEWS_SECONDS`. It says nothing on ranks that do not talk to the user.

    Used as a context: a thread of its own tells the seconds where nothing else is told, and ends with it. A bar only
    ever returns to the start of its line. Bars that move the cursor up would erase text of a rank that reaches the
    terminal by way of stdout before the bar's end does by way of stderr.

    Args:
        title: what makes progress.
        in_bytes: the numbers are bytes.
        then: what goes on once all is done of that, and has no numbers; nothing more is expected where it is empty.
    """

    def __init__(self, title: str, in_bytes: bool = False, then: str = "") -> None:
        self._title = title
        self._in_bytes = in_bytes
        self._then = then
        self._speaks = is_reporting_rank()
        self._width = terminal_width() if self._speaks else None
        self._began = time.monotonic()
        self._drawn_at = -REDRAW_SECONDS
        self._is_drawn = False
        self._done = self._total = 0
        self._first: tuple[float, int] | None = None
        self._is_over = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Bar:
        seconds = SECOND if self._width is not None else news_seconds()
        if self._speaks and seconds > 0:
            self._thread = threading.Thread(target=self._tell, args=(seconds,), name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self.close()

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total`, a few times a second at most."""
        now = time.monotonic()
        with self._turn:
            self._done, self._total = done, total
            self._first = self._first or (now, done)
            if self._width is None or total <= 0 or (now - self._drawn_at < REDRAW_SECONDS and done < total):
                return
            self._draw(now)

    def close(self) -> None:
        """Take the bar away, until the next update."""
        with self._turn:
            if self._is_drawn:
                self._is_drawn = False
                self._write("\r" + _CLEAR_REST)

    def _tell(self, seconds: float) -> None:
        """Say now and then how far it is, whether or not anything has moved."""
        while not self._is_over.wait(seconds):
            now = time.monotonic()
            with self._turn:
                if self._width is None:
                    self._write(f"trtrun: {self._line(now)}\n")
                elif now - self._began > SILENT_SECONDS and now - self._drawn_at >= seconds:
                    self._draw(now)

    def _draw(self, now: float) -> None:
        assert self._width is not None
        self._drawn_at = now
        waited = f", {now - self._began:.0f} s" if now - self._began > SILENT_SECONDS else ""
        if self._has_no_numbers:
            text = f"{self._then if self._total > 0 else self._title}{waited}"
        else:
            count = self._count() + waited
            room = max(0, min(40, self._width - len(self._title) - len(count) - 5))
            filled = "#" * (room * min(self._done, self._total) // self._total)
            text = f"{self._title} [{filled:<{room}}] {count}"
        self._write(f"\r{text[: self._width]}{_CLEAR_REST}")
        self._is_drawn = True

    def _line(self, now: float) -> str:
        """For logs: how far it is, after how long, and how long it may still take."""
        after = f"{now - self._began:.0f} s"
        if self._has_no_numbers:
            return f"{self._then if self._total > 0 else self._title}: {after} so far"
        line = f"{self._title}: {self._count()} after {after}"
        if self._first is not None and self._done > self._first[1] and self._done < self._total:
            began, before = self._first
            left = (now - began) * (self._total - self._done) / (self._done - before)
            line += f", about {left:.0f} s to go"
        return line

    @property
    def _has_no_numbers(self) -> bool:
        return self._total <= 0 or bool(self._then and self._done >= self._total)

    def _count(self) -> str:
        if self._in_bytes:
            return f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB"
        return f"{self._done} of {self._total}"

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
