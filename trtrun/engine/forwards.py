"""How one engine rank's forwards run: as they are, or as CUDA graphs; and what they tap of the residual stream.

A graph writes taps to memory of a fixed place; a forward without one gets memory of its own. It knows a model, its
store, rows, and batches of them. It does not know phases of a round (runner.py), or who reads taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from trtrun.core.nouns import Draft, HiddenStates, PrefillChunk
from trtrun.engine.batch import BatchBuilder, ForwardBatch, PromptTile, even_tiles, read_tiles, token_places
from trtrun.engine.draft_paths import DraftPaths, PathSpace, TreeBatch
from trtrun.engine.graphs.decode_graphs import ForwardGraphs, GraphMemory, MixedGraphs, RowsBatch
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS, Capture
from trtrun.engine.graphs.graph_shapes import MOST_PROMPT_TOKENS, GraphShapes
from trtrun.engine.rows import RowState
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import CausalLM, Taps, check_boundaries
from trtrun.tensors import device_integers


class HiddenTaps:
    """The taps of one engine.

    Attributes:
        boundaries: see `models.taps`.
    """

    def __init__(self, boundaries: Sequence[int], model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Tap a model whose hidden states have `dtype`.

        Raises:
            ConfigError: a boundary is not among the model's.
        """
        self.boundaries = check_boundaries(boundaries, model.num_layers)
        self._hidden_size = model.hidden_size
        self._dtype = dtype
        self._device = device
        self._fixed: torch.Tensor | None = None
        self._last = self._new(0)

    def reserve(self, most_tokens: int) -> None:
        """Make the memory that graphs of forwards of up to `most_tokens` write to."""
        self._fixed = self._new(most_tokens)

    def begin(self, num_tokens: int, *, in_graph: bool = False) -> Taps:
        """The taps of a forward that begins; `in_graph` where it is, or will be, one."""
        self._last = self._fixed[:num_tokens] if in_graph and self._fixed is not None else self._new(num_tokens)
        return Taps(self.boundaries, self._last)

    def replayed(self, rows: int, queries: int, padded: int) -> None:
        """A graph has run whose first `rows` rows are these, of `padded` queries each, of which the first count."""
        if self._fixed is not None:
            taken = self._fixed[: rows * padded]
            of_rows = taken.view(rows, padded, *taken.shape[1:])
            self._last = of_rows[:, :queries].flatten(0, 1) if padded > queries else taken

    def copy(self, places: Sequence[range]) -> torch.Tensor:
        """[tokens, boundaries, hidden] of the tokens at `places` in the last forward; later ones leave it alone."""
        return torch.cat([self._last[part.start : part.stop] for part in places])

    def states(self, num_rows: int, queries: int, prompts: list[torch.Tensor]) -> HiddenStates:
        """Hidden states of `num_rows` rows of `queries` tokens each, which come first in the last forward, beside
        prompts'."""
        decoded = self._last[: num_rows * queries].view(num_rows, queries, len(self.boundaries), self._hidden_size)
        return HiddenStates(decoded, prompts)

    def _new(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, len(self.boundaries), self._hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device)


class GraphPrompts(NamedTuple):
    """Prompts that graphs computed: logits [chunks, vocab] after the last token of each, not overwritten by later
    forwards, and what was tapped of each chunk."""

    logits: torch.Tensor
    tapped: list[torch.Tensor]


class MixedResult(NamedTuple):
    """What graphs computed of rows and prompts: `logits` [R, Q, vocab] of rows, overwritten by later forwards where
    these have as many queries as their graph; and prompts."""

    logits: torch.Tensor
    prompts: GraphPrompts


@dataclass(frozen=True)
class EngineShape:
    """What an engine is asked for, beside its model, store and rows.

    Attributes:
        capture: makes graphs of the forwards that rounds repeat; None runs them as they are.
        logits_per_row: most tokens of a row that get logits in one forward: those of a draft and one more where it
            verifies.
        taps: boundaries of the residual stream that verification hands out (models/decoder.py).
        path_space: where the paths of draft trees have their keys; None where drafts are chains.
        most_masked: tokens that it drafts for a row in one forward, at most; 0 where it drafts step by step.
        max_tokens: of a round, where it verifies: rows and prompts have graphs together; None makes none of these.
        most_graphs: to keep of other forwards: no fewer than a start makes.
    """

    capture: Capture | None = None
    logits_per_row: int = 1
    taps: Sequence[int] = ()
    path_space: PathSpace | None = None
    most_masked: int = 0
    max_tokens: int | None = None
    most_graphs: int = MOST_GRAPHS


