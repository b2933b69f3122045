"""Commands as child processes that end when they should: by themselves, at a deadline, or with this process.

It knows processes and files. It does not know what the commands are for.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from launch.jobs.mpi.processes import clear_session, ending_with_parent
from scripts.harness.processes import child_environment

T = TypeVar("T")

END_SECONDS = 12.0
"""How long a command may take to end its ranks once it is told to."""

PAUSE_SECONDS = 0.02

TRTRUN = (sys.executable, "-m", "launch.cli")


NOTED_LINES = 30
"""Of what a command said before it failed, for a reader who wants to know why."""


class ChildError(Exception):
    """A command failed, was not done in time, or is not as it has to be; the message says which. What it said last is
    in its notes."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, both outputs, and how long it took."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    def succeed(self) -> Ended:
        """The same end, of a command that must not fail.

        Raises:
            ChildError: it did.
        """
        if self.status != 0:
            raise _with_words(f"status {self.status}", self.stderr)
        return self

    def last_json(self) -> dict[str, Any]:
        """The object in the last line of its output.

        Raises:
            ChildError: there is none.
        """
        lines = self.stdout.strip().splitlines()
        try:
            return dict(json.loads(lines[-1]))
        except (IndexError, ValueError, TypeError):
            raise ChildError(f"no JSON in the last line; status {self.status}: {last_words(self.stderr)}") from None


class Child:
    """A command that runs; its outputs are files.

    Args:
        words: of the command.
        folder: for the outputs.
        variables: of the environment, beside this process's.
    """

    def __init__(
        self, words: Sequence[object], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.words = [str(word) for word in words]
        number = len(list(folder.glob("*.out")))
        self._files = (folder / f"{number:03d}.out", folder / f"{number:03d}.err")
        self._started = time.monotonic()
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                ending_with_parent(self.words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=child_environment(variables),
                cwd=Path.cwd(),
                start_new_session=True,
            )

    def wait(self, deadline: float) -> Ended:
        """Its end.

        Raises:
            ChildError: it was not done at `deadline` (time.monotonic()), and is stopped.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        if self.process.poll() is None:
            self.stop()
            seconds = time.monotonic() - self._started
            raise _with_words(f"not done after {seconds:.0f} s", self.errors)
        clear_session(self.process.pid)
        return Ended(self.process.returncode, self.output, self.errors, time.monotonic() - self._started)

    def stop(self, patience: float = END_SECONDS) -> None:
        """End it and all that it started: first as a user would, and so many seconds later by force."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
        clear_session(self.process.pid)
        self.process.wait()

    def wait_until(self, ask: Callable[[], T | None], deadline: float, what: str) -> T:
        """What `ask` finds of something that the command does, once it is neither None nor false.

        Raises:
            ChildError: the command ended before that, or the time is over.
        """
        while not (found := ask()):
            if self.process.poll() is not None:
                raise ChildError(f"ended before {what}: {last_words(self.errors)}")
            if time.monotonic() > deadline:
                raise ChildError(f"no {what} in time")
            time.sleep(PAUSE_SECONDS)
        return found

    @property
    def output(self) -> str:
        """What it has written to its standard output so far."""
        return self._files[0].read_text(encoding="utf-8", errors="replace")

    @property
    def errors(self) -> str:
        """What it has written to its standard error so far."""
        return self._files[1].read_text(encoding="utf-8", errors="replace")


@contextmanager
def started(
    words: Sequence[object],
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
    patience: float = END_SECONDS,
) -> Iterator[Child]:
    """A command that runs as long as the block does, at most, and then has `patience` seconds to end; its other
    arguments are `Child`'s."""
    child = Child(words, folder, variables)
    try:
        yield child
    finally:
        child.stop(patience)


def run(
    words: Sequence[object], folder: Path, deadline: float, variables: Mapping[str, str] = MappingProxyType({})
) -> Ended:
    """Run a command to its end, with `variables` in its environment.

    Raises:
        ChildError: it was not done in time.
    """
    with started(words, folder, variables) as child:
        return child.wait(deadline)


def _with_words(what: str, said: str) -> ChildError:
    error = ChildError(f"{what}: {last_words(said)}")
    for line in said.splitlines()[-NOTED_LINES:]:
        error.add_note(line)
    return error


def last_words(text: str) -> str:
    """The first line that trtrun said of an error, or else the last line of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("trtrun: ")]
    return (own or lines[-1:] or ["it said nothing"])[0][:400]
