"""How a model's positions become angles, in numbers alone: what config.json decides, and `rotary` computes from.

It computes no angle, and imports no torch: whoever only reads a configuration does without. It knows no config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST_THETA, _MOST_THETA = 1.01, 1e30
_MOST = 1e6
"""Beyond these bounds no model is known, and somewhere beyond them float32 ends."""


@dataclass(frozen=True)
class RopeConfig:
    """How angles depend on position.

    Attributes:
        rope_type: "default", "linear" (position interpolation, arXiv:2306.15595), "llama3" (Llama 3.1's rule), "yarn"
            (arXiv:2309.00071), or "none", which turns nothing.
        theta: base of the geometric series of wavelengths.
        factor: by how much the context is stretched; 1 for "default".
        original_max_position_embeddings: context of the pretraining, for "llama3" and "yarn".
        low_freq_factor, high_freq_factor: bounds of the smooth zone of "llama3".
        beta_fast, beta_slow, truncate: bounds of the ramp of "yarn".
        attention_factor: what cosines and sines are multiplied by ("yarn"), 1.0 otherwise.
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

    @property
    def is_ordinary(self) -> bool:
        """Whether all numbers are of a size for which every step to every angle is finite in float32, and divides by
        nothing that is near 0. It holds for every model that is known; where it does not, the angles may be finite all
        the same."""
        stretches = (self.factor, self.low_freq_factor, self.high_freq_factor, self.beta_fast, self.beta_slow)
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
