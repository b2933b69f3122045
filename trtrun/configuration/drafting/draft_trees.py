"""Shapes of draft trees, by the options of the methods that have them: choices, dynamic trees, lookahead windows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from trtrun.errors import nearest, shorten


@dataclass(frozen=True)
class DynamicTree:
    """Bounds of a dynamic draft tree.

    Attributes:
        top_k: nodes of each depth that are continued, and continuations of each that are looked at; 2 or more.
        most_nodes: that are kept of all.
        most_depth: of the tree that has so many.
    """

    top_k: int
    most_nodes: int
    most_depth: int

    def num_candidates(self, depth: int) -> int:
        """Nodes that are met on the way to a tree so deep."""
        return self.top_k + (depth - 1) * self.top_k**2

    def num_nodes(self, depth: int) -> int:
        """Nodes of a tree so deep, always as many: of a tree that pacing has made less deep as many for each depth."""
        return min(-(-self.most_nodes * depth // self.most_depth), self.num_candidates(depth))

    def num_paths(self, depth: int) -> int:
        """Paths from the root to a leaf, at most: that many nodes need some that are continued, which are no leaves."""
        nodes = self.num_nodes(depth)
        return nodes - (-(-nodes // self.top_k) - 1)


Choice = tuple[int, ...]

MOST_NODES = 128
"""Of a tree: a target verifies one token more than that of each row. Beyond about a hundred tokens a round is no longer
free even of one row, and the reference's trees have 63."""

MOST_RANKS = 64
"""Tokens of one head that may stand in a tree. The reference's trees have ten."""

MOST_DEPTH = 32

_SETS = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 "
        "004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 "
        "16 070"
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 "
        "020 011 004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 "
        "7 030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 "
        "050 31 0020 70 14"
    ),
    "vicuna_13b_stage1": (
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 "
        "004 13 011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 "
        "23 16"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 "
        "0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 "
        "013 102 0011 300 1000"
    ),
    "vicuna_33b_stage1": (
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 "
        "14 60 020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 "
        "030 005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 "
        "009 31 102 22"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 "
        "011 004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 "
        "0010 41 23"
    ),
}
"""By name, a word for each path and a digit for each rank, in the order of the source."""

