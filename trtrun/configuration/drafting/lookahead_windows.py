"""The sizes of lookahead decoding and the draft trees that they make: a window of guesses, and n-grams that may follow
(Fu et al. 2024, arXiv:2402.02057).

The window has W columns of N - 1 levels, levels one place apart: column j's level i guesses the token j + i places
behind the row's newest, which is level 0 of column 0. A guess sees the row, level 0 up to its column, and its own
column up to its level. So the window is a tree: level 0 is a path from the root, and from each of its nodes the rest of
a column hangs. The n-grams are G paths beside it. It knows numbers. It does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

LOOKAHEAD_ROUNDS_KEPT = 128
"""Rounds whose n-grams a row's pool has."""

LEAST_SIZES = (2, 2, 1)
MOST_SIZES = (32, 16, 32)


class LookaheadSizes(NamedTuple):
    """As TensorRT-LLM has them.

    Attributes:
        window: W, columns.
        ngram: N, tokens of an n-gram.
        verified: G, n-grams that are verified at once, the verification set.
    """

    window: int
    ngram: int
    verified: int

    @property
    def depth(self) -> int:
        """Of the deepest node: the last level of the last column, or the end of an n-gram."""
        return self.window + self.ngram - 3

    def lowered(self, own: Sequence[int]) -> LookaheadSizes:
        """A request's own where it has them, none of them more than these."""
        return LookaheadSizes(*map(min, own, self)) if own else self

    def tree(self, draft_len: int) -> LookaheadTree:
        """The nodes that are at most `draft_len` deep, 1 or more: columns that do not fit are left out whole."""
        return LookaheadTree(self, min(max(draft_len - self.ngram + 3, 0), self.window), min(self.ngram - 1, draft_len))


class _Tree(NamedTuple):
    sizes: LookaheadSizes
    columns: int
    followed: int


class LookaheadTree(_Tree):
    """The nodes of the draft of a row: first those of the window, column by column, then those of n-grams.

    Attributes:
        sizes: of the whole.
        columns: of the window that there are.
        followed: tokens of each n-gram behind the row's newest.
    """

    @property
    def num_window_nodes(self) -> int:
        """The row's newest token is none of them."""
        return max(0, self.columns * (self.sizes.ngram - 1) - 1)

    @property
    def num_nodes(self) -> int:
        """Of window and n-grams."""
        return self.num_window_nodes + self.sizes.verified * self.followed

    def place(self, column: int, level: int) -> int:
        """Of a guess among the nodes; -1 for the row's newest token."""
        return column * (self.sizes.ngram - 1) + level - 1

    @cached_property
    def paths(self) -> list[list[int]]:
        """Nodes along each path from the root to a leaf."""
        levels, found = range(1, self.sizes.ngram - 1), []
        # With one level the columns are one path.
        for column in range(self.columns) if levels else range(self.columns - 1, self.columns):
            first = [self.place(before, 0) for before in range(1, column + 1)]
            found.append(first + [self.place(column, level) for level in levels])
        starts = range(self.num_window_nodes, self.num_nodes, self.followed)
        return [path for path in found if path] + [list(range(start, start + self.followed)) for start in starts]


def read_sizes(value: object) -> LookaheadSizes:
    """[W, N, G] as TensorRT-LLM writes them.

    Raises:
        ValueError: it is something else, or out of bounds.
    """
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(one) is not int for one in value):
        raise ValueError("must be [window size, n-gram size, verification set size], such as [4, 3, 4]")
    numbers: Sequence[int] = value
    names = ("the window size", "the n-gram size", "the verification set size")
    for name, number, least, most in zip(names, numbers, LEAST_SIZES, MOST_SIZES, strict=True):
        if not least <= number <= most:
            raise ValueError(f"{name} is {number}: set it to {least} to {most}")
    return LookaheadSizes(*numbers)
