"""What chunks report of one prompt's tokens: their log probabilities, and the target's logits behind them."""

from __future__ import annotations

import numpy as np

from trtrun.core.nouns import LogitsPart, ScoredPart
from trtrun.core.outputs import Logits, PromptLogprobs, join_logits


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
        """Logits that came since the last call; None where none did."""
        found, self._untold = self._untold, None
        return found


class PromptScores:
    """What is there of them, and what is still to be computed. It outlives preemption.

    Attributes:
        num_scored: leading positions whose numbers are there. Their keys and values may come from the cache; those of
            others must be computed, as only then there are logits.
    """

    def __init__(self, num_prompt_tokens: int, alternatives: int) -> None:
        """Begin with none, of a prompt of so many tokens: nothing is said of its first."""
        self._num_positions = num_prompt_tokens - 1
        self._alternatives = alternatives
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.num_scored = 0

    @property
    def is_whole(self) -> bool:
        """Whether all positions are scored."""
        return self.num_scored == self._num_positions

    def part_of(self, start: int, length: int) -> ScoredPart | None:
        """What a chunk that begins at `start` has to score; None for nothing."""
        first, end = max(start, self.num_scored), min(start + length, self._num_positions)
        return ScoredPart(first, end - first, self._alternatives) if first < end else None

    def take(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Add what the next positions' logits said, [positions, 1 + alternatives or more] each."""
        width = 1 + self._alternatives
        self._ids.append(ids[:, :width].astype(np.int32))
        self._values.append(values[:, :width].astype(np.float32))
        self.num_scored += len(ids)

    def whole(self) -> PromptLogprobs:
        """All of it."""
        ids, values = (b"".join(part.tobytes() for part in parts) for parts in (self._ids, self._values))
        return PromptLogprobs(1 + self._alternatives if not self._ids else self._ids[0].shape[1], ids, values)
