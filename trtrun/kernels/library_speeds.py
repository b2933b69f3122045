"""What a start has found of the speed of a library's products, for later starts on this machine to take over.

It knows shapes and answers. It does not know who asks or multiplies (kernels/triton/matmul/dense.py), or where they are
kept.
"""

from __future__ import annotations

from typing import NamedTuple


class Speeds(NamedTuple):
    """Speeds with weights of a shape, for each number of rows that was tried.

    Attributes:
        is_fast: whether the library is not the slower way.
        is_padded: whether so many rows take less time than fewer do, above the number before.
    """

    is_fast: tuple[bool, ...]
    is_padded: tuple[bool, ...]


class WeightSpeeds(NamedTuple):
    """Speeds together with the weights that they are of: features, inputs and dtype."""

    features: int
    inputs: int
    dtype: str
    speeds: Speeds
