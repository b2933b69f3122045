"""A `trtrun serve` that others talk to: started, and ended at the end.

It knows one child process. `server.py` has one that is watched and killed in parts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from scripts.harness.announcements import Addresses, read_addresses
from scripts.harness.children import TRTRUN, Child, ChildError, started
from scripts.harness.processes import cpu_seconds, descendants_of

FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
"""Options of a server that listens wherever there is room."""

START_SECONDS = 300.0
END_SECONDS = 60.0
"""How long a server may take to end what is asked of it once it is told to end."""


@dataclass(frozen=True)
class Served:
    """A server that is ready.

    Attributes:
        addresses: where it listens.
        process: the frontend's process id.
    """

    addresses: Addresses
    process: int

    def cpu_seconds(self) -> tuple[float, float]:
        """User and system seconds so far: of the frontend, and of all processes below it."""
        return cpu_seconds(self.process), sum(map(cpu_seconds, descendants_of(self.process)))


def serve_words(config: Path, *options: object) -> list[object]:
    """The command line of a server with a configuration, at free ports unless the options say otherwise."""
    return [*TRTRUN, "serve", "--config", config, *FREE_PORTS, *options]


def wait_for_addresses(child: Child, patience: float) -> Addresses:
    """Where a server listens, once it says so.

    Raises:
        ChildError: it does not.
    """
    try:
        return child.wait_until(lambda: _find_addresses(child.errors), time.monotonic() + patience, "an address")
    except ChildError:
        said = "\n".join(child.errors.splitlines()[-20:])
        raise ChildError(f"the server did not start:\n{said}") from None


def _find_addresses(said: str) -> Addresses | None:
    whole = said[: said.rfind("\n") + 1]  # a line may be there in part
    return next((found for line in whole.splitlines() if (found := read_addresses(line))), None)


@contextmanager
def serving(
    words: Sequence[object], variables: Mapping[str, str] = MappingProxyType({}), patience: float = START_SECONDS
) -> Iterator[Served]:
    """Start a server by its command line, with `variables` in its environment, and wait until it is ready; end it at
    the end.

    Raises:
        ChildError: it does not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trtrun-serving-") as folder,
        started(words, Path(folder), variables, END_SECONDS) as child,
    ):
        yield Served(wait_for_addresses(child, patience), child.process.pid)
