"""Tokens that a request treats unlike others, as arrays: what ends it, what has a bias, what must not be generated, and
what bounds its thoughts.

A request may name a vocabulary of tokens, and has `n` completions: the arrays are made once, travel once and are held
once, however many rows have them. Plain data. It knows no request, no model and no logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenSequences:
    """Sequences of token ids, one behind the other: they take as much as all of them are long.

    Attributes:
        tokens: [sum of lengths] int32.
        lengths: [sequences] int32, each at least 1.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> TokenSequences:
        """The sequences that are given, of which none is empty."""
        listed = list(sequences)
        lengths = np.fromiter(map(len, listed), np.int32, len(listed))
        return cls(np.fromiter(chain.from_iterable(listed), np.int32, int(lengths.sum())), lengths)

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """[sequences] int64: where each begins in `tokens`."""
        starts: np.ndarray = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts

    def within(self, longest: int, vocabulary: int) -> TokenSequences:
        """The lists of at most `longest` tokens, all of them below `vocabulary`: no text can hold the others."""
        if not len(self):
            return self
        largest = np.maximum.reduceat(self.tokens, self.starts)
        kept = (self.lengths <= longest) & (largest < vocabulary)
        if kept.all():
            return self
        return TokenSequences(self.tokens[np.repeat(kept, self.lengths)], self.lengths[kept])


def _no_integers() -> np.ndarray:
    return np.empty(0, dtype=np.int32)


MOST_BLANKS = 4
"""Tokens in front of the mark that thoughts begin with."""


class ThoughtBounds(NamedTuple):
    """How many tokens the thoughts of a text may take.

    Attributes:
        budget: tokens, 0 or more, behind which the first of `ends` must stand.
        begins: what the output begins with where it begins with thoughts; none where it begins within them.
        ends: what ends thoughts; the first one is what must follow at the budget.
    """

    budget: int
    begins: TokenSequences
    ends: TokenSequences

    @property
    def lead(self) -> int:
        """Tokens among which the mark in front of thoughts has to stand; 0 where the output begins within them."""
        return MOST_BLANKS + int(self.begins.lengths.max()) if len(self.begins) else 0

    def may_be_due(self, first: int, last: int) -> bool:
        """Whether a token of the mark may have to stand at one of the places `first` to `last` of an output, whatever
        the output is."""
        return self.budget + (self.lead > 0) <= last and first < self.lead + self.budget + int(self.ends.lengths[0])

    def arrays(self) -> list[np.ndarray]:
        """All of it, as integers: the budget [1], and of begins and ends the lengths and the tokens."""
        both = (self.begins.lengths, self.begins.tokens, self.ends.lengths, self.ends.tokens)
        return [np.array([self.budget], dtype=np.int64), *both]

    @classmethod
    def of_arrays(cls, budget: np.ndarray, *both: np.ndarray) -> ThoughtBounds:
        """What `arrays` gave."""
        lengths, tokens, end_lengths, end_tokens = (array.astype(np.int32) for array in both)
        return cls(int(budget[0]), TokenSequences(tokens, lengths), TokenSequences(end_tokens, end_lengths))


@dataclass(frozen=True, eq=False)
class TokenLists:
    """The lists of one request.

    Attributes:
        stop_ids: [stops] int32, ascending: tokens that may not be chosen until min_tokens are out.
        bias_ids: [biases] int32, each once.
        bias_values: [biases] float64: what is added to the logits of `bias_ids`.
        bad_words: sequences that must not be generated.
        thoughts: how many tokens these may take, and what ends them; None where nothing bounds them.
    """

    stop_ids: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    bad_words: TokenSequences
    thoughts: ThoughtBounds | None = None

    @classmethod
    def of(
        cls,
        stop_ids: Iterable[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        bad_words: TokenSequences | Iterable[Sequence[int]] = (),
        thoughts: ThoughtBounds | None = None,
    ) -> TokenLists:
        """The lists of what is given."""
        bias = logit_bias or {}
        return cls(
            stop_ids=np.array(sorted(set(stop_ids)), dtype=np.int32),
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float64, len(bias)),
            bad_words=bad_words if isinstance(bad_words, TokenSequences) else TokenSequences.of(bad_words),
            thoughts=thoughts,
        )

    @cached_property
    def is_empty(self) -> bool:
        """Whether there is nothing in any of them."""
        return not (len(self.stop_ids) or len(self.bias_ids) or len(self.bad_words) or self.thoughts)

    @cached_property
    def digest(self) -> bytes:
        """A hash that lists of the same tokens and values share, and no others."""
        found = hashlib.blake2b(digest_size=16)
        arrays = [self.stop_ids, self.bias_ids, self.bias_values, self.bad_words.lengths, self.bad_words.tokens]
        if self.thoughts is not None:
            arrays += self.thoughts.arrays()
        for array in arrays:
            found.update(len(array).to_bytes(8, "little"))
            found.update(array.tobytes())
        return found.digest()


NO_LISTS = TokenLists(_no_integers(), _no_integers(), np.empty(0), TokenSequences(_no_integers(), _no_integers()))
"""Of a request that names no tokens."""
