"""Which shapes of forwards have graphs: so few that a start captures all of them, and no round has to wait for one.

A forward of another shape runs through the smallest graph that holds it. Rows, queries and blocks that a graph has
beside the forward's are padding, which costs time and changes no bit. So numbers of rows are powers of two; queries are
as few kinds as waste little; and there are two or three widths of block tables, as attention on a GPU takes hardly
longer for a table that is wider than a row's context.

Rows and prompts together have graphs, too. Weights are read once for both, and the host launches once: of an 8B model
on an H200, a token for each of 118 rows and a prompt of 250 took 13.5 ms as two graphs, 10.8 as one. Where rows alone
have many tokens they take the device as long as their arithmetic does, and nothing is saved.

It knows numbers. It does not know graphs, tensors or rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from trtrun.kvcache.tile_widths import padded_width

_ROWS = (256, 128, 32, 8)
"""Numbers of rows beside the most that there are: padding of few rows costs little beside a prompt."""

_MOST_ROW_TOKENS = 256
"""Tokens of rows, padding counted, that have a graph together with prompts."""

_WASTED_ROW_TOKENS = 64
"""Tokens of padding, of all rows, that a graph of more queries may cost at most."""

_PROMPT_TOKENS = (128, 256, 384, 512)
"""Tokens of prompts, padding counted. What is more goes through a graph of its own before (graph_shapes.py). Of an 8B
model on an H200, 126 rows beside a prompt of 317 take 14.9 ms in a graph for 384, and 17.9 in one for 512; graphs for
64 and 192, too, save 1 ms of rounds that fit them, which are few in a mixed load."""

_LONGEST_CONTEXT = 8192
"""Contexts of more tokens have no such graph."""


class MixedShape(NamedTuple):
    """`rows` rows of `queries` queries each, and `tiles` tiles of prompts, of `width` queries each; their block tables
    have `blocks` columns."""

    rows: int
    queries: int
    tiles: int
    width: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Tokens of both, padding counted."""
        return self.rows * self.queries + self.tiles * self.width

    @property
    def lines(self) -> int:
        """Lines of logits: of all queries of rows, and after the last of each tile."""
        return self.rows * self.queries + self.tiles

    @property
    def table_numbers(self) -> int:
        """Numbers of all block tables."""
        return (self.rows + self.tiles) * self.blocks


