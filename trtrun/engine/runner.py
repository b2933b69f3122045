"""One engine rank: its shard of a model, its KV store and its rows. Turns a plan into forwards.

It knows how to compute logits for rows in any phase. It does not know which tokens to choose (speculation), who else
computes what (roles) or why a row runs (scheduling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from trtrun.configuration.drafting_methods import DraftSize
from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan, Step
from trtrun.engine.batch import BatchBuilder, ForwardBatch
from trtrun.engine.capture import Capture
from trtrun.engine.draft_paths import DraftPaths, PathSpace
from trtrun.engine.forwards import Forwards, HiddenTaps
from trtrun.engine.graph_shapes import GraphShapes, catch_up_width, catches_up
from trtrun.engine.rows import RowState
from trtrun.kvcache.segments import StepBatch
from trtrun.kvcache.store import KVStore
from trtrun.models.decoder import CausalLM
from trtrun.sampling.keyed_ranks import KeyedRanks
from trtrun.tensors import device_integers, inference, kept_integers, kept_range


@dataclass(frozen=True)
class GraphStep:
    """One query position of rows that are fed through a graph: block tables [R, blocks] and positions [R, 1]."""

    block_tables: torch.Tensor
    positions: torch.Tensor


class Engine:
    """One engine rank.

    Attributes:
        rows: the state of every row.
        vocab_size: of the model's configuration, padding tokens of the checkpoint included.
        tables, prompt_shapes: see Forwards.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        rows: RowState,
        capture: Capture | None = None,
        logits_per_row: int = 1,
        taps: Sequence[int] = (),
        path_space: PathSpace | None = None,
    ) -> None:
        """Put a model to work on rows.

        Args:
            model: this rank's share.
            store: its keys and values.
            rows: its rows.
            capture: makes graphs of the forwards that rounds repeat; None runs them as they are.
            logits_per_row: most tokens of a row that get logits in one forward: those of a draft and one more where it
                verifies.
            taps: boundaries of the residual stream that verification hands out (models/taps.py).
            path_space: where the paths of draft trees have their keys; None where drafts are chains.
        """
        self._model = model
        self._store = store
        self.rows = rows
        self.vocab_size = model.config.vocab_size
        self.device = rows.device
        tapped = HiddenTaps(taps, model.config, model.dtype, self.device) if taps else None
        paths = DraftPaths(path_space, rows, store) if path_space is not None else None
        self._forwards = Forwards(model, store, rows, capture, logits_per_row, tapped, paths)
        self.tables, self.prompt_shapes = self._forwards.tables, self._forwards.prompt_shapes

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
        self._store.copy_blocks(source, target)

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
    def num_graphs(self) -> int:
        """Graphs that are held."""
        return self._forwards.graphs.num_graphs if self._forwards.graphs is not None else 0

    def close(self) -> None:
        """Give back what must not outlive the communicators. Nothing runs on the engine afterwards."""
        if self._forwards.graphs is not None:
            self._forwards.graphs.close()

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in what the plan changes before anything runs."""
        self.rows.apply(plan)
        if self._model.has_overflowed:
            # The kernels on GPUs never read what a row does not see; those on CPUs read whole blocks.
            self._store.clear(self.rows.fresh_blocks(plan))
            if self._forwards.paths is not None and len(plan.decode_rows):
                self._forwards.paths.clear(kept_integers(plan.decode_rows.tolist(), self.device))

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
        shapes ever occur, as the widest count is rounded up to a power of two and the rest is padding.

        Args:
            rows: [rows] int64 on the device; each row has at least two tokens.
            counts: tokens to feed of each row, at least 2 and at most its length.
            context: upper bound of the rows' lengths.

        Returns:
            [rows, vocab] float32.
        """
        count = max(counts)
        width = catch_up_width(count) if self.has_graphs else 1 << (count - 1).bit_length()
        steps = kept_range(-width, 0, self.device)
        places = positions = self.rows.lengths.index_select(0, rows).unsqueeze(1) + steps
        if width > 2:
            positions = torch.where(-steps <= kept_integers(counts, self.device).unsqueeze(1), positions, -1)
            places = positions.clamp(min=0)
        tokens = self.rows.token_ids[rows.unsqueeze(1), places].to(torch.int64)
        if not catches_up(len(rows), width):
            return self._forwards.forward_rows(tokens, positions, self.tables(rows, context), True)
        return self._forwards.run_rows(rows, tokens, positions, context, last_only=True)

    @inference
    def feed(self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Feed rows with block tables `tables` some tokens each.

        Args:
            tokens: [rows, width] int64.
            positions: [rows, width] int64; -1 is padding.
            tables: [rows, blocks] int64, from `tables` or as wide.

        Returns:
            [rows, vocab] float32, after each row's last token.
        """
        if self._forwards.graphs is None:
            return self._forwards.forward_rows(tokens, positions, tables, True)
        missing = catch_up_width(tokens.shape[1]) - tokens.shape[1]
        if missing:
            tokens, positions = pad(tokens, (missing, 0)), pad(positions, (missing, 0), value=-1)
        return self._forwards.graphs.run(tokens, positions, tables, True)

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
        positions = step.segments[0].positions.reshape(-1).clamp(min=0)
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
        """One forward over the newest token of every decode row and its draft, and over every prefill chunk.

        Args:
            plan: the round's plan.
            draft: on the device; where its draft_lens are below 1 only the newest token is fed.
        """
        by_graph = self._forwards.prefill_by_graph(plan.prefill)
        if by_graph is None and plan.prefill:
            return self._verify_beside_prompts(plan, draft)
        queries = draft.tokens.shape[1] + 1
        logits = torch.empty((0, queries, self.vocab_size), device=self.device)
        if len(plan.decode_rows):
            rows = kept_integers(plan.decode_rows.tolist(), self.device)
            logits = self._forwards.run_drafts(rows, draft, plan.max_context).view(-1, queries, self.vocab_size)
        tapped = by_graph.tapped if by_graph is not None else []
        hidden = (
            self._forwards.taps.states(len(plan.decode_rows), queries, tapped)
            if self._forwards.taps is not None
            else None
        )
        return Step(logits if by_graph is None else self._join(logits, by_graph.logits, plan, queries), hidden)

    @inference
    def keep_path(self, plan: RoundPlan, accepted: torch.Tensor) -> None:
        """Have the plan's decode rows go on with the keys and values of the path `accepted` [decode_rows] int64 of
        their trees, verified just now. Before they move on."""
        assert self._forwards.paths is not None
        if len(plan.decode_rows):
            self._forwards.paths.keep(kept_integers(plan.decode_rows.tolist(), self.device), accepted)

    def _verify_beside_prompts(self, plan: RoundPlan, draft: Draft) -> Step:
        """`verify_forward` where prompts are computed beside the decode rows, in one forward."""
        builder, queries = BatchBuilder(self.rows), draft.tokens.shape[1] + 1
        if len(plan.decode_rows):
            rows = kept_integers(plan.decode_rows.tolist(), self.device)
            if draft.paths is None:
                builder.add_rows(rows, *self.rows.with_drafts(rows, draft.tokens, draft.draft_lens), plan.max_context)
            else:
                assert self._forwards.paths is not None
                builder.add_trees(self._forwards.paths.fork(rows, draft, self._forwards.tables(rows, plan.max_context)))
        num_decoded = builder.num_tokens
        places = builder.add_prompts(plan.prefill, self._forwards.prompt_width)
        ended = [of_chunk[-1][-1] for of_chunk, chunk in zip(places, plan.prefill, strict=True) if chunk.is_last]
        hidden = self._forwards.run(builder.build(device_integers([*range(num_decoded), *ended], self.device)))
        states = None
        if self._forwards.taps is not None:
            states = self._forwards.taps.states(
                len(plan.decode_rows), queries, [self._forwards.taps.copy(one) for one in places]
            )
        if not len(hidden):
            return Step(torch.empty((0, queries, self.vocab_size), device=self.device), states)
        logits = self._model.logits(hidden)
        after_prompts = logits[num_decoded:].unsqueeze(1).expand(-1, queries, -1)
        return Step(torch.cat((logits[:num_decoded].view(-1, queries, self.vocab_size), after_prompts)), states)

    def _join(self, logits: torch.Tensor, after_prompts: torch.Tensor, plan: RoundPlan, queries: int) -> torch.Tensor:
        """Logits [decode_rows, queries, vocab], and behind them those of prompts that end in the round, repeated."""
        ended = [index for index, chunk in enumerate(plan.prefill) if chunk.is_last]
        if not ended:
            return logits
        last = after_prompts[device_integers(ended, self.device)].unsqueeze(1)
        return torch.cat((logits, last.expand(-1, queries, -1)))
