"""The soft cap of attention scores and of logits, c * tanh(x / c), in torch's operations.

On the CPU torch goes over most numbers in vectors and over the last ones one by one, and promises no equal bits of
both for tanh. There tanh is a quotient of two polynomials, as in the Eigen library: products, sums and a quotient round
alike wherever they are computed. It takes no longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_AT_ONCE = 1 << 15
"""Numbers whose polynomials are computed at a time: few enough for a processor's caches."""

_LARGEST = 7.90531110763549805
"""From here on tanh is 1 in float32."""

_NUMERATOR = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928935436e-04,
    4.89352455891786e-03,
)
_DENOMINATOR = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
"""Coefficients of powers of the square, the highest first; the numerator is multiplied by the number itself."""


def soft_cap(x: torch.Tensor, cap: float, factor: float = 1.0) -> torch.Tensor:
    """cap * tanh(factor * x / cap), float32 of the shape of `x`, of any dtype; to a few units in the last place of
    `cap`."""
    scaled = x.float().mul(factor / cap)
    if x.device.type != "cpu":
        return scaled.tanh_().mul_(cap)
    flat = scaled.contiguous().view(-1)
    for start in range(0, len(flat), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        part.clamp_(-_LARGEST, _LARGEST)
        square = part * part
        part.mul_(_polynomial(square, _NUMERATOR)).div_(_polynomial(square, _DENOMINATOR)).mul_(cap)
    return flat.view(x.shape)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    highest, *others = coefficients
    found = torch.full_like(x, highest)
    for coefficient in others:
        found.mul_(x).add_(coefficient)
    return found
