"""Chunks of prompts as tiles: rows of a few queries each, so that a forward over many prompts has few segments.

A kernel on a GPU computes attention for a tile of queries at a time anyway, and every segment of a forward is another
launch in every layer. So chunks are cut into tiles as wide as the kernel's, and what is left of each into a narrower
one, padded to a power of two. Tiles of a chunk are rows of one forward: a later one sees the keys of those before it.

It knows chunks and positions. It does not know block tables or tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtrun.core import PrefillChunk


@dataclass(frozen=True)
class PromptTile:
    """Some neighbouring tokens of a chunk. Its last query is always a token; padding comes first.

    Attributes:
        chunk: index of the chunk.
        row: of the running batch.
        start: first position of the chunk; queries before it are padding.
        first: position of the tile's first query, below `start` where there is padding.
    """

    chunk: int
    row: int
    start: int
    first: int


def even_tiles(chunks: Sequence[PrefillChunk], width: int) -> list[PromptTile]:
    """Tiles of `width` queries that cover `chunks`, those of one chunk behind each other."""
    return [
        PromptTile(index, chunk.row, chunk.start, first)
        for index, chunk in enumerate(chunks)
        for first in range(chunk.start - -chunk.length % width, chunk.start + chunk.length, width)
    ]


def fitted_tiles(chunks: Sequence[PrefillChunk], width: int) -> Mapping[int, list[PromptTile]]:
    """Tiles by their widths: of `width` queries, and for what is left of a chunk in front of them one of the next power
    of two, so that less than half of it is padding."""
    tiles: dict[int, list[PromptTile]] = defaultdict(list)
    for index, chunk in enumerate(chunks):
        left = chunk.length % width
        if left:
            narrow = padded_width(left, width)
            tiles[narrow].append(PromptTile(index, chunk.row, chunk.start, chunk.start + left - narrow))
        for first in range(chunk.start + left, chunk.start + chunk.length, width):
            tiles[width].append(PromptTile(index, chunk.row, chunk.start, first))
    return tiles


def padded_width(length: int, width: int) -> int:
    """Queries of a tile for `length` tokens, `width` at most."""
    return min(1 << (length - 1).bit_length(), width)


def most_padding(width: int) -> int:
    """Padding of a chunk in fitted tiles, at most."""
    return max((padded_width(left, width) - left for left in range(1, width)), default=0)
