"""The target's logits behind one prompt's tokens, as chunks report them.

It knows counts and numbers. It does not know rows, rounds or who reads the numbers.
"""

from __future__ import annotations

import numpy as np

from trtrun.core.nouns import LogitsPart
from trtrun.core.outputs import Logits, join_logits


class PromptLogits:
    """What is there of them, and what is still to be computed. It outlives preemption.

    Attributes:
        num_reported: leading positions whose logits are there. Their keys and values may come from the cache; those of
            others must be computed, as only then there are logits.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        """Begin with none, of a prompt of so many tokens."""
        self._num_positions = num_prompt_tokens
        self._untold: Logits | None = None
        self.num_reported = 0

    @property
    def is_whole(self) -> bool:
        """Whether those of all positions are there."""
        return self.num_reported == self._num_positions

    def part_of(self, start: int, length: int) -> LogitsPart | None:
        """What a chunk that begins at `start` has to report; None for nothing."""
        first, end = max(start, self.num_reported), min(start + length, self._num_positions)
        return LogitsPart(first, end - first) if first < end else None

    def take(self, logits: np.ndarray) -> None:
        """Add those of the next positions, [positions, vocab] float32. They are copied."""
        self._untold = join_logits([self._untold, Logits(logits.shape[1], (logits.tobytes(),))])
        self.num_reported += len(logits)

    def take_new(self) -> Logits | None:
        """Those that came since the last call; None where none did."""
        found, self._untold = self._untold, None
        return found
