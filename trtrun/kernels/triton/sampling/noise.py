"""The keyed noise of sampling/random.py inside Triton kernels: the same integers, hence the same uniform numbers.

The logarithms are the device's, and the one near 1 is a series here: noise may differ from torch's in the last bits. It
knows keys and counters. It does not know rows or logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.source_keys import settle_keys

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_INT64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SCALE = tl.constexpr(2.0**-63)


@triton.jit
def _mix(state):
    """mix64 of uint64 `state`."""
    state = (state ^ (state >> 30)) * tl.full((), _MULTIPLIER_1, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), _MULTIPLIER_2, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def key_of(seed, position, stream):
    """uint64: the key of int64 seed and position, and a stream."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    state = _mix(seed.to(tl.uint64) + tl.cast(stream + 1, tl.uint64) * gamma)
    return _mix(state + (position + 1).to(tl.uint64) * gamma)


@triton.jit
def to_uniform(bits):
    """float32 in the open interval (0, 1) of uint64 bits."""
    odd = (bits & tl.full((), _LARGEST_INT64, tl.uint64)) | tl.full((), 1, tl.uint64)
    return tl.minimum(odd.to(tl.int64).to(tl.float32) * _SCALE, _LARGEST_BELOW_ONE)


@triton.jit
def log_exponentials(key, token):
    """float32: log of a standard exponential (minus a Gumbel number) of each of the token ids [n] under one key."""
    gamma = tl.full((), _GAMMA, tl.uint64)
    number = to_uniform(_mix(key + (token + 1).to(tl.uint64) * gamma))
    # -log(1 - u). The fine end of u gives the large Gumbel numbers, which decide the maximum: a series there, as the
    # logarithms of GPUs are good to an absolute error near 1.
    series = 1.0 / 5.0 + number * (1.0 / 6.0 + number * (1.0 / 7.0))
    series = 1.0 / 2.0 + number * (1.0 / 3.0 + number * (1.0 / 4.0 + number * series))
    small = number + number * number * series
    exponential = tl.where(number < 0.0625, small, -tl.log(1.0 - number))
    return tl.log(exponential)


settle_keys(globals())
