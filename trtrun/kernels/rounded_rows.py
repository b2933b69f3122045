"""Activations that are rounded to E4M3 already, on their way from the kernel that made them to a product of codes.

It knows what they hold. It does not know who makes or takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoundedRows(NamedTuple):
    """Rows of activations: row r is codes[r] * scale[r].

    Attributes:
        codes: [rows, at least as many as there are inputs] E4M3, without gaps in a row.
        scale: [rows] float32.
        dtype: of the activations before they were rounded, and of what is made of them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | RoundedRows
"""What a linear layer may be given: RoundedRows only where it says that it takes them."""
