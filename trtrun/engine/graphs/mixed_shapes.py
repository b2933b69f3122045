"""Which rounds of rows and prompts together have graphs: so few that a start captures all of them.

Weights are read once for both, and the host launches once: of an 8B model on an H200, a token for each of 118 rows and
a prompt of 250 took 13.5 ms as two graphs, 10.8 as one. Where rows alone have many tokens they take the device as long
as their arithmetic does, and nothing is saved.

It knows numbers. It does not know graphs, tensors or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
        """Of both, padding counted."""
        return self.rows * self.queries + self.tiles * self.width

    @property
    def lines(self) -> int:
        """Lines of logits: of all queries of rows, and after the last of each tile."""
        return self.rows * self.queries + self.tiles

    @property
    def table_numbers(self) -> int:
        """Of all block tables."""
        return (self.rows + self.tiles) * self.blocks


class MixedShapes:
    """Those of one engine.

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
        """Of rounds as `GraphShapes` has them, of up to `max_tokens` tokens; none where prompts are no tiles, or where
        one row runs alone."""
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
        """That one of them holds."""

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
