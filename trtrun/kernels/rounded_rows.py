"""Activations that are rounded to E4M3 already, on their way from the kernel that made them to a product of codes.

It knows what they hold. It does not know who makes or takes them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

GROUP = 128
"""Numbers of a row that share a scale where it is rounded in groups."""

Rounding = Literal["row", "group"]
"""By the largest number of a whole row, or by that of each `GROUP` of its numbers."""


class RoundedRows(NamedTuple):
    """Rows of activations: row r is codes[r] * scale[r], or in groups its number i codes[r, i] * scale[r, i // GROUP].

    Attributes:
        codes: [rows, at least as many as there are inputs] E4M3, without gaps in a row.
        scale: float32 [rows]; in groups [rows, groups], whose rows lie beside each other in memory, with room for a
            multiple of 16 of them.
        dtype: of the activations before they were rounded, and of what is made of them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | RoundedRows
"""What a linear layer may be given: RoundedRows only where it says that it takes them, rounded as it says."""
