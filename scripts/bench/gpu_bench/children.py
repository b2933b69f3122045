"""Commands as child processes that end when they should: by themselves, at a deadline, or with this process.

It knows processes and files. It does not know what the commands are for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.jobs.mpi.processes import clear_session, ending_with_parent

ROOT = Path(__file__).resolve().parents[3]

END_SECONDS = 12.0
"""How long a command may take to end its ranks once it is told to."""

PAUSE_SECONDS = 0.02

TRTRUN = (sys.executable, "-m", "launch.cli")


class ChildError(Exception):
    """A command failed, or was not done in time; the message is one line."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, both outputs, and how long it took."""

    status: int
    stdout: str
    stderr: str
    seconds: float

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
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                ending_with_parent(self.words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
                cwd=ROOT,
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
            raise ChildError(f"not done after {seconds:.0f} s: {last_words(self._read()[1])}")
        clear_session(self.process.pid)
        return Ended(self.process.returncode, *self._read(), time.monotonic() - self._started)

    def stop(self) -> None:
        """End it and all that it started: first as a user would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=END_SECONDS)
        clear_session(self.process.pid)
        self.process.wait()

    def wait_until(self, is_there: Any, deadline: float, what: str) -> None:
        """Wait for something that the command does.

        Raises:
            ChildError: it ended before that, or the time is over.
        """
        while not is_there():
            if self.process.poll() is not None:
                raise ChildError(f"ended before {what}: {last_words(self._read()[1])}")
            if time.monotonic() > deadline:
                raise ChildError(f"no {what} in time")
            time.sleep(PAUSE_SECONDS)

    def _read(self) -> tuple[str, str]:
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in self._files)
        return out, err


@contextmanager
def started(
    words: Sequence[object], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Child]:
    """A command that runs as long as the block does, at most; see `Child`."""
    child = Child(words, folder, variables)
    try:
        yield child
    finally:
        child.stop()


def run(words: Sequence[object], folder: Path, deadline: float) -> Ended:
    """Run a command to its end.

    Raises:
        ChildError: it was not done in time.
    """
    with started(words, folder) as child:
        return child.wait(deadline)


def last_words(text: str) -> str:
    """The first line that trtrun said of an error, or else the last line of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("trtrun: ")]
    return (own or lines[-1:] or ["it said nothing"])[0][:400]


def ranks_below(process: int) -> dict[int, int]:
    """Process ids of the MPI ranks that descend from a process, by rank."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, int] = {}
    waiting = list(children.get(process, []))
    while waiting:
        child = waiting.pop()
        waiting += children.get(child, [])
        with suppress(OSError):
            for item in Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0"):
                name, _, value = item.partition("=")
                if name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
                    found[int(value)] = child
    return found
