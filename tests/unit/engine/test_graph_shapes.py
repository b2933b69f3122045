"""Which shapes have graphs: few, each forward finds one that holds it, and padding stays within its bounds."""

from __future__ import annotations

import pytest

from trtrun.engine.graphs.graph_shapes import MOST_PROMPT_TOKENS, GraphShapes, MixedShapes, catch_up_width
from trtrun.engine.start_forwards import StartLimits

WASTED = 32


@pytest.mark.parametrize("max_rows", [1, 6, 64, 100])
@pytest.mark.parametrize("draft_len", [0, 1, 4, 10])
def test_every_round_finds_a_graph_that_holds_it(max_rows: int, draft_len: int) -> None:
    shapes = GraphShapes(max_rows, draft_len + 1, 100, 16)
    numbers = shapes.numbers_of_rows()
    assert numbers == sorted(set(numbers), reverse=True) and (numbers[0], numbers[-1]) == (max_rows, 1)
    for rows in range(1, max_rows + 1):
        bucket = shapes.rows(rows)
        assert bucket in numbers and rows <= bucket < 2 * rows
        kept = shapes.numbers_of_queries(bucket)
        for queries in range(1, draft_len + 2):
            found = shapes.queries(bucket, queries)
            assert found in kept and found >= queries
            assert bucket * (found - queries) <= WASTED
    assert shapes.numbers_of_queries(1)[-1] == 1


def test_plain_decoding_has_no_padding_and_many_rows_have_graphs_for_each_draft_len() -> None:
    shapes = GraphShapes(100, 5, 100, 16)
    assert all(shapes.queries(rows, 1) == 1 for rows in shapes.numbers_of_rows())
    assert shapes.numbers_of_queries(100) == [5, 4, 3, 2, 1]
    assert shapes.numbers_of_queries(32) == [5, 3, 1]
    assert shapes.numbers_of_queries(8) == [5, 1]


@pytest.mark.parametrize("max_blocks", [3, 16, 100, 1025, 8193])
def test_contexts_fall_into_two_or_three_widths(max_blocks: int) -> None:
    shapes = GraphShapes(64, 5, max_blocks, 16)
    for rows in (1, 16, 64):
        widths = shapes.widths(rows)
        assert widths == sorted(set(widths)) and widths[-1] == max_blocks and widths[0] == min(16, max_blocks)
        assert len(widths) <= (3 if rows < 64 and max_blocks > 1024 else 2)
        for blocks in range(1, max_blocks + 1):
            found = shapes.blocks(blocks, rows)
            assert found in widths and found >= blocks
            assert not any(blocks <= width < found for width in widths), "a narrower one holds it"
            prompts = shapes.prompt_blocks(blocks)
            assert prompts in shapes.prompt_widths() and prompts >= blocks
            assert not any(blocks <= width < prompts for width in shapes.prompt_widths())


@pytest.mark.parametrize("max_rows", [1, 6, 100])
@pytest.mark.parametrize("width", [16, 32])
def test_every_number_of_tiles_finds_a_graph(max_rows: int, width: int) -> None:
    """Of less than twice as many, as padding costs as much as tokens."""
    shapes = GraphShapes(max_rows, 5, 100, 16)
    for tiles in range(1, MOST_PROMPT_TOKENS // width + 1):
        if shapes.takes_prompts(tiles, width):
            found = shapes.rows(tiles)
            assert found in shapes.numbers_of_tiles(width)
            assert tiles <= found < 2 * tiles and found * width <= MOST_PROMPT_TOKENS


def test_rows_that_lack_tokens_are_fed_in_few_widths() -> None:
    assert [catch_up_width(count) for count in range(1, 10)] == [2, 2, 8, 8, 8, 8, 8, 8, 32]


@pytest.mark.parametrize(("draft_len", "lengths"), [(5, {0, 1, 2, 3, 4, 5}), (9, {0, 1, 2, 3, 4, 5, 6, 9})])
def test_short_trees_of_all_lengths_are_verified_at_a_start(draft_len: int, lengths: set[int]) -> None:
    """Last rounds draft few tokens, and pacing asks for any: no round may have to make a graph."""
    limits, shapes = StartLimits(4000, 4, 900), GraphShapes(4, 40, 60, 16)
    for rows in shapes.numbers_of_rows():
        found = [one for one in limits.verifications(shapes, {draft_len}, has_trees=True) if one.rows == rows]
        assert {one.length for one in found} == lengths


@pytest.mark.parametrize("max_rows", [1, 5, 40, 300])
@pytest.mark.parametrize("queries", [1, 6])
def test_rows_and_prompts_together_find_the_smallest_graph_that_holds_them(max_rows: int, queries: int) -> None:
    """Few graphs; of as many tokens as a round may have, and of rows that have few."""
    shapes = MixedShapes(max_rows, queries, 600, 16, 32, 720)
    assert len(shapes.all) <= 24 and all(shape.tokens <= 720 for shape in shapes.all)
    assert bool(shapes.all) == (max_rows > 1)
    assert shapes.holding(2, 1, 1, 8193) is None and shapes.holding(2, 1, 24, 20) is None
    for rows in range(1, max_rows):
        for asked in range(1, queries + 1):
            for tiles in (1, 4, 5, 12):
                found = shapes.holding(rows, asked, tiles, 8192)
                if found is None:
                    assert rows > 32 and rows * asked > 64
                    continue
                assert rows <= found.rows and asked <= found.queries and tiles <= found.tiles
                assert found.rows * found.queries <= 256 and found.tiles < max(2 * tiles, 5)
                smaller = [one for one in shapes.all if one.tokens < found.tokens]
                assert not any(one.rows >= rows and one.queries >= asked and one.tiles >= tiles for one in smaller)


def test_many_tiles_are_computed_by_two_graphs_at_most() -> None:
    shapes = GraphShapes(100, 5, 100, 16)
    assert shapes.parts_of_tiles(16, 32) == [slice(0, 16)]
    assert shapes.parts_of_tiles(17, 32) == [slice(0, 16), slice(16, 17)]
    assert shapes.parts_of_tiles(32, 32) == [slice(0, 16), slice(16, 32)]
    assert shapes.parts_of_tiles(33, 32) is None and shapes.parts_of_tiles(1, 600) is None
