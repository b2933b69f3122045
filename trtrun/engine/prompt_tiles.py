"""Chunks of prompts as tiles: rows of a few queries each, so that a forward over many prompts has few segments.

A kernel on a GPU computes attention for a tile of queries at a time anyway, and every segment of a forward is another
launch in every layer. So chunks are cut into tiles as wide as the kernel's, and what is left of each into a narrower
one, padded to a power of two, where a tile of the other width would be much padding. Tiles of a chunk are rows of one
forward: a later one sees the keys of those before it.

It knows chunks and positions, and the shapes of models. It does not know block tables or tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtrun.core.nouns import PrefillChunk
from trtrun.kernels.triton.attention.attention_tiles import LARGEST_TILE
from trtrun.kvcache.tile_widths import padded_width, prompt_width
from trtrun.models.config import ModelConfig
from trtrun.weights.weight import Share

MOST_EVEN_PADDING = 128
"""Tokens of padding that tiles of one width may have beside those of several: a segment of a forward more takes the
host 2 to 4 ms to launch (8B, H200), as long as the device takes for so many tokens."""


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


def tile_width(model: ModelConfig, tp_size: int, device: str) -> int | None:
    """Tokens of the tiles of a model's prompts on devices like this one, "cuda:0" or "host/cpu:0", told from shapes
    alone; None where a chunk is one row."""
    if not device.rpartition("/")[2].startswith("cuda"):
        return None
    share = Share(0, tp_size)
    return prompt_width(LARGEST_TILE, len(model.queries.units(share)), len(model.keys.units(share)))


def even_tiles(chunks: Sequence[PrefillChunk], width: int) -> list[PromptTile]:
    """Tiles of `width` queries that cover `chunks`, those of one chunk behind each other."""
    return [
        PromptTile(index, chunk.row, chunk.start, first)
        for index, chunk in enumerate(chunks)
        for first in range(chunk.start - -chunk.length % width, chunk.start + chunk.length, width)
    ]


def token_places(tiles: Sequence[PromptTile], width: int, start: int) -> dict[int, list[range]]:
    """Where the tokens of chunks stand in a forward whose tokens from `start` on are those of `tiles` of `width`
    queries: by chunk, in the order of positions."""
    places: dict[int, list[range]] = defaultdict(list)
    for index, tile in enumerate(tiles):
        first = start + index * width
        places[tile.chunk].append(range(first + max(0, tile.start - tile.first), first + width))
    return places


def tiles_by_width(chunks: Sequence[PrefillChunk], width: int) -> Mapping[int, list[PromptTile]]:
    """Tiles by their widths, of `width` queries at most: of one width where that costs little padding, else fitted."""
    fitted = fitted_tiles(chunks, width)
    if len(fitted) < 2:
        return fitted
    even = even_tiles(chunks, max(fitted))
    tokens = sum(of_width * len(tiles) for of_width, tiles in fitted.items())
    return {max(fitted): even} if max(fitted) * len(even) <= tokens + MOST_EVEN_PADDING else fitted


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
