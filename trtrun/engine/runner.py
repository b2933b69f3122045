"""One engine rank: its shard of a model, its KV store and its rows. Turns a plan into forwards.

It knows how to compute logits for rows in any phase. It does not know which tokens to choose (speculation), who else
computes what (roles) or why a row runs (scheduling).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad

from trtrun.configuration.drafting.speculation_section import DraftSize
from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan, Step
from trtrun.engine.batch import BatchBuilder, ForwardBatch, with_masks
from trtrun.engine.draft_paths import announce_slots, copy_blocks
from trtrun.engine.forwards import EngineShape, Forwards
from trtrun.engine.graphs.graph_shapes import MOST_FED, GraphShapes, catch_up_width, catches_up
from trtrun.engine.rows import RowState
from trtrun.engine.verification import Verification
from trtrun.kvcache.segments import StepBatch
from trtrun.kvcache.store import KVStore
from trtrun.lora.lora_loading import empty_slot, read_adapter
from trtrun.models.decoder import CausalLM
from trtrun.sampling.distributions import KeyedRanks
from trtrun.tensors import cached_range, cached_tensor, device_integers, inference


@dataclass(frozen=True)
class GraphStep:
    """One query position of rows that are fed through a graph: block tables [R, blocks] and positions [R, 1]."""

    block_tables: torch.Tensor
    positions: torch.Tensor


class Engine:
    """One engine rank.

    Attributes:
        store: what it keeps of rows.
        rows: the state of every row.
        vocab_size: of the model's configuration, padding tokens of the checkpoint included.
        tables: see Forwards.
        capture: makes its graphs; None where there are none.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        rows: RowState,
        shape: EngineShape,
    ) -> None:
        """Put `model`, this rank's share, to work on `rows`, whose keys and values `store` has."""
        self._model = model
        self.store = self._store = store
        self.rows = rows
        self.capture = shape.capture
        self.vocab_size = model.config.vocab_size
        self.device = rows.device
        self._forwards = Forwards(model, store, rows, shape)
        self._verification = Verification(model, rows, self._forwards)
        self.tables = self._forwards.tables

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.rows.block_size

    @property
    def most_positions(self) -> int:
        """Positions that a row may have: columns of its token ids, and the model's context."""
        return min(self.rows.token_ids.shape[1], self._model.config.max_position_embeddings)

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy keys and values at `offset` of blocks `source` to the same place of blocks `target`; all [n] int64."""
        self._model.copy_tokens(self._store, source, target, offset)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of blocks `source` to blocks `target`, both [n] int64."""
        copy_blocks(self._store, source, target)

    def share_states(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Have each of the rows `own` go on from where the row beside it in `rows` stands, in layers that keep states
        of rows."""
        if self._store.states is not None:
            self._store.states.share(rows, own)

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self._forwards.paths is not None

    def draft_size(self, draft_len: int) -> DraftSize:
        """How large a draft of so many tokens, one behind the other, is, at most."""
        paths = self._forwards.paths
        return paths.sizes[draft_len] if paths is not None else DraftSize(1, draft_len)

    @property
    def has_graphs(self) -> bool:
        """Whether forwards that rounds repeat are graphs."""
        return self._forwards.graphs is not None

    @property
    def graph_shapes(self) -> GraphShapes | None:
        """The shapes of graphs; None where there are none."""
        return self._forwards.graphs.shapes if self._forwards.graphs is not None else None

    @property
    def tapped_shape(self) -> tuple[int, int]:
        """Hidden states of a token that verification hands out, and numbers of each."""
        taps = self._forwards.taps
        return len(taps.boundaries) if taps is not None else 0, self._model.config.hidden_size

    @property
    def num_graphs(self) -> int:
        """Graphs that are held."""
        return self._forwards.num_graphs

    @property
    def most_graphs(self) -> int:
        """Graphs that there may be."""
        return self._forwards.most_graphs

    def close(self) -> None:
        """Give back what must not outlive the communicators. Nothing runs on the engine afterwards."""
        self._forwards.close()

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in what the plan changes before anything runs."""
        self.rows.apply(plan)
        self._store.announce(plan.window_places)
        if self._store.states is not None:
            if self.rows.new_blocks is not None:
                self._store.states.announce(*self.rows.new_blocks)
            snapshots = dict(plan.snapshot_starts)
            self._store.states.begin(
                [(one.row, one.num_cached_tokens, snapshots.get(one.row, 0)) for one in plan.admissions]
            )
            self._store.states.save(plan.snapshot_saves)
        if self._store.slots is not None and plan.admissions:
            announce_slots(self._store.slots, plan, self._forwards.paths)
        if self._model.has_overflowed:
            # The kernels on GPUs never read what a row does not see; those on CPUs read whole blocks.
            self._store.clear(self.rows.fresh_blocks(plan))
            if self._forwards.paths is not None and len(plan.decode_rows):
                self._forwards.paths.clear(cached_tensor(plan.decode_rows.tolist(), self.device))

    def read_adapter(self, path: Path, on_progress: Callable[[], None]) -> Callable[[int], None]:
        """Read an adapter, beside forwards; what comes back fills a slot that no row has, between two of them.

        Raises:
            CheckpointError: see LoraFiles.
        """
        return read_adapter(self._model, path, on_progress)

    def empty_slot(self, slot: int) -> None:
        """Empty a slot of adapters that no row has."""
        if self._model.adapted is not None:
            empty_slot(self._model, slot)

    @inference
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Compute keys and values of the chunks (the draft engine's prefill)."""
        if self._forwards.prefill_by_graph(chunks) is not None:
            return
        builder = BatchBuilder(self.rows)
        builder.add_prompts(chunks, self._forwards.prompt_width)
        if builder.num_tokens:
            self._forwards.run(builder.build(device_integers((), self.device)))

    @inference
    def catch_up(self, rows: torch.Tensor, counts: Sequence[int], context: int) -> torch.Tensor:
        """Feed each row's last tokens and return the logits after the last one.

        After full acceptance the store lacks the last draft token's keys (the bonus hole), besides those of the newest
        token; otherwise it lacks the newest token's alone. Feeding both always keeps the shape static, and writes the
        same numbers again where they were there. After rounds that were sat out it lacks one more for each; few
        shapes ever occur, as the widest count is rounded up to a power of two and the rest is padding, and of many
        tokens `MOST_FED` are fed at a time.

        Args:
            rows: [rows] int64 on the device; each row has at least two tokens.
            counts: tokens to feed of each row; all of its tokens where it has fewer.
            context: upper bound of the rows' lengths.

        Returns:
            [rows, vocab] float32.
        """
        most = max(counts)
        for before in range((most - 1) // MOST_FED * MOST_FED, 0, -MOST_FED):
            self._catch_up(rows, counts, min(MOST_FED, most - before), before, context)
        return self._catch_up(rows, counts, min(MOST_FED, most), 0, context)

    def _catch_up(
        self, rows: torch.Tensor, counts: Sequence[int], count: int, before: int, context: int
    ) -> torch.Tensor:
        """`catch_up` of up to `count` tokens of each row, those in front of its last `before`."""
        width = catch_up_width(count) if self.has_graphs else 1 << (count - 1).bit_length()
        steps = cached_range(-width - before, -before, self.device)
        places = positions = self.rows.lengths.index_select(0, rows).unsqueeze(1) + steps
        if width > 2 or before:
            positions = torch.where(-steps <= cached_tensor(counts, self.device).unsqueeze(1), positions, -1)
            positions = positions.clamp(min=-1)
            places = positions.clamp(min=0)
        tokens = self.rows.token_ids[rows.unsqueeze(1), places].to(torch.int64)
        if not catches_up(len(rows), width):
            return self._forwards.forward_rows(tokens, positions, self.tables(rows, context), 1)
        return self._forwards.run_rows(rows, tokens, positions, context, 1)

    @inference
    def look_ahead(
        self, rows: torch.Tensor, counts: Sequence[int], most: Sequence[int], mask_token: int, context: int
    ) -> torch.Tensor:
        """Feed each row's last tokens, and behind them mask tokens: one forward says what may stand at several places
        (PARD, arXiv:2504.18583).

        The keys and values of mask tokens have no meaning. They stand behind the row, where whatever comes next is
        written over them.

        Args:
            rows: [rows] int64 on the device; each row has at least two tokens.
            counts: tokens to feed of each row, at least 1; all of its tokens where it has fewer.
            most: places of each row, at least 1.
            mask_token: stands for a token that is not known.
            context: upper bound of the rows' lengths and places.

        Returns:
            [rows, places, vocab] float32, as many places as the row with the most has: what follows each row's newest
            token, and what follows that. Behind a row's own places it has no meaning.
        """
        num_places = max(most)
        if num_places == 1:
            return self.catch_up(rows, counts, context).unsqueeze(1)
        count, places = self._masked_shape(len(rows), max(counts), num_places)
        if count < max(counts):
            self.catch_up(rows, counts, context)
            counts = [1] * len(counts)
        tokens, positions = with_masks(self.rows, rows, (counts, count), (most, places), mask_token)
        logits = self._forwards.run_rows(rows, tokens, positions, context, places)
        return logits.view(len(rows), places, -1)[:, :num_places]

    def _masked_shape(self, rows: int, count: int, num_places: int) -> tuple[int, int]:
        """Tokens that a forward of `rows` rows feeds, and places that it says something of: as many as are asked for,
        or as their graph has; fewer tokens where no graph has so many."""
        shapes = self.graph_shapes
        if shapes is None:
            return count if count <= MOST_FED else 1, num_places
        rows = shapes.rows(rows)
        shape = shapes.masked(rows, count, num_places) or shapes.masked(rows, 1, num_places)
        assert shape is not None
        return shape

    @inference
    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int = 1
    ) -> torch.Tensor:
        """Feed rows with block tables `tables` some tokens each; of more than `MOST_FED`, where only what follows the
        last one is asked for, so many at a time.

        Args:
            tokens: [rows, width] int64.
            positions: [rows, width] int64; -1 is padding.
            tables: [rows, blocks] int64, from `tables` or as wide.
            num_last: of each row's tokens so many, the last ones, get logits.

        Returns:
            [rows * num_last, vocab] float32, after the last tokens of each row.
        """
        if num_last == 1 and tokens.shape[1] > MOST_FED:
            self.feed(tokens[:, :-MOST_FED], positions[:, :-MOST_FED], tables)
            tokens, positions = tokens[:, -MOST_FED:], positions[:, -MOST_FED:]
        graphs = self._forwards.graphs
        rows, width = tokens.shape
        if graphs is None or (num_last == 1 and not catches_up(rows, catch_up_width(width))):
            return self._forwards.forward_rows(tokens, positions, tables, num_last)
        if num_last == 1:
            before, places = catch_up_width(width) - width, 1
        else:
            count, places = self._masked_shape(rows, width - num_last + 1, num_last)
            before = count + num_last - 1 - width
        padding = (before, places - num_last)
        if any(padding):
            tokens, positions = pad(tokens, padding), pad(positions, padding, value=-1)
        logits = graphs.run(tokens, positions, tables, places)
        return logits if places == num_last else logits.view(rows, places, -1)[:, :num_last].flatten(0, 1)

    @inference
    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[StepBatch | GraphStep]:
        """Make ready to feed rows one token each, several times: what the steps share is computed once.

        Args:
            tables: [rows, blocks] int64, from `tables` or as wide.
            positions: [rows, steps] int64; -1 where a row takes no part in a step (its logits have no meaning).

        Returns:
            One batch a step, for `decode`, in order.
        """
        if self._forwards.graphs is not None:
            return [GraphStep(tables, positions[:, step : step + 1]) for step in range(positions.shape[1])]
        builder = BatchBuilder(self.rows)
        builder.add_tables(tables, positions, positions)
        return builder.build_steps()

    @inference
    def decode(self, step: StepBatch | GraphStep, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row: tokens [rows] int64 → logits [rows, vocab] float32."""
        if isinstance(step, GraphStep):
            return self.feed(tokens.unsqueeze(1), step.positions, step.block_tables)
        positions = step.segments[0].positions.reshape(-1)
        return self._model.logits(self._forwards.run(ForwardBatch(tokens, positions, step)))

    @inference
    def rank_steps(
        self,
        first: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        vocab_size: int,
        num_ranked: int,
        keyed: KeyedRanks | None = None,
    ) -> torch.Tensor | None:
        """Several steps of rows that take the likeliest token, or what `keyed` says; see `ForwardGraphs.run_chain`.

        Returns:
            [rows, steps, num_ranked] int64, valid until the next call; None where there are no graphs.
        """
        if self._forwards.graphs is None:
            return None
        return self._forwards.graphs.run_chain(first, positions, tables, vocab_size, num_ranked, keyed)

    @inference
    def verify_forward(self, plan: RoundPlan, draft: Draft) -> Step:
        """One forward over the newest token of every decode row and its draft, and over every prefill chunk; see
        `Verification.run`."""
        return self._verification.run(plan, draft)

    @inference
    def keep_path(self, plan: RoundPlan, accepted: torch.Tensor) -> None:
        """Have the plan's decode rows go on with the keys and values of the path `accepted` [decode_rows] int64 of
        their trees, verified just now. Before they move on."""
        assert self._forwards.paths is not None
        if len(plan.decode_rows):
            self._forwards.paths.keep(cached_tensor(plan.decode_rows.tolist(), self.device), accepted)