_EAGLE_SETS = {
    "mc_sim_7b_63": ("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
}
"""Those of EAGLE, of which one has the name of another one of Medusa's."""


@dataclass(frozen=True)
class ChoiceTree:
    """A draft tree whose shape is known before anything runs.

    Attributes:
        nodes: by depth, and of one depth by ranks; so a prefix of the nodes is a shallower tree.
    """

    nodes: tuple[Choice, ...]

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> ChoiceTree:
        """A tree of `choices`, in any order."""
        return cls(tuple(sorted(choices, key=lambda choice: (len(choice), choice))))

    @classmethod
    def chain(cls, depth: int) -> ChoiceTree:
        """The likeliest token of each head."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.nodes[-1])

    @property
    def num_ranks(self) -> int:
        """Tokens that are wanted of a head, at most."""
        return 1 + max(max(node) for node in self.nodes)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """From the root to each leaf the places of the nodes in `nodes`, the path of the smallest ranks first."""
        places = {node: place for place, node in enumerate(self.nodes)}
        inner = {node[:-1] for node in self.nodes}
        leaves = sorted(node for node in self.nodes if node not in inner)
        return tuple(tuple(places[leaf[:end]] for end in range(1, len(leaf) + 1)) for leaf in leaves)

    @property
    def most_continued(self) -> int:
        """Nodes of one depth that have others behind them, at most."""
        inner = Counter(len(node) for node in {node[:-1] for node in self.nodes} if node)
        return max(inner.values(), default=0)

    @cache  # noqa: B019 (trees are few, and kept by the configuration)
    def cut(self, depth: int) -> ChoiceTree:
        """The tree without what is deeper."""
        return ChoiceTree(tuple(node for node in self.nodes if len(node) <= depth))


def named_choices() -> list[str]:
    """Names of the known trees."""
    return list(_SETS)


def read_choices(value: object, sets: Mapping[str, str] = _SETS) -> tuple[Choice, ...]:
    """The paths of a tree, from a list of them or the name of a known one.

    Raises:
        ValueError: there is no such name, or the list is no tree.
    """
    if isinstance(value, str):
        if value not in sets:
            raise ValueError(f"there is no tree {shorten(value)}{nearest(value, sets)}")
        return tuple(tuple(map(int, word)) for word in sets[value].split())
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"must be a list of paths of ranks, such as [[0], [1], [0, 0]], or a tree's name, not {shorten(value)}"
        )
    if len(value) > MOST_NODES:
        raise ValueError(f"has {len(value)} paths, each a token to verify of every row: give {MOST_NODES} at most")
    choices = [_read_choice(path) for path in value]
    known = set(choices)
    for choice in choices:
        if len(choice) > 1 and choice[:-1] not in known:
            raise ValueError(f"has {list(choice)} without {list(choice[:-1])}, which it goes through: add that")
    twice = next((choice for place, choice in enumerate(choices) if choice in choices[:place]), None)
    if twice is not None:
        raise ValueError(f"has {list(twice)} twice: leave one of them out")
    return tuple(choices)


def read_eagle_choices(value: object) -> tuple[Choice, ...]:
    """`read_choices` with EAGLE's names."""
    return read_choices(value, _EAGLE_SETS)


def _read_choice(path: object) -> Choice:
    if not isinstance(path, list | tuple) or not path:
        raise ValueError(f"must be a list of paths of ranks, such as [[0], [1], [0, 0]]; {shorten(path)} is no path")
    for rank in path:
        if type(rank) is not int or not 0 <= rank < MOST_RANKS:
            raise ValueError(
                f"has the path {shorten(list(path))}, but ranks are whole numbers from 0, the likeliest, to "
                f"{MOST_RANKS - 1}"
            )
    if len(path) > MOST_DEPTH:
        raise ValueError(f"has a path of {len(path)} ranks: {MOST_DEPTH} at most follow one another")
    return tuple(path)


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
        """Depth of the deepest node: the last level of the last column, or the end of an n-gram."""
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
        """Nodes of window and n-grams together."""
        return self.num_window_nodes + self.sizes.verified * self.followed

    def node_index(self, column: int, level: int) -> int:
        """The index of a guess among the nodes; -1 for the row's newest token."""
        return column * (self.sizes.ngram - 1) + level - 1

    @cached_property
    def paths(self) -> list[list[int]]:
        """Nodes along each path from the root to a leaf."""
        levels, found = range(1, self.sizes.ngram - 1), []
        # With one level the columns are one path.
        for column in range(self.columns) if levels else range(self.columns - 1, self.columns):
            first = [self.node_index(before, 0) for before in range(1, column + 1)]
            found.append(first + [self.node_index(column, level) for level in levels])
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


_RIGHT = (0.39, 0.083, 0.044, 0.033, 0.019, 0.018, 0.014, 0.009)
"""How often the successor of each rank was right where its parent was, as measured on the shipped target, half of it
greedy and half at temperature 0.7."""


def _chance(rank: int) -> float:
    """Ranks behind those that were measured fall on as the last ones do."""
    return _RIGHT[rank] if rank < len(_RIGHT) else _RIGHT[-1] * len(_RIGHT) / (rank + 1)


@cache
def recycling_tree(depth: int, num_ranks: int, num_nodes: int) -> ChoiceTree:
    """The tree of the likeliest nodes, one path of which is `depth` deep.

    Args:
        depth: of the deepest node.
        num_ranks: successors of a token that there are.
        num_nodes: at least `depth`; fewer where there are no more.
    """
    nodes = {(0,) * length for length in range(1, depth + 1)}
    waiting: list[tuple[float, tuple[int, ...]]] = [(-_chance(rank), (rank,)) for rank in range(num_ranks)]
    heapq.heapify(waiting)
    while waiting and len(nodes) < num_nodes:
        chance, node = heapq.heappop(waiting)
        nodes.add(node)
        if len(node) < depth:
            for rank in range(num_ranks):
                heapq.heappush(waiting, (chance * _chance(rank), (*node, rank)))
    return ChoiceTree.of(sorted(nodes))
