"""How far results are from what they should be."""

from __future__ import annotations

import torch


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norms; NaN anywhere gives NaN, which is below no bound."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
