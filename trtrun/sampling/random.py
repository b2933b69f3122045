"""Counter-based randomness: every number is a pure function of (seed, position, stream[, token id]).

There is no generator state, so a row's random numbers do not depend on who shares its batch, on the order of the rows,
on how many positions a round verifies, or on whether a preempted row is computed again. Everything up to the last
conversion is int64 arithmetic (wrapping), hence the same on every device and for every thread count.

The function is SplitMix64: output i of the generator with state s is mix64(s + i * gamma), so it can be indexed
directly (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; mix64 is Stafford's
variant 13 of the MurmurHash3 finaliser). The state of the noise over a vocabulary is itself such an output, indexed by
the position, of a state made from seed and stream: a three-level tree of SplitMix64 generators. Philox-4x32-10
(Salmon et al. 2011) needs two to three times as many elementwise operations a number, which on a CPU is the cost.

This module knows no row, no sampling parameter and no model.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Stream(enum.IntEnum):
    """What a random number is used for; numbers of different streams are independent.

    TARGET: the target's token (and, in token mode, the draft's: common random numbers make the two agree as often as a
        coupling without communication can; Daliri, Musco and Suresh 2024, arXiv:2408.07978). Also the bonus token.
    DRAFT: the draft's token where draft probabilities are verified.
    ACCEPT: the uniform that decides whether a draft token is accepted.
    RECOVER: the token that replaces the first rejected draft token.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def _signed(value: int) -> int:
    """The int64 whose bits are those of the unsigned 64-bit `value`."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)

_LARGEST_INT64 = 2**63 - 1
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24  # float32

# Elements worked on at a time. On a CPU the int64 working set (two buffers) stays in the L2 cache; on a GPU the bound
# is only there to keep scratch memory to a few hundred MiB.
_CPU_CHUNK = 1 << 15
_DEVICE_CHUNK = 1 << 24


def _mix_(state: Tensor, scratch: Tensor) -> Tensor:
    """mix64 of int64 `state`, in place; `scratch` has its shape. torch shifts arithmetically, hence the masks."""
    torch.bitwise_right_shift(state, 30, out=scratch).bitwise_and_((1 << 34) - 1)
    state.bitwise_xor_(scratch).mul_(_MULTIPLIER_1)
    torch.bitwise_right_shift(state, 27, out=scratch).bitwise_and_((1 << 37) - 1)
    state.bitwise_xor_(scratch).mul_(_MULTIPLIER_2)
    torch.bitwise_right_shift(state, 31, out=scratch).bitwise_and_((1 << 33) - 1)
    return state.bitwise_xor_(scratch)


def _keys(seeds: Tensor, positions: Tensor, stream: Stream | Tensor) -> Tensor:
    """[n] int64, one well-mixed key for each (seed, position, stream)."""
    if isinstance(stream, Tensor):
        state = seeds + (stream + 1) * _GAMMA
    else:
        state = seeds + _signed((int(stream) + 1) * (_GAMMA % 2**64) % 2**64)
    scratch = torch.empty_like(state)
    _mix_(state, scratch)
    state.add_((positions + 1).mul_(_GAMMA))
    return _mix_(state, scratch)


def _to_unit_interval(bits: Tensor) -> Tensor:
    """Float32 in the open interval (0, 1) from int64 `bits`, which is overwritten.

    63 bits are kept, so that the numbers near 0 are as fine as float32 has them: a 23-bit uniform would never accept a
    ratio below 2**-24, and would give every token a Gumbel number below 17. Odd integers cannot become 0; rounding can
    reach 1 and is cut to the largest float32 below it.
    """
    numbers = bits.bitwise_and_(_LARGEST_INT64).bitwise_or_(1).to(torch.float32)
    return numbers.mul_(2.0**-63).clamp_(max=_LARGEST_BELOW_ONE)


def uniforms(seeds: Tensor, positions: Tensor, stream: Stream | Tensor) -> Tensor:
    """One uniform number for each (seed, position).

    Args:
        seeds: [n] int64, any device.
        positions: [n] int64 absolute positions in the row's tokens, same device.
        stream: what the number is for; or [n] int64 of Stream values.

    Returns:
        [n] float32 in the open interval (0, 1), bit-identical on every device.
    """
    return _to_unit_interval(_keys(seeds, positions, stream))


def _log_exponentials(keys: Tensor, counters: Tensor) -> Tensor:
    """[n, V] float32: log of a standard exponential (that is, minus a Gumbel number) for keys [n] + counters [V]."""
    state = keys[:, None] + counters
    numbers = _to_unit_interval(_mix_(state, torch.empty_like(state)))
    # -log(1 - u), not -log(u): the fine end of u then gives the large Gumbel numbers, which decide the maximum.
    return numbers.neg_().log1p_().neg_().log_()


def _counters(vocabulary: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocabulary + 1, device=device, dtype=torch.int64).mul_(_GAMMA)


def _rows_at_a_time(vocabulary: int, device: torch.device) -> int:
    return max(1, (_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK) // max(1, vocabulary))


def gumbel(seeds: Tensor, positions: Tensor, stream: Stream | Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel numbers for each (seed, position, token id).

    A token's number does not depend on `vocabulary`: engines with padded vocabularies of different size agree.

    Args:
        seeds: [n] int64, any device.
        positions: [n] int64, same device.
        stream: what the numbers are for; or [n] int64 of Stream values.
        vocabulary: how many token ids.

    Returns:
        [n, vocabulary] float32, all finite. The integers behind them are the same on every device; log is the device's.
    """
    keys, counters = _keys(seeds, positions, stream), _counters(vocabulary, seeds.device)
    step = _rows_at_a_time(vocabulary, seeds.device)
    parts = [_log_exponentials(keys[start : start + step], counters) for start in range(0, keys.numel(), step)]
    return torch.cat(parts).neg_() if parts else seeds.new_empty((0, vocabulary), dtype=torch.float32)


def gumbel_of(seeds: Tensor, positions: Tensor, stream: Stream, tokens: Tensor) -> Tensor:
    """The numbers of `gumbel` of some tokens alone.

    Args:
        seeds: [n] int64, any device.
        positions: [n] int64, same device.
        stream: what the numbers are for.
        tokens: [n, count] int64, same device: token ids.

    Returns:
        [n, count] float32.
    """
    state = _keys(seeds, positions, stream).unsqueeze(1) + (tokens + 1).mul_(_GAMMA)
    numbers = _to_unit_interval(_mix_(state, torch.empty_like(state)))
    return numbers.neg_().log1p_().neg_().log_().neg_()


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, stream: Stream | Tensor) -> Tensor:
    """Sample one token from softmax(logits) for each row by the Gumbel-max trick: argmax(logits + gumbel(...)).

    Args:
        logits: [n, V] float32, -inf where a token is impossible; need not be normalised. Not altered.
        seeds: [n] int64, same device.
        positions: [n] int64, same device.
        stream: what the token is for; or [n] int64 of Stream values.

    Returns:
        [n] int64 token ids; 0 where every token is impossible.
    """
    vocabulary = logits.shape[-1]
    keys, counters = _keys(seeds, positions, stream), _counters(vocabulary, seeds.device)
    tokens = torch.empty_like(keys)
    step = _rows_at_a_time(vocabulary, seeds.device)
    for start in range(0, keys.numel(), step):
        part = slice(start, start + step)
        noise = _log_exponentials(keys[part], counters)
        torch.argmax(torch.sub(logits[part], noise, out=noise), dim=-1, out=tokens[part])
    return tokens
