"""Which forwards a start runs so that every graph that rounds may need is there, or where there are none every kernel,
as numbers: `warm_up` runs them, and `trtrun plan` counts the graphs that they make.

It knows shapes of graphs. It does not know engines, tensors or devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trtrun.engine.graphs.graph_shapes import MOST_FED, GraphShapes, PromptShape, catch_up_width, catches_up

_SHORT_TREES = 6
"""Trees of up to so many tokens, one behind the other, have graphs of all lengths: pacing asks for any, and the last
rounds of a text for few."""


_FEW_TOKENS = 2048
"""Tokens of several prompts together, where each size is run: what more would need has been needed by one long
prompt."""

MOST_TREE_ROWS = 16
"""Heads draw up trees of so many rows as one graph: those of more keep a device busy while the host launches."""


class Verification(NamedTuple):
    """Rows that each verify a draft of `length` tokens (of every path of a tree), with tables of `blocks` columns."""

    rows: int
    length: int
    blocks: int


class Mixed(NamedTuple):
    """Rows that each verify a draft of `length` tokens beside chunks of prompts, of a row each, that have `lengths`
    tokens."""

    rows: int
    length: int
    lengths: list[int]


class Steps(NamedTuple):
    """Rows that are fed what they lack, in each of `widths`, and a token, with tables of `blocks` columns; or where
    drafts are made in parallel, what they lack and masks, as `GraphShapes.masked` tells them."""

    rows: int
    blocks: int
    widths: list[int]
    masked: list[tuple[int, int]]


class Prompts(NamedTuple):
    """Chunks of prompts, of a row each, that begin at position `start` and have `lengths` tokens."""

    start: int
    lengths: list[int]


@dataclass(frozen=True)
class StartLimits:
    """What bounds the forwards of a start.

    Attributes:
        max_tokens: of a round: no forward is larger than those that memory was set aside for.
        max_rows: of a round.
        longest: tokens of a request.
    """

    max_tokens: int
    max_rows: int
    longest: int

    def doubled_rows(self, of_row: int) -> list[int]:
        """Numbers of rows of which each has `of_row` tokens, each twice the one before, and the most: kernels that are
        chosen by how much there is are all among theirs."""
        most = min(self.max_rows, self.max_tokens // of_row)
        return _doubled(most) if most else []

    def doubled_prompts(self) -> Iterator[Prompts]:
        """Prompts of each number of tokens that is twice another's, in each such number of rows that has few of them,
        alone and at the end of a long context."""
        for length in _doubled(min(self.longest, self.max_tokens)):
            for rows in self.doubled_rows(length):
                if rows == 1 or rows * length <= _FEW_TOKENS:
                    yield from (Prompts(start, [length] * rows) for start in sorted({0, self.longest - length}))

    def first_prompt(self) -> Prompts:
        """A short one, which runs whether there are graphs or not."""
        return Prompts(0, [min(2, self.longest, self.max_tokens)])

    def prompts(self, shapes: GraphShapes) -> Iterator[Prompts]:
        """The fewest tokens that run through each graph that computes any, the largest graph first: smaller ones find
        the memory of the pool there. Where those are too many, no round needs the graph."""
        found = shapes.prompt_shapes()
        widest = max((shape.width for shape in found), default=0)
        for shape in found:
            tiles = next(tiles for tiles in range(1, shape.tiles + 1) if shapes.rows(tiles) == shape.tiles)
            # A row has several tiles only of the widest: a longer chunk is cut into wider ones where there are any.
            if shape.width < widest and tiles > self.max_rows:
                continue
            lengths = [(count - 1) * shape.width + 1 for count in self._dealt(tiles)]
            lengths[0] = max(lengths[0], self._fewest_of(shapes, shape))
            if sum(lengths) <= self.max_tokens and shape.start + lengths[0] <= self.longest:
                yield Prompts(shape.start, lengths)

    def _fewest_of(self, shapes: GraphShapes, shape: PromptShape) -> int:
        """Tokens of a chunk that is cut into tiles as wide as those of `shape`, at least."""
        blocks = shapes.prompt_blocks(shapes.blocks_of(shape.start + 1))
        return next(length for length in range(1, shape.width + 1) if shapes.tile_width(length, blocks) == shape.width)

    def mixed(self, shapes: GraphShapes) -> Iterator[Mixed]:
        """Forwards of each graph of rows and prompts together, the largest first."""
        longest = min(self.longest, shapes.mixed.most_context)
        for shape in shapes.mixed.all:
            lengths = [min(shape.width * count, longest) for count in self._dealt(shape.tiles)]
            tiles = sum(-(-length // shape.width) for length in lengths)
            if shapes.mixed.holding(shape.rows, shape.queries, tiles, longest) == shape:
                yield Mixed(shape.rows, shape.queries - 1, lengths)

    def _dealt(self, tiles: int) -> list[int]:
        """Tiles of each row where so many are dealt out to all rows."""
        rows = min(tiles, self.max_rows)
        return [len(range(row, tiles, rows)) for row in range(rows)]

    def verifications(
        self, shapes: GraphShapes, draft_lens: Collection[int], *, has_trees: bool
    ) -> Iterator[Verification]:
        """Chains of each number of tokens, or rows without any and trees of `draft_lens`, and of fewer tokens."""
        most = min(max(draft_lens, default=0), _SHORT_TREES)
        of_trees = sorted({*range(most + 1), *draft_lens}, reverse=True)
        for rows in shapes.numbers_of_rows():
            of_chains = [queries - 1 for queries in shapes.numbers_of_queries(rows)]
            for length in of_trees if has_trees else of_chains:
                if rows == 1 or rows * (length + 1) <= self.max_tokens:
                    for blocks in shapes.widths(rows):
                        yield Verification(rows, length, blocks)


def _doubled(most: int) -> list[int]:
    """1, 2, 4 and so on below `most`, and this."""
    return [*(1 << place for place in range((most - 1).bit_length())), most]


def draft_steps(shapes: GraphShapes, most_catch_up: int) -> Iterator[Steps]:
    """What rows lack, up to `most_catch_up` tokens, and a step."""
    widths = {catch_up_width(count) for count in range(2, min(most_catch_up, MOST_FED) + 1)}
    for rows in shapes.numbers_of_rows():
        for blocks in shapes.widths(rows):
            of_rows = sorted((width for width in widths if catches_up(rows, width)), reverse=True)
            yield Steps(rows, blocks, of_rows, shapes.all_masked(rows))


class _Graph(NamedTuple):
    """What tells graphs of a start apart: `kind` 0 are forwards with logits behind each row's last token alone, -1
    those with logits of all tokens, less than that those with logits behind as many of the last, and one; the others
    steps that choose."""

    rows: int
    queries: int
    blocks: int
    kind: int = 0


_ALL_LOGITS = -1


def count_target_graphs(
    shapes: GraphShapes, limits: StartLimits, draft_lens: Collection[int], *, has_trees: bool
) -> int:
    """Graphs that a start captures of a target engine; see `warm_up`."""
    graphs = set(_prompt_graphs(shapes, limits))
    for rows, length, blocks in limits.verifications(shapes, draft_lens, has_trees=has_trees):
        graphs.add(_Graph(rows, length + 1, blocks, _ALL_LOGITS))
    return len(graphs) + len(list(limits.mixed(shapes)))


def count_draft_graphs(shapes: GraphShapes, limits: StartLimits, most_catch_up: int, num_kinds: int) -> int:
    """Graphs that a start captures of a draft engine; see `warm_up`. Steps of guesses are among those of its rows.

    Args:
        shapes: of its graphs, rows for guesses among their rows.
        limits: of the start.
        most_catch_up: tokens of a row that it feeds after rounds that it sat out, at most.
        num_kinds: ways to choose of which a step has a graph each.
    """
    graphs = set(_prompt_graphs(shapes, limits))
    for rows, blocks, widths, masked in draft_steps(shapes, most_catch_up):
        graphs |= {_Graph(rows, width, blocks) for width in widths}
        graphs |= {_Graph(rows, count + drafts - 1, blocks, _ALL_LOGITS - drafts) for count, drafts in masked}
        if not shapes.drafts_in_parallel:
            graphs |= {_Graph(rows, 1, blocks, 1 + kind) for kind in range(num_kinds)}
    return len(graphs)


def count_head_graphs(shapes: GraphShapes, num_kinds: int, *, has_trees: bool) -> int:
    """Graphs that a start captures of heads that keep keys and values; see `HeadGraphs.warm_up`.

    Args:
        shapes: of the target's graphs.
        num_kinds: ways to choose of which the first token of a draft has a graph each, and a step.
        has_trees: whether drafts are trees, whose nodes are fed through one graph, and chosen without.
    """
    first, steps = (0, 1) if has_trees else (num_kinds, num_kinds)
    return sum(
        first + len(shapes.widths(rows)) * (len(shapes.numbers_of_queries(rows)) + steps)
        for rows in shapes.numbers_of_rows()
    )


def count_chain_graphs(shapes: GraphShapes, num_kinds: int) -> int:
    """Graphs that a start captures of heads that read what the target keeps; see `ChainGraphs.warm_up`.

    Args:
        shapes: of the target's graphs.
        num_kinds: ways to choose of which a step has a graph each.
    """
    return num_kinds * sum(len(shapes.widths(rows)) for rows in shapes.numbers_of_rows())


def tree_depths(most_depth: int) -> list[int]:
    """How deep trees are that heads draw up as one graph: of any short depth, as pacing asks for, and of the most."""
    return sorted({*range(1, min(most_depth, _SHORT_TREES) + 1), most_depth} - {0})


def count_tree_graphs(shapes: GraphShapes, most_depth: int) -> int:
    """Graphs that a start captures of trees that heads draw up."""
    rows = [count for count in shapes.numbers_of_rows() if count <= MOST_TREE_ROWS]
    return sum(len(shapes.widths(count)) for count in rows) * len(tree_depths(most_depth))


def _prompt_graphs(shapes: GraphShapes, limits: StartLimits) -> Iterator[_Graph]:
    if not shapes.prompt_shapes():
        return
    for start, lengths in (limits.first_prompt(), *limits.prompts(shapes)):
        blocks = shapes.prompt_blocks(shapes.blocks_of(start + max(lengths)))
        width = shapes.tile_width(max(lengths), blocks)
        tiles = sum(-(-length // width) for length in lengths)
        if shapes.takes_prompts(tiles, width):
            yield _Graph(shapes.rows(tiles), width, blocks)
