"""How a model's positions become angles, in numbers alone: what config.json decides, and `rotary` computes from.

It computes no angle, and imports no torch: whoever only reads a configuration does without. It knows no config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_LEAST_THETA, _MOST_THETA = 1.01, 1e30
_MOST = 1e6
"""Beyond these bounds no model is known, and somewhere beyond them float32 ends."""


@dataclass(frozen=True)
class RopeConfig:
    """How angles depend on position.

    Attributes:
        rope_type: "default", "linear" (position interpolation, arXiv:2306.15595), "llama3" (Llama 3.1's rule), "yarn"
            (arXiv:2309.00071), "longrope" (arXiv:2402.13753), "proportional" (Gemma 4: the first angles of a whole
            head, and 0 for the others), or "none", which turns nothing.
        theta: base of the geometric series of wavelengths.
        factor: by how much the context is stretched; 1 for "default".
        original_max_position_embeddings: context of the pretraining, for "llama3", "yarn" and "longrope".
        low_freq_factor, high_freq_factor: bounds of the smooth zone of "llama3".
        beta_fast, beta_slow, truncate: bounds of the ramp of "yarn".
        attention_factor: what cosines and sines are multiplied by ("yarn", "longrope"), 1.0 otherwise.
        short_factors, long_factors: what wavelengths are stretched by, one for each ("longrope").
        is_long: whether it is the latter that count.
        rotated: how many of a head's numbers are rotated, the first ones in the files; None for all.
        proportion: of its angles that are not 0, for "proportional".
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    rotated: int | None = None
    proportion: float = 1.0

    def in_context(self, tokens: int) -> RopeConfig:
        """The rotation of texts of so many tokens at most. It stays the same as a text grows, since angles of tokens in
        the KV store do."""
        if self.rope_type != "longrope":
            return self
        return replace(self, is_long=tokens > self.original_max_position_embeddings)

    def describe(self) -> str | None:
        """One line where there was a choice; else None."""
        if self.rope_type != "longrope":
            return None
        original = self.original_max_position_embeddings
        if not self.is_long:
            return f"longrope: short factors, for texts of {original} tokens at most"
        return (
            f"longrope: long factors, also for short texts; with scheduler.max_seq_len up to {original} the short ones "
            "would count"
        )

    @property
    def is_ordinary(self) -> bool:
        """Whether all numbers are of a size for which every step to every angle is finite in float32, and divides by
        nothing that is near 0. It holds for every model that is known; where it does not, the angles may be finite all
        the same."""
        stretches = (
            *(self.factor, self.low_freq_factor, self.high_freq_factor, self.beta_fast, self.beta_slow),
            *(*self.short_factors, *self.long_factors),
        )
        return (
            _LEAST_THETA <= self.theta <= _MOST_THETA
            and all(1 / _MOST <= number <= _MOST for number in stretches)
            and 0 <= self.original_max_position_embeddings <= _MOST * _MOST
            and (self.rope_type != "yarn" or self.original_max_position_embeddings > 0)
            and (self.rope_type != "llama3" or abs(self.high_freq_factor - self.low_freq_factor) >= 1 / _MOST)
        )


NO_ROTATION = RopeConfig("none")
"""For layers that know no position: kernels turn by angles of 0, which leaves every bit as it is."""


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Default multiplier of cosines and sines for "yarn" (section 3.4; with mscale as DeepSeek's configs write it)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def order_of_rotated(rotated: int, head_dim: int, interleaved: bool = False) -> tuple[range, ...]:
    """Parts of a head in the order in which ranks hold it where only its first numbers are rotated, or neighbours
    together. Kernels turn the numbers i and i + head_dim / 2 together: these are i and i + rotated / 2 of the files, or
    2 * i and 2 * i + 1 where they are `interleaved`, then the ones that are turned by nothing. Scores stay as they are,
    because queries and keys are held alike."""
    half, rest = rotated // 2, (head_dim - rotated) // 2
    behind = range(rotated, rotated + rest), range(rotated + rest, head_dim)
    if interleaved:
        first, second = ([range(at, at + 1) for at in range(start, rotated, 2)] for start in (0, 1))
        return *first, behind[0], *second, behind[1]
    return range(half), behind[0], range(half, rotated), behind[1]


def longrope_attention_factor(factor: float, original: int) -> float:
    """Default multiplier of cosines and sines for "longrope" (section 3.3)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
