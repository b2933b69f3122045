"""Which rows and blocks of a draft engine belong to guesses. Numbers alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GuessSpace:
    """What of an engine belongs to guesses.

    Attributes:
        most_guesses: of a round.
        first_row: the first of as many rows of the engine.
        first_block: the first of as many times `blocks_per_guess` blocks of its store.
        blocks_per_guess: for the rest of the last block that a row shares, and a draft behind it.
    """

    most_guesses: int
    first_row: int
    first_block: int
    blocks_per_guess: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all guesses."""
        return self.most_guesses * self.blocks_per_guess

    def rows(self, count: int) -> list[int]:
        """The first `count` rows."""
        return list(range(self.first_row, self.first_row + count))

    def blocks(self, index: int) -> range:
        """The blocks of one guess."""
        first = self.first_block + index * self.blocks_per_guess
        return range(first, first + self.blocks_per_guess)
