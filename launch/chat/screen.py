"""What a reader sees of an answer: its text as it comes, and how fast it comes and by which tokens.

On a terminal the figures stand below the text while it grows, and stay behind its end; elsewhere the text goes to
standard output as it is, and the figures to standard error. It does not know who answers.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launch.chat.client import Piece

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What could move the cursor, or tell a terminal something; a model may write anything."""

_THOUGHTS = "dim italic"


@dataclass
class AnswerFigures:
    """How an answer came so far.

    Attributes:
        origins: a letter for each token: `a` is an accepted draft token, any other ends a round.
        first, last: seconds of the first piece and of the last, on Python's monotonic clock.
        num_first: tokens of the first piece, whose time is the prompt's.
    """

    origins: str = ""
    first: float | None = None
    last: float = 0.0
    num_first: int = 0

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        self.origins += piece.origins
        self.last = time.monotonic()
        if self.first is None and piece.origins:
            self.first, self.num_first = self.last, len(piece.origins)

    def __str__(self) -> str:
        count = len(self.origins)
        words = f"{count} token{'' if count == 1 else 's'}"
        seconds = 0.0 if self.first is None else self.last - self.first
        if seconds > 0 and count > self.num_first:
            words += f", {(count - self.num_first) / seconds:.1f} tokens/s"
        accepted = self.origins.count("a")
        rounds = max(1, len(self.origins) - accepted)
        if accepted:
            words += f", {accepted / count:.0%} of them accepted drafts, {count / rounds:.2f} a round"
        return words


class PlainScreen:
    """For files and pipes."""

    def __init__(self) -> None:
        self._figures = AnswerFigures()

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if kind is None:
            print(f"trtrun: {self._figures}", file=sys.stderr, flush=True)

    def show(self, piece: Piece) -> None:
        """Write a piece's text; thoughts are left out."""
        self._figures.add(piece)
        sys.stdout.write(piece.text)
        sys.stdout.flush()


class TerminalScreen:
    """For terminals: lines that are whole scroll up, and the one that grows stands above the figures."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._figures = AnswerFigures()
        self._partial = ""
        self._style = ""
        self._live = Live(console=console, transient=True, refresh_per_second=8, vertical_overflow="crop")

    def __enter__(self) -> TerminalScreen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update(Text(""))
        self._live.__exit__(None, None, None)
        if self._partial:
            self._print(self._partial)
        words = f"{self._figures}; stopped" if kind is KeyboardInterrupt else str(self._figures)
        self._console.print(Text(words, style="dim"))

    def show(self, piece: Piece) -> None:
        """Show a piece's thoughts and text."""
        self._figures.add(piece)
        self._add(piece.thoughts, _THOUGHTS)
        self._add(piece.text, "")
        self._live.update(Group(Text(self._partial, style=self._style), Text(str(self._figures), style="dim")))

    def _add(self, text: str, style: str) -> None:
        if not text:
            return
        if style != self._style:  # thoughts are over
            if self._partial:
                self._print(self._partial)
            self._partial, self._style = "", style
            text = text.lstrip("\n")
        *whole, partial = (self._partial + _CONTROLS.sub("", text).expandtabs(4)).split("\n")
        for line in whole:
            self._print(line)
        # A paragraph may be longer than the screen is high.
        lines = Text(partial).wrap(self._console, self._console.width)
        for wrapped in lines[:-1]:
            self._print(wrapped.plain)
        self._partial = lines[-1].plain if lines else ""

    def _print(self, line: str) -> None:
        self._console.print(Text(line, style=self._style))
