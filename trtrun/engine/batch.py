"""From a plan to the tensors of one forward: flattened tokens, positions and attention segments.

Every shape comes from the plan (numbers that the host knows); contents come from the rows' state on the device.

Chunks of prompts are cut into tiles: rows of a few queries each, so that a forward over many prompts has few segments.
A kernel on a GPU computes attention for a tile of queries at a time anyway, and every segment of a forward is another
launch in every layer. Tiles are as wide as the kernel's, and what is left of each chunk goes into a narrower one,
padded to a power of two, where a tile of the other width would be much padding. Tiles of a chunk are rows of one
forward: a later one sees the keys of those before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trtrun.core.nouns import PrefillChunk
from trtrun.engine.draft_paths import TreeBatch
from trtrun.engine.rows import RowState
from trtrun.kernels.triton.attention.attention_tiles import LARGEST_TILE
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, Forks, StepBatch
from trtrun.kvcache.tile_widths import padded_width, prompt_width
from trtrun.models.config import ModelConfig
from trtrun.tensors import cached_range, cached_tensor, device_integers
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


@dataclass
class ForwardBatch:
    """Input of one forward.

    Attributes:
        tokens: [tokens] int64.
        positions: [tokens] int64, of places where the attention has forks; -1 is padding.
        attention: the segments.
        wanted: [n] int64: tokens whose result is read; None for all.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    wanted: torch.Tensor | None = None