class Forwards:
    """Forwards of a model over rows.

    Attributes:
        graphs: of the forwards that rounds repeat; None where they run as they are.
        mixed: graphs of rows and prompts together; None where there are none.
        taps: of the residual stream; None without.
        paths: of draft trees; None where drafts are chains.
        prompt_width: queries of the tiles that prompts are cut into; None where each is one row.
    """

    def __init__(self, model: CausalLM, store: KVStore, rows: RowState, shape: EngineShape) -> None:
        """Compute `rows` of `store` with `model`."""
        self._model = model
        self._store = store
        self._rows = rows
        self._vocab_size = model.config.vocab_size
        self._device = rows.device
        self.taps = HiddenTaps(shape.taps, model.config, model.dtype, self._device) if shape.taps else None
        self.paths = DraftPaths(shape.path_space, rows, store) if shape.path_space is not None else None
        self.prompt_width = model.prompt_width
        self.mixed: MixedGraphs | None = None
        self.graphs = self._make_graphs(shape, shape.capture) if shape.capture is not None else None

    def _make_graphs(self, asked: EngineShape, capture: Capture) -> ForwardGraphs:
        logits_per_row = max(asked.logits_per_row, asked.most_masked)
        max_rows, max_blocks = self._rows.block_tables.shape
        # A graph keeps the address of what it reads: the rotary tables must not grow, that is move, later.
        self._model.reserve_positions(max_blocks * self._rows.block_size)
        # Trees are rows with a draft of another kind: they go by themselves.
        mixes = asked.max_tokens if self.paths is None else None
        shapes = GraphShapes(
            max_rows, logits_per_row, max_blocks, self._rows.block_size, self.prompt_width, asked.most_masked, mixes
        )
        if self.taps is not None:
            most = max((shape.tokens for shape in shapes.mixed.all), default=0)
            self.taps.reserve(max(max_rows * logits_per_row, MOST_PROMPT_TOKENS, most))
        most_tiles = 0 if self.prompt_width is None else -(-MOST_PROMPT_TOKENS // shapes.narrowest_tile)
        lines = max((shape.lines for shape in shapes.mixed.all), default=0)
        numbers = max((shape.table_numbers for shape in shapes.mixed.all), default=0)
        first_run = self._model.first_run if self.taps is None else nullcontext
        memory = GraphMemory.of(
            lines=max(max_rows * logits_per_row, most_tiles, lines),
            table_numbers=max(max(max_rows, most_tiles) * max_blocks, numbers),
            vocab_size=self._vocab_size,
            device=self._device,
        )
        graphs = ForwardGraphs(
            partial(self.forward_rows, widens=False),
            capture,
            shapes,
            memory,
            most_graphs=asked.most_graphs,
            forward_trees=partial(self._forward_trees, widens=False) if self.paths is not None else None,
            first_run=first_run,
        )
        if shapes.mixed.all:
            self.mixed = MixedGraphs(self._forward_mixed, capture, shapes.mixed, memory, first_run)
        return graphs

    @property
    def num_graphs(self) -> int:
        """Graphs that are held."""
        return sum(graphs.num_graphs for graphs in (self.graphs, self.mixed) if graphs is not None)

    @property
    def most_graphs(self) -> int:
        """Graphs that there may be: of rows and prompts together there are never more than their shapes."""
        return 0 if self.graphs is None else self.graphs.most_graphs + len(self.graphs.shapes.mixed.all)

    def close(self) -> None:
        """Give the graphs back."""
        for graphs in (self.graphs, self.mixed):
            if graphs is not None:
                graphs.close()

    def prefill_by_graph(self, chunks: Sequence[PrefillChunk]) -> GraphPrompts | None:
        """Compute chunks through graphs, one after the other, where there are graphs and the chunks are short; else
        None."""
        if self.graphs is None or self.prompt_width is None or not chunks:
            return None
        context, shapes = max(chunk.start + chunk.length for chunk in chunks), self.graphs.shapes
        blocks = shapes.prompt_blocks(-(-context // self._rows.block_size))
        width = shapes.tile_width(max(chunk.length for chunk in chunks), blocks)
        tiles = even_tiles(chunks, width)
        parts = shapes.parts_of_tiles(len(tiles), width)
        if parts is None:
            return None
        done = [self._run_tiles(tiles[part], width, blocks, is_last=part is parts[-1]) for part in parts]
        return self._of_chunks(done, tiles, width)

    def _run_tiles(self, tiles: Sequence[PromptTile], width: int, blocks: int, *, is_last: bool) -> GraphPrompts:
        """Compute tiles of prompts through a graph: logits [tiles, vocab] after each, overwritten by later forwards
        where it `is_last`; and what was tapped of all of their queries."""
        assert self.graphs is not None
        rows, tokens, positions = read_tiles(self._rows, tiles, width)
        logits = self.graphs.run(tokens, positions, self._rows.tables(rows, blocks), 1)
        if self.taps is None:
            return GraphPrompts(logits if is_last else logits.clone(), [])
        self.taps.replayed(len(tiles), width, width)
        return GraphPrompts(logits if is_last else logits.clone(), [self.taps.copy([range(len(tiles) * width)])])

    def _of_chunks(self, done: Sequence[GraphPrompts], tiles: Sequence[PromptTile], width: int) -> GraphPrompts:
        """Put together, by chunk, the results of `tiles` that were `done` in parts."""
        every = done[0].logits if len(done) == 1 else torch.cat([part.logits for part in done])
        last = {tile.chunk: index for index, tile in enumerate(tiles)}
        logits = every[device_integers(list(last.values()), self._device)]
        if self.taps is None:
            return GraphPrompts(logits, [])
        whole, places = torch.cat([of_part for part in done for of_part in part.tapped]), token_places(tiles, width, 0)
        tapped = [torch.cat([whole[part.start : part.stop] for part in places[chunk]]) for chunk in sorted(places)]
        return GraphPrompts(logits, tapped)

    def run_mixed(
        self, rows: torch.Tensor, draft: Draft, chunks: Sequence[PrefillChunk], context: int
    ) -> MixedResult | None:
        """Compute `rows` [R], with chains as drafts, and chunks together through a graph, where there is one, and what
        it does not hold of the chunks through another before; else None. With taps, those of rows are the last
        forward's."""
        if self.mixed is None or self.graphs is None or self.prompt_width is None or not len(rows) or not chunks:
            return None
        width, queries, shapes = self.prompt_width, draft.tokens.shape[1] + 1, self.graphs.shapes
        tiles = even_tiles(chunks, width)
        most = self.mixed.shapes.most_tiles
        before, beside = tiles[: max(0, len(tiles) - most)], tiles[-most:]
        shape = self.mixed.shapes.holding(len(rows), queries, len(beside), context)
        if shape is None or (before and not shapes.takes_prompts(len(before), width)):
            return None
        done = []
        if before:
            end = max(chunk.start + chunk.length for chunk in chunks)
            blocks = shapes.prompt_blocks(-(-end // self._rows.block_size))
            done = [self._run_tiles(before, width, blocks, is_last=False)]
        tokens, positions = self._rows.with_drafts(rows, draft.tokens, draft.draft_lens)
        decoded = RowsBatch(tokens, positions, self._rows.tables(rows, shape.blocks))
        of_tiles, prompt_tokens, prompt_positions = read_tiles(self._rows, beside, width)
        prompts = RowsBatch(prompt_tokens, prompt_positions, self._rows.tables(of_tiles, shape.blocks))
        logits = self.mixed.run(shape, decoded, prompts)
        of_rows, tapped = shape.rows * shape.queries, []
        if self.taps is not None:
            self.taps.replayed(1, shape.tokens, shape.tokens)
            tapped = [self.taps.copy([range(of_rows, of_rows + len(beside) * width)])]
        done.append(GraphPrompts(logits[of_rows : of_rows + len(beside)], tapped))
        found = self._of_chunks(done, tiles, width)
        if self.taps is not None:
            self.taps.replayed(len(rows), queries, shape.queries)
        of_queries = logits[:of_rows].view(shape.rows, shape.queries, -1)[: len(rows), :queries]
        return MixedResult(of_queries.contiguous(), found)

    def _forward_mixed(self, decoded: RowsBatch, prompts: RowsBatch) -> torch.Tensor:
        """Compute rows and prompts together, as a `decode_graphs.MixedForward`."""
        builder = BatchBuilder(self._rows)
        builder.add_tables(decoded.tables, decoded.tokens, decoded.positions)
        start = builder.add_tables(prompts.tables, prompts.tokens, prompts.positions)
        tiles, width = prompts.tokens.shape
        lines = torch.arange(start + tiles, device=self._device)
        wanted = torch.where(lines < start, lines, start + (lines - start + 1) * width - 1)
        return self._model.logits(self.run(builder.build(wanted), in_graph=True), widens=False)

    def run_drafts(self, rows: torch.Tensor, draft: Draft, context: int) -> torch.Tensor:
        """A forward of `rows` [R] and their drafts alone; logits [R * (width + 1), vocab]."""
        if draft.paths is None:
            tokens, positions = self._rows.with_drafts(rows, draft.tokens, draft.draft_lens)
            return self.run_rows(rows, tokens, positions, context, 0)
        assert self.paths is not None
        trees = self.paths.fork(rows, draft, self.tables(rows, context))
        if self.graphs is None:
            return self._forward_trees(trees)
        logits = self.graphs.run_trees(trees)
        if self.taps is not None:
            count, queries = trees.tokens.shape
            self.taps.replayed(count, queries, queries)
        return logits

    def run_rows(
        self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: int, num_last: int
    ) -> torch.Tensor:
        """A forward of `rows` [R] alone, tokens and positions [R, Q]; logits as `graphs.RowForward` has them."""
        tables = self.tables(rows, context)
        if self.graphs is None:
            return self.forward_rows(tokens, positions, tables, num_last)
        logits = self.graphs.run(tokens, positions, tables, num_last)
        if self.taps is not None:
            count, queries = tokens.shape
            padded = queries if num_last else self.graphs.shapes.queries(self.graphs.shapes.rows(count), queries)
            self.taps.replayed(count, queries, padded)
        return logits

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[R, blocks] int64: the tables of `rows` [R] int64, as wide as `context` tokens need, or as their graph
        has them."""
        blocks = -(-context // self._rows.block_size)
        return self._rows.tables(rows, blocks if self.graphs is None else self.graphs.shapes.blocks(blocks, len(rows)))

    def forward_rows(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        num_last: int,
        *,
        widens: bool = True,
    ) -> torch.Tensor:
        """Compute rows as they are, as a `decode_graphs.RowForward`; logits are float32 where it `widens` them."""
        count, queries = tokens.shape
        segment = AttentionSegment(0, count, queries, block_tables, positions)
        batch = AttentionBatch([segment], self._rows.block_size)
        tokens, positions = tokens.reshape(-1), positions.reshape(-1)
        wanted = None
        if 0 < num_last < queries:
            places = torch.arange(count * queries, device=self._device).view(count, queries)
            wanted = places[:, queries - num_last :].reshape(-1)
        hidden = self.run(ForwardBatch(tokens, positions, batch, wanted), in_graph=True)
        return self._model.logits(hidden, widens=widens)

    def _forward_trees(self, trees: TreeBatch, *, widens: bool = True) -> torch.Tensor:
        """Logits [R * (nodes + 1), vocab] of trees alone."""
        builder = BatchBuilder(self._rows)
        builder.add_trees(trees)
        return self._model.logits(self.run(builder.build(None), in_graph=True), widens=widens)

    def run(self, batch: ForwardBatch, *, in_graph: bool = False) -> torch.Tensor:
        # A draft's vocabulary may be narrower than the target's: tokens beyond it are fed as its last one.
        tokens = batch.tokens.clamp(max=self._vocab_size - 1)
        taps = self.taps.begin(len(tokens), in_graph=in_graph) if self.taps is not None else None
        return self._model.forward(tokens, batch.positions, batch.attention, self._store, batch.wanted, taps)
