"""Buckets of rows: how many rows a product on the CPU is computed for, so that few shapes ever occur.

oneDNN makes a kernel for every shape that it meets, half a megabyte and up to a millisecond each (measured), and keeps
a thousand. Prompts of every length would bring a new shape each; rounding up costs a few rows of arithmetic instead. It
knows numbers of rows and nothing of what is multiplied.
"""

from __future__ import annotations

_EXACT = 16
# (up to so many rows, round up to a multiple of this); beyond the last, its multiple goes on.
_STEPS = ((128, 16), (512, 64), (1 << 62, 256))


def bucket_rows(rows: int) -> int:
    """The number of rows to compute for `rows` that are wanted: exact up to 16, at most an eighth more on average."""
    if rows <= _EXACT:
        return rows
    step = next(step for limit, step in _STEPS if rows <= limit)
    return -(-rows // step) * step