def read_tiles(
    rows: RowState, tiles: Sequence[PromptTile], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows, tokens and positions of tiles of prompts.

    Args:
        rows: the state of the rows.
        tiles: T of them, at least one.
        width: queries of each.

    Returns:
        rows [T] int64, tokens [T, width] int64, and positions [T, width] int64 with -1 for padding, which comes first.
    """
    values = device_integers([(tile.row, tile.start, tile.first) for tile in tiles], rows.device)
    row, start, first = values.unsqueeze(2).unbind(1)
    positions = first + torch.arange(width, device=rows.device)
    positions = torch.where(positions >= start, positions, -1)
    return row[:, 0], rows.token_ids[row, positions.clamp(min=0)].to(torch.int64), positions


def with_masks(
    state: RowState,
    rows: torch.Tensor,
    real: tuple[Sequence[int], int],
    places: tuple[Sequence[int], int],
    mask_token: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's last tokens, and behind them mask tokens, for all of its places but the first.

    Args:
        state: of the rows.
        rows: [R] int64 on the device.
        real: of each row how many tokens, and columns for them.
        places: of each row how many, and columns for them, one of which is the newest token's.
        mask_token: what stands for a token that is not known.

    Returns:
        tokens and positions, [R, columns of both - 1] int64 each; positions are -1 where nothing is fed.
    """
    device = state.device
    steps = cached_range(-real[1], places[1] - 1, device)
    positions = state.lengths.index_select(0, rows).unsqueeze(1) + steps
    first, end = (cached_tensor(counts, device).unsqueeze(1) for counts, _ in (real, places))
    positions = torch.where((steps >= -first) & (steps < end - 1), positions, -1).clamp(min=-1)
    known = state.token_ids[rows.unsqueeze(1), positions.clamp(min=0)].to(torch.int64)
    return torch.where(steps < 0, known, mask_token), positions


class BatchBuilder:
    """Collects segments and makes one flattened batch of them."""

    def __init__(self, rows: RowState) -> None:
        self._rows = rows
        self._tokens: list[torch.Tensor] = []
        self._segments: list[AttentionSegment] = []
        self._forks: Forks | None = None
        self.num_tokens = 0

    def add_rows(self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: int) -> int:
        """Add rows with the same number of queries each.

        Args:
            rows: [R] int64 on the device.
            tokens: [R, Q] int64.
            positions: [R, Q] int64; -1 is padding.
            context: upper bound of the positions, plus one.

        Returns:
            The first token of the segment.
        """
        return self.add_tables(self._rows.tables(rows, -(-context // self._rows.block_size)), tokens, positions)

    def add_tables(self, tables: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> int:
        """`add_rows` for rows with block tables [R, blocks] int64, which cover all positions."""
        start = self.num_tokens
        count, queries = tokens.shape
        place = self._segments[-1].stop if self._segments else 0
        self._segments.append(AttentionSegment(place, count, queries, tables, positions))
        self._tokens.append(tokens.reshape(-1))
        self.num_tokens += count * queries
        return start

    def add_trees(self, trees: TreeBatch) -> None:
        """Add rows with a draft tree each, in front of everything else."""
        assert not self._segments, "trees come first"
        count, paths, queries = trees.positions.shape
        tables, positions = trees.tables.flatten(0, 1), trees.positions.flatten(0, 1)
        self._segments.append(AttentionSegment(0, count * paths, queries, tables, positions))
        self._tokens.append(trees.tokens.reshape(-1))
        self._forks = Forks(_numbered(trees.nodes, trees.tokens.shape[1]), _numbered(trees.places, paths * queries))
        self.num_tokens = trees.tokens.numel()

    def add_prefill(self, chunk: PrefillChunk) -> int:
        """Add one prefill chunk; returns its first token."""
        stop = chunk.start + chunk.length
        device = self._rows.device
        rows = torch.full((1,), chunk.row, dtype=torch.int64, device=device)
        tokens = self._rows.token_ids[chunk.row, chunk.start : stop].to(torch.int64).unsqueeze(0)
        positions = torch.arange(chunk.start, stop, device=device).unsqueeze(0)
        return self.add_rows(rows, tokens, positions, stop)

    def add_prompts(self, chunks: Sequence[PrefillChunk], tile_width: int | None) -> list[list[range]]:
        """Add prefill chunks: each as a segment of its own, or all as tiles of up to `tile_width` queries.

        Returns:
            Where the tokens of each chunk stand, in order.
        """
        if tile_width is None:
            starts = [self.add_prefill(chunk) for chunk in chunks]
            return [[range(start, start + chunk.length)] for start, chunk in zip(starts, chunks, strict=True)]
        places: list[list[range]] = [[] for _ in chunks]
        context = max((chunk.start + chunk.length for chunk in chunks), default=0)
        # The widest last: where a chunk has tiles of two widths, it ends in the wider one.
        for width, tiles in sorted(tiles_by_width(chunks, tile_width).items()):
            start = self.add_rows(*read_tiles(self._rows, tiles, width), context)
            for chunk, of_chunk in token_places(tiles, width, start).items():
                places[chunk] += of_chunk
        return places

    def build_steps(self) -> list[StepBatch]:
        """The attention of the single segment, position by position: one forward of R tokens for each."""
        whole = AttentionBatch(self._segments, self._rows.block_size)
        return [StepBatch(whole, step) for step in range(self._segments[0].queries)]

    def build(self, wanted: torch.Tensor | None) -> ForwardBatch:
        """The flattened batch, where the result of the tokens `wanted` [n] int64 is read; None for all of them."""
        tokens = self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens)
        flat = [segment.positions.reshape(-1) for segment in self._segments]
        positions = flat[0] if len(flat) == 1 else torch.cat(flat)
        attention = AttentionBatch(self._segments, self._rows.block_size, self._whole_forks(len(positions)))
        return ForwardBatch(tokens, positions, attention, wanted)

    def _whole_forks(self, num_places: int) -> Forks | None:
        """Forks of the trees, and behind them one place for every token."""
        forks, device = self._forks, self._rows.device
        if forks is None or num_places == len(forks.nodes):
            return forks
        nodes = torch.arange(len(forks.places), self.num_tokens, device=device)
        places = torch.arange(len(forks.nodes), num_places, device=device)
        return Forks(torch.cat((forks.nodes, nodes)), torch.cat((forks.places, places)))


def _numbered(columns: torch.Tensor, width: int) -> torch.Tensor:
    """Columns [R, …] of rows of `width` as indices of all rows, flattened."""
    rows = torch.arange(columns.shape[0], device=columns.device) * width
    return (columns.flatten(1) + rows.unsqueeze(1)).flatten()
