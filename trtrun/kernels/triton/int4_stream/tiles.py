"""How programs of the kernel are laid out, by rows and by sizes of groups.

It knows numbers; it does not import Triton.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from trtrun.kernels.torch.integers import GROUP, TILE

HEIGHTS = (8, 16, 32, 64, 128)
"""Rows of a tile that the kernel is compiled for. More rows have several tiles."""

MOST_BY_WARPS = 8
"""Rows that each warp multiplies by itself: instructions of four warps take as long for few rows as for many."""

TURNS_AHEAD = 2
"""By which a group of warps may be ahead of the one that takes its sums."""

_SHARED_BYTES = 200 << 10
"""Shared memory of a program. The small kernels that begin beside need a little shared memory, too."""


_SHARED_STEP, _OWN_STEP = 1.3, 3.0
"""What a step of 512 inputs takes, in microseconds on an H200: of a tile with 64 rows, whose inputs are shared, and of
two tiles with 128 rows."""


def height_of(rows: int, tiles: int, units: int) -> int:
    """Rows of a tile where there are so many, of a weight of `tiles` on a GPU of `units` multiprocessors: as few as
    there are; and where they fill several tiles, what leaves fewer multiprocessors idle."""
    few = next((height for height in HEIGHTS if rows <= height), HEIGHTS[-1])
    if few < HEIGHTS[-1]:
        return few
    shared = ceil(tiles * ceil(rows / TILE) / units) * _SHARED_STEP
    own = ceil(ceil(tiles / 2) * ceil(rows / HEIGHTS[-1]) / units) * _OWN_STEP
    return TILE if shared < own else HEIGHTS[-1]


def steps_at_once(height: int, parts: int, steps: int) -> int:
    """How many steps of 512 inputs, of `steps`, are dealt with as one: two take fewer instructions. There must be room
    for several, so this is for few rows and large groups alone."""
    return 2 if height <= MOST_BY_WARPS and parts == 1 and steps % 2 == 0 else 1


class Room(NamedTuple):
    """What a program keeps in shared memory, and how it works.

    Attributes:
        workers: groups of warps that share the inputs of a tile; 0 where two have a tile each.
        stages: steps of the weight on their way.
        slots: places for rows on their way.
        together: groups of 128 inputs in each of them.
        registers: of a thread, in the mean.
    """

    workers: int
    stages: int
    slots: int
    together: int
    registers: int

    @classmethod
    def of(cls, height: int, parts: int, at_once: int) -> Room:
        """Room for tiles of so many rows, so many groups in 128 inputs, and steps of so many times 512 inputs."""
        by_warps = height <= MOST_BY_WARPS
        workers = 0 if height * parts > TILE else 4 if by_warps else 2
        together = at_once * 4 if by_warps or (parts == 1 and height < TILE) else max(workers, 1)
        slot = together * height * GROUP * 2
        slots = min(4, max(2, _SHARED_BYTES // 2 // slot))
        stage = at_once * (16 + parts) * 1024 * (1 if workers else 2)
        given = TURNS_AHEAD * together // workers * (workers - 1) * parts * TILE * height * 4 if workers else 0
        stages = min(8, (_SHARED_BYTES - slots * slot - given) // stage)
        return cls(workers, stages, slots, together, 96 if workers == 4 else 168)
