"""Work on some rows at a time, so that temporaries stay small whatever the number of rows and the vocabulary.

It knows sizes and no arithmetic. Every step of sampling treats rows independently, so the pieces give the same bits.
"""

from __future__ import annotations

MOST_ELEMENTS = 1 << 24
"""Logits whose temporaries exist at once: 64 MiB for each tensor of float32."""


def pieces(rows: int, elements_of_a_row: int, most_elements: int | None = None) -> list[slice]:
    """[0, rows) in slices of whole rows that hold `most_elements` at most (None: MOST_ELEMENTS), a row at least."""
    step = max(1, (MOST_ELEMENTS if most_elements is None else most_elements) // max(1, elements_of_a_row))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
