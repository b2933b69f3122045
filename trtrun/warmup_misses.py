"""What this process did for the first time: graphs captured and kernels compiled, each of which holds up who waits.

Who captures or compiles counts it here; who runs rounds takes the counts. It knows numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class WarmupMisses(NamedTuple):
    """Counts of a time.

    Attributes:
        captures: CUDA graphs captured.
        compilations: kernels that were compiled, or read from a cache on disk and made ready.
    """

    captures: int = 0
    compilations: int = 0


class _Counts:
    """Counts of the process, since its start. Only the thread that runs rounds, or starts engines, counts."""

    captures = 0
    compilations = 0


def count_capture() -> None:
    """A graph was captured."""
    _Counts.captures += 1


def count_compilation() -> None:
    """A kernel was made ready."""
    _Counts.compilations += 1


class WarmupMissWatch:
    """Tells what was counted since it was asked last."""

    def __init__(self) -> None:
        self._seen = WarmupMisses(_Counts.captures, _Counts.compilations)

    def take(self) -> WarmupMisses:
        """What has happened since this was made, or asked last."""
        now, before = WarmupMisses(_Counts.captures, _Counts.compilations), self._seen
        self._seen = now
        return WarmupMisses(now.captures - before.captures, now.compilations - before.compilations)