class MixedShapes:
    """The shapes of rows and prompts together of one engine.

    Attributes:
        most_context: tokens of the longest context that has such a graph.
    """

    def __init__(
        self,
        max_rows: int,
        most_queries: int,
        max_blocks: int,
        block_size: int,
        prompt_width: int | None,
        max_tokens: int,
    ) -> None:
        """Find the shapes of rounds as `GraphShapes` has them, of up to `max_tokens` tokens; none where prompts are no
        tiles, or where one row runs alone."""
        self._width = (prompt_width or 0) if max_rows > 1 else 0
        self.most_context = min(_LONGEST_CONTEXT, max_blocks * block_size)
        blocks = min(-(-_LONGEST_CONTEXT // block_size), max_blocks)
        found = (
            [
                MixedShape(rows, queries, tiles, self._width, blocks)
                for rows in sorted({max_rows, *(rows for rows in _ROWS if rows < max_rows)})
                for queries in _numbers_of_queries(rows, most_queries)
                for tiles in sorted({tokens // self._width for tokens in _PROMPT_TOKENS if tokens >= self._width})
            ]
            if self._width
            else []
        )
        self.all: Sequence[MixedShape] = sorted(
            (shape for shape in found if shape.tokens <= max_tokens), key=lambda shape: shape.tokens, reverse=True
        )
        """The largest first: smaller ones find the memory of the pool there."""
        self.most_tiles = max((shape.tiles for shape in self.all), default=1)
        """The most tiles that one of them holds."""

    def holding(self, rows: int, queries: int, tiles: int, context: int) -> MixedShape | None:
        """The one of fewest tokens that holds so many rows, queries of each, and tiles, with contexts of up to
        `context` tokens; None where there is none."""
        if context > self.most_context:
            return None
        holds = [one for one in self.all if rows <= one.rows and queries <= one.queries and tiles <= one.tiles]
        return min(holds, key=lambda shape: shape.tokens, default=None)


def _numbers_of_queries(rows: int, most: int) -> list[int]:
    """Numbers of queries of `rows` rows, the fewest that waste little; none where even one is too many."""
    kept = [min(most, _MOST_ROW_TOKENS // rows)]
    for queries in range(kept[0] - 1, 0, -1):
        if rows * (kept[-1] - queries) > _WASTED_ROW_TOKENS:
            kept.append(queries)
    return [queries for queries in kept if queries]


MOST_PROMPT_TOKENS = 512
"""Tokens of prompts, padding counted, that are computed through one graph."""

MOST_PARTS = 2
"""Such graphs for the prompts of a round, one after the other. With more tokens the device has enough to do while the
host launches."""

SHARED_CONTEXT = 256
"""Contexts of up to so many tokens share a graph: attention does not split them, however wide the table."""

_MIDDLE_CONTEXT = 8192
_FEW_ROWS = 16
"""Rows up to which attention splits contexts, and has results of shares for tables of any width: so many rows have
graphs of this context, too, where there are contexts of more than twice as many tokens."""

_WASTED_TOKENS = 32
"""Queries of padding, of all rows, that a graph of more queries may cost at most. Fewer than about a hundred tokens
take a GPU the time in which it reads the weights."""

_NARROWEST_TILE = 16
"""Queries of a tile of prompts in a graph, at least: few widths make few graphs."""

MOST_FED = 32
"""Tokens of a row that catching up feeds at once; of more it feeds so many at a time."""

_CATCH_UP_STEP = 4
_WIDE_CATCH_UP = 8
"""Widths of catching up are twice the powers of it; beyond this one there are graphs of few rows alone, as more have
enough to do while the host launches."""


class PromptShape(NamedTuple):
    """Prompts of one graph: `tiles` tiles of `width` queries, whose contexts are more than `start` tokens."""

    tiles: int
    width: int
    start: int


class GraphShapes:
    """The shapes of one engine's graphs.

    Attributes:
        mixed: of rows and prompts together.
    """

    def __init__(
        self,
        max_rows: int,
        most_queries: int,
        max_blocks: int,
        block_size: int,
        prompt_width: int | None = None,
        most_masked: int = 0,
        max_mixed_tokens: int | None = None,
    ) -> None:
        """Find the shapes of rounds of up to `max_rows` rows, with up to `most_queries` queries each that get logits,
        block tables of up to `max_blocks` blocks of `block_size` tokens, and prompts that are cut into tiles of
        `prompt_width` queries; of none where each prompt is one row. Where drafts are made in parallel, of up to
        `most_masked` tokens. Rows and prompts together have up to `max_mixed_tokens` tokens, or no graphs where that is
        None."""
        width = None if max_mixed_tokens is None else prompt_width
        self.mixed = MixedShapes(max_rows, most_queries, max_blocks, block_size, width, max_mixed_tokens or 0)
        self._max_rows = max_rows
        self._most_queries = most_queries
        self._most_masked = most_masked
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._prompt_width = prompt_width
        self.queries = cache(self._queries)

    @property
    def drafts_in_parallel(self) -> bool:
        """Whether all tokens of a draft come from one forward, so that none comes from a step."""
        return self._most_masked > 0

    def rows(self, rows: int) -> int:
        """The rows of the graph for `rows` of them, or for as many tiles of prompts, which may be more."""
        bucket = 1 << (rows - 1).bit_length()
        return bucket if rows > self._max_rows else min(bucket, self._max_rows)

    def numbers_of_rows(self) -> list[int]:
        """All of them, the largest first: graphs of fewer rows then find the memory of those of more."""
        return sorted({min(1 << power, self._max_rows) for power in range(self._max_rows.bit_length() + 1)})[::-1]

    def _queries(self, rows: int, queries: int) -> int:
        """The queries of the graph for `queries` of each of as many rows as its own `rows`, all with logits."""
        return min((kept for kept in self.numbers_of_queries(rows) if kept >= queries), default=queries)

    def numbers_of_queries(self, rows: int) -> list[int]:
        """Numbers of queries of graphs of `rows` rows, the largest first: one query, and the fewest others that waste
        little."""
        return _few(self._most_queries, rows)

    def masked(self, rows: int, count: int, draft_len: int) -> tuple[int, int] | None:
        """The graph that feeds as many rows as its own `rows` up to `count` tokens each that they lack, and drafts
        `draft_len` tokens, 2 or more, behind them in the same forward: tokens that it feeds, and drafts. None where
        there is none for so many tokens."""
        if count > self._most_masked + 1:
            return None
        drafts = min(kept for kept in self._numbers_of_drafts(rows) if kept >= draft_len)
        return (drafts + 1 if count <= drafts + 1 else self._most_masked + 1), drafts

    def all_masked(self, rows: int) -> list[tuple[int, int]]:
        """All that `masked` answers for `rows` rows, the largest first; none where drafts are made step by step."""
        drafts = self._numbers_of_drafts(rows)
        return sorted({(count, kept) for kept in drafts for count in (self._most_masked + 1, kept + 1)}, key=sum)[::-1]

    def _numbers_of_drafts(self, rows: int) -> list[int]:
        """Numbers of drafted tokens, of more than one, which takes no mask."""
        return [drafts for drafts in _few(self._most_masked, rows) if drafts > 1]

    def blocks_of(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self._block_size)

    def blocks(self, blocks: int, rows: int) -> int:
        """The width of block tables of `rows` rows whose contexts take up to `blocks` blocks."""
        return min(width for width in self.widths(rows) if width >= min(blocks, self._max_blocks))

    def widths(self, rows: int) -> list[int]:
        """Widths of block tables of `rows` rows, the narrowest first."""
        contexts = [SHARED_CONTEXT]
        if rows <= _FEW_ROWS and self._max_blocks * self._block_size > 2 * _MIDDLE_CONTEXT:
            contexts.append(_MIDDLE_CONTEXT)
        widths = {min(-(-context // self._block_size), self._max_blocks) for context in contexts}
        return sorted({*widths, self._max_blocks})

    def prompt_blocks(self, blocks: int) -> int:
        """The width of block tables of prompts whose contexts take up to `blocks` blocks."""
        return next(width for width in self.prompt_widths() if width >= min(blocks, self._max_blocks))

    def prompt_widths(self) -> list[int]:
        """Widths of block tables of prompts, the narrowest first."""
        return sorted({min(-(-SHARED_CONTEXT // self._block_size), self._max_blocks), self._max_blocks})

    @property
    def narrowest_tile(self) -> int:
        """Queries of a tile of prompts, at least: `_NARROWEST_TILE`, or what the kernel takes where that is less."""
        return min(_NARROWEST_TILE, self._prompt_width or _NARROWEST_TILE)

    def tile_width(self, longest: int, blocks: int) -> int:
        """Queries of the tiles of prompts whose longest chunk has `longest` tokens, by the width of their tables: with
        long contexts there are graphs of the widest alone."""
        assert self._prompt_width is not None
        if blocks > self.prompt_widths()[0]:
            return self._prompt_width
        return max(self.narrowest_tile, padded_width(longest, self._prompt_width))

    def prompt_shapes(self) -> list[PromptShape]:
        """What prompts that are computed through graphs are like, one for each graph, the largest first; none where
        prompts are no tiles."""
        if self._prompt_width is None:
            return []
        found = []
        for index, blocks in enumerate(self.prompt_widths()):
            widths = {self.tile_width(length, blocks) for length in range(1, self._prompt_width + 1)}
            start = self.prompt_widths()[index - 1] * self._block_size if index else 0
            for width in widths:
                found += [PromptShape(tiles, width, start) for tiles in self.numbers_of_tiles(width)]
        return sorted(found, key=lambda shape: shape.tiles * shape.width, reverse=True)

    def takes_prompts(self, tiles: int, width: int) -> bool:
        """Whether so many tiles of prompts, of `width` queries each, are computed through a graph."""
        return self.rows(tiles) * width <= MOST_PROMPT_TOKENS

    def parts_of_tiles(self, tiles: int, width: int) -> list[slice] | None:
        """Which of so many tiles of `width` queries each are computed through one graph, in order; None where they are
        too many for graphs."""
        if self.takes_prompts(tiles, width):
            return [slice(0, tiles)]
        whole = max(self.numbers_of_tiles(width), default=0)
        if tiles > whole * MOST_PARTS:
            return None
        return [slice(first, min(first + whole, tiles)) for first in range(0, tiles, whole)]

    def numbers_of_tiles(self, width: int) -> list[int]:
        """The numbers of tiles of `width` queries that have graphs of their own, the largest first."""
        taken = [tiles for tiles in range(1, MOST_PROMPT_TOKENS // width + 1) if self.takes_prompts(tiles, width)]
        return sorted({self.rows(tiles) for tiles in taken}, reverse=True)


def _few(most: int, rows: int) -> list[int]:
    """Numbers of queries of `rows` rows, from `most` down to 1, the fewest that waste little."""
    kept = [most]
    for queries in range(most - 1, 0, -1):
        if queries == 1 or rows * (kept[-1] - queries) > _WASTED_TOKENS:
            kept.append(queries)
    return kept


def catches_up(rows: int, width: int) -> bool:
    """Whether there are graphs that feed so many rows `width` tokens each."""
    return width <= _WIDE_CATCH_UP or rows <= _FEW_ROWS


def catch_up_width(count: int) -> int:
    """Queries of the graph that feeds rows up to `count` tokens that they lack."""
    width = 2
    while width < count:
        width *= _CATCH_UP_STEP
    return width
