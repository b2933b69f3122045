"""Logits as outputs: what completions have of them in parts becomes one tensor of all rows.

They are many, so that they are put together with rests: others have their turn meanwhile. It knows arrays. It does not
know requests, or how tensors travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launch.serve.admission.stretches import Rests
from launch.serve.api.kserve.tensors import Array

_AT_ONCE = 1 << 20
"""Logits that are copied without a rest: 4 MiB."""


def first_positions(count: int, parts: Sequence[Array]) -> list[Array]:
    """The first `count` positions of parts, [positions, vocab] each."""
    found: list[Array] = []
    for part in parts:
        found.append(part[: count - sum(map(len, found))])
    return found


async def stack_logits(of_rows: Sequence[Sequence[Array]]) -> Array:
    """[rows, positions, vocab] float32 of the parts, [positions, vocab] each, that each of the rows has; shorter rows
    are filled up with 0."""
    if len(of_rows) == 1 and len(of_rows[0]) == 1:
        return of_rows[0][0][None]
    lengths = [sum(map(len, parts)) for parts in of_rows]
    width = max((part.shape[1] for parts in of_rows for part in parts), default=0)
    stacked = np.zeros((len(of_rows), max(lengths, default=0), width), np.float32)
    step = max(1, _AT_ONCE // max(1, width))
    rests = Rests()
    for row, parts in zip(stacked, of_rows, strict=True):
        at = 0
        for part in parts:
            for start in range(0, len(part), step):
                piece = part[start : start + step]
                row[at : at + len(piece)] = piece
                at += len(piece)
                await rests.rest()
    return stacked
