"""Seconds that starts took where they were measured: docs/performance.md has machine, models and method, in
"First runs" and in "Pacing". What a plan estimates comes from here alone.
"""

from __future__ import annotations

from typing import NamedTuple

Seconds = tuple[float, float]
"""From, to."""

COLD = (7.1, 11.6, 19.9, 21.2, 24.3, 24.8, 25.4)
WARM = (4.3, 5.2, 5.2, 5.2, 8.3, 8.7, 9.3)
"""Since the command began, until the end of: imports, weights, kernels, the largest round, all kernels once and graphs,
a round of each kind, measured rounds. Without the second and third of cold starts warm ones had nothing to do there."""

PAIR = "an 8B-shaped pair on one H100"
NUM_GRAPHS = 192
NUM_PROCESSES = 15


class Measured(NamedTuple):
    """Seconds, and of what."""

    seconds: Seconds
    basis: str


def _between(step: int, runs: tuple[tuple[float, ...], ...] = (COLD, WARM)) -> Seconds:
    """What the step behind `step` others took, in the fastest and the slowest of runs."""
    found = [round(run[step] - (run[step - 1] if step else 0.0), 1) for run in runs]
    return min(found), max(found)


IMPORTS = Measured(_between(0), "two machines with an H100")
MADE_UP_COLD = Measured(_between(1, (COLD,)), f"{PAIR}, products compared for the first time")
MADE_UP_WARM = Measured(_between(1, (WARM,)), PAIR)
COMPILED = Measured(_between(2, (COLD,)), f"{PAIR}, {NUM_PROCESSES} processes")
LARGEST_ROUND = Measured(_between(3, (COLD,)), PAIR)
KINDS_OF_ROUNDS = Measured(_between(5), PAIR)
MEASURED_ROUNDS = Measured((0.1, 0.6), "the start's rounds in `Pacing`: none is begun that would not be done in 0.5 s")

_GRAPHS = _between(4)

CPU_RUN = "a run of one short prompt on four CPU ranks and two cores took 4.6 to 4.8 s in all, most of it this"
TWO_GPUS = "two H100, target TP 2, the kernels of one rank warm: 17 s to ready behind the imports"


def graph_seconds(count: int) -> Measured:
    """All kernels once and so many graphs, as many more seconds as there are more graphs."""
    low, high = (seconds * count / NUM_GRAPHS for seconds in _GRAPHS)
    return Measured(
        (low, high), f"{_GRAPHS[1]:g} s for {NUM_GRAPHS} graphs of 32 and 4 layers; more layers take longer"
    )
