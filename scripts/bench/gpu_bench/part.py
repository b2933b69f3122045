"""What a part of the benchmark is: its name, what it measures, and about how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts.bench.gpu_bench.workbench import Workbench


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: on the command line.
        about: for people.
        seconds: about how long it takes on GPUs.
        play: does it.
        is_usual: whether it runs where no parts are named.
    """

    name: str
    about: str
    seconds: float
    play: Callable[[Workbench], None]
    is_usual: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which it is stopped."""
        return 60 + 2 * self.seconds
