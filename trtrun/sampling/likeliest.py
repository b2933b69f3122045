"""The few largest of many numbers, row by row, in a way that suits a GPU.

torch.topk reads a vocabulary several times over with few blocks. The largest of a piece is found in one pass, and what
is among the largest of all lies in one of the pieces with the largest peaks. It knows numbers alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_PIECE = 256
_FEWEST_PIECES = 64


def likeliest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest numbers of each row stand, the largest first.

    Args:
        numbers: [rows, width] float32, any device; without NaN.
        count: how many; all of a row that is shorter.

    Returns:
        [rows, count] int64. Among equal numbers any one may come first; where fewer are above -inf, what follows them
        may come twice.
    """
    width = numbers.shape[1]
    count = min(count, width)
    if numbers.device.type == "cpu" or width < _PIECE * max(_FEWEST_PIECES, count):
        return numbers.topk(count, dim=-1).indices
    return _by_pieces(numbers, count)


def _by_pieces(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """`likeliest` of rows that have `count` pieces or more."""
    rows, width = numbers.shape
    padding = -width % _PIECE
    whole = functional.pad(numbers, (0, padding), value=float("-inf")) if padding else numbers
    pieces = whole.reshape(rows, -1, _PIECE)
    highest = pieces.amax(dim=-1).topk(count, dim=-1).indices
    chosen = pieces.gather(1, highest.unsqueeze(-1).expand(-1, -1, _PIECE)).reshape(rows, -1)
    best = chosen.topk(count, dim=-1).indices
    # Where little is above -inf, padding is among the best: it must not give a place that the row does not have.
    return (highest.gather(1, best // _PIECE) * _PIECE + best % _PIECE).clamp(max=width - 1)
