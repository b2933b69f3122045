"""Heads that keep keys and values of every token, over the target's rows, or rows of their own that follow these: a
store of their own, in the target's blocks.

Block b of a row is slot b in the target's store and in this one. So rows, prompts in chunks, preemption and the reuse
of prefixes are the target's; a block is found again by its tokens and the one behind them, as what is kept at a
position depends on the token behind it (kvcache/blocks.py).

Masked heads draft all tokens of a row in one forward: the row's newest token and mask tokens behind it, which see what
is kept of the tokens before, and each other. What a draft writes lies behind what is kept, where the next round writes
over it. It does not know what heads compute, or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from typing_extensions import override

from trtrun.core.nouns import FedPart, RoundPlan
from trtrun.engine.draft_paths import copy_blocks
from trtrun.engine.heads.head_graphs import HeadGraphs, TreeGraphs
from trtrun.engine.heads.head_rows import FeatureLayers, HeadPaths, HeadRows, HeadSpace, HeadTree
from trtrun.engine.heads.running_heads import RunningHeads
from trtrun.engine.start_forwards import tree_depths
from trtrun.heads.dflash_head import DraftedBlocks
from trtrun.kvcache.formats import KVFormat
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore
from trtrun.sampling.distributions import KeyedRanks
from trtrun.tensors import cached_range, cached_tensor, inference

GrowTree = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DrawTree = Callable[[torch.Tensor, torch.Tensor, GrowTree], torch.Tensor]
"""Grow and draw up trees, as in `FeatureHeads` of speculation/protocols.py."""


class StoredHeads(RunningHeads):
    """Heads of one rank with a store of their own, at work on the target's rows; see
    `speculation.protocols.FeatureHeads`."""

    def __init__(
        self, layers: FeatureLayers, fed: HeadRows, space: HeadSpace, kv_format: KVFormat, num_guessed_blocks: int = 0
    ) -> None:
        """Have `layers` keep what they keep of the rows `fed`, in a store of as many blocks as the target's has for
        rows, behind them those of `space`, and behind these `num_guessed_blocks` of guesses, in a format; through
        graphs where `fed` has any."""
        rows, self._are_own = fed.rows, fed.are_own
        first_guessed = space.first_block + space.num_blocks
        self._guessed = range(first_guessed, first_guessed + num_guessed_blocks)
        store = KVStore(
            layers.keeps,
            space.first_block + space.num_blocks + num_guessed_blocks,
            rows.block_size,
            layers.dtype,
            rows.device,
            kv_format,
        )
        graphs: HeadGraphs | None = None
        self._tree_graphs: TreeGraphs | None = None
        if fed.capture is not None and fed.graph_shapes is not None:
            taken = (layers, store, fed.capture, fed.graph_shapes, space.max_rows)
            graphs = HeadGraphs(*taken, fed.tapped_shape, most_fed=space.most_fed)
            if space.most_fed:
                self._tree_graphs = TreeGraphs(fed.capture, fed.graph_shapes, rows.max_draft_len)
        super().__init__(layers, fed, store, graphs)
        self._graphs: HeadGraphs | None = graphs
        self._paths = HeadPaths(space, rows, store) if space.most_fed else None

    def begin_round(self, plan: RoundPlan) -> None:
        """Take the plan in where the rows are their own, and clear what rows get to write to, where it may hold what is
        no number: see `Engine.begin_round`."""
        if self._are_own:
            self._rows.apply(plan)
        if self._layers.has_overflowed:
            self._store.clear([*self._rows.fresh_blocks(plan), *self._guessed])
            if self._paths is not None:
                self._paths.clear(cached_tensor(plan.decode_rows.tolist(), self._rows.device))

    @property
    @override
    def num_graphs(self) -> int:
        return super().num_graphs + (self._tree_graphs.num_graphs if self._tree_graphs is not None else 0)

    @override
    def close(self) -> None:
        super().close()
        if self._tree_graphs is not None:
            self._tree_graphs.close()

    def feed(self, parts: Sequence[FedPart], context: int) -> torch.Tensor:
        """Feed rows some tokens each.

        Args:
            parts: see `FedPart`. A row is in one part at most.
            context: upper bound of positions, plus one.

        Returns:
            [tokens, hidden]: the states behind them, in order; valid until the next call.
        """
        if self._graphs is not None and len(parts) == 1 and self._graphs.takes(parts[0].tokens.shape[1]):
            rows, tokens, positions, tapped = parts[0]
            return self._graphs.feed(tokens, positions, self.tables(rows, context), tapped)
        segments, start = list[AttentionSegment](), 0
        for rows, tokens, positions, _ in parts:
            count, queries = tokens.shape
            segment = AttentionSegment(start, count, queries, self.tables(rows, context), positions)
            segments.append(segment)
            start = segment.stop
        fed = torch.cat([part.tokens.reshape(-1) for part in parts])
        at = torch.cat([part.positions.reshape(-1) for part in parts]).clamp(min=0)
        hidden = self._layers.fuse(torch.cat([part.tapped.flatten(0, 1) for part in parts]))
        return self._layers.forward(fed, at, hidden, AttentionBatch(segments, self._rows.block_size), self._store)

    def draft(
        self,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: int,
        keyed: KeyedRanks | None,
    ) -> torch.Tensor | None:
        """Choose tokens one behind the other; see `HeadGraphs.draft`.

        Args:
            rows: [R] int64 on the device.
            hidden: [R, hidden] states behind which the first is chosen.
            positions: [R, steps] int64: at which each token but the last is fed; -1 where a row takes no part.
            context: upper bound of positions, plus one.
            keyed: how rows choose; None takes the likeliest.

        Returns:
            [R, steps + 1] int64, equal on all ranks; None where steps have to be run one by one.
        """
        if self._graphs is None or self._paths is not None:
            return None
        return self._graphs.draft(hidden, positions, self.tables(rows, context), keyed)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of blocks `source` to blocks `target`, both [n] int64."""
        copy_blocks(self._store, source, target)

    def begin_tree(self, rows: torch.Tensor, positions: torch.Tensor, context: int) -> GrowTree:
        """What feeds trees of `rows` [R] depth by depth, at positions [R, steps] int64, -1 where a row takes no part;
        see `speculation.protocols.GrowTree`."""
        assert self._paths is not None
        return partial(self._grow, self._paths.begin(rows, positions, self.tables(rows, context)))

    def tree_contexts(self, rows: int, depth: int) -> Sequence[int]:
        """For which contexts trees of so many rows, so deep, are drawn up by `draw_tree`; none where they are not."""
        graphs, depths = self._tree_graphs, tree_depths(self._rows.max_draft_len)
        if graphs is None or self._graphs is None or not graphs.takes(rows) or depth not in depths:
            return ()
        return [width * self._rows.block_size for width in self._graphs.shapes.widths(rows)]

    def draw_tree(
        self,
        draw: DrawTree,
        rows: torch.Tensor,
        positions: torch.Tensor,
        lens: torch.Tensor,
        hidden: torch.Tensor,
        context: int,
        width: int,
    ) -> torch.Tensor:
        """Draw up trees as one graph, where there are `tree_contexts`; see `speculation.protocols.FeatureHeads`."""
        assert self._tree_graphs is not None and self._paths is not None
        paths = self._paths

        def work(
            rows: torch.Tensor, positions: torch.Tensor, lens: torch.Tensor, hidden: torch.Tensor, tables: torch.Tensor
        ) -> torch.Tensor:
            tree = paths.begin(rows, positions, tables)
            return draw(lens, hidden, partial(self._grow_as_it_is, tree))

        tables = self.tables(rows, context)
        return self._tree_graphs.run(work, rows, positions, lens, hidden, tables, width)

    def _grow(self, tree: HeadTree, parents: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._graphs is None:
            return self._grow_as_it_is(tree, parents, tokens, hidden)
        assert self._paths is not None
        tables, positions = self._paths.next_depth(tree, parents)
        states = self._graphs.grow(len(tokens), tokens.reshape(-1), positions, tables, _taken(hidden, parents))
        return states.view(*tokens.shape, -1)

    def _grow_as_it_is(
        self, tree: HeadTree, parents: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        assert self._paths is not None
        tables, positions = self._paths.next_depth(tree, parents)
        fed, taken = tokens.reshape(-1), _taken(hidden, parents)
        batch = AttentionBatch([AttentionSegment(0, len(fed), 1, tables, positions)], self._rows.block_size)
        states = self._layers.forward(fed, positions.reshape(-1).clamp(min=0), taken, batch, self._store)
        return states.view(*tokens.shape, -1)


def _taken(hidden: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """[R * F, hidden]: the states of nodes' parents [R, F], of [R, before, hidden]."""
    return hidden.gather(1, parents.unsqueeze(2).expand(-1, -1, hidden.shape[2])).flatten(0, 1)


class MaskedLayers(FeatureLayers, Protocol):
    """Heads of one rank; heads/dflash_head.py."""

    mask_token: int
    from_newest: bool
    looks_back: bool

    def guess(
        self, tokens: torch.Tensor, positions: torch.Tensor, drafted: DraftedBlocks, store: KVStore
    ) -> torch.Tensor:
        """Run drafts; the states [n, hidden] behind tokens [n] at positions [n]."""
        ...

    def logits(self, state: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor | None:
        """[n, the target's vocab_size] float32 for states [n, hidden], behind tokens `before` [n] where they look back;
        None on ranks that do not decide."""
        ...


class MaskedHeads(StoredHeads):
    """Heads that draft all tokens of a row in one forward (`speculation.protocols.MaskedHeads`)."""

    def __init__(self, layers: MaskedLayers, fed: HeadRows, space: HeadSpace, kv_format: KVFormat) -> None:
        """Have `layers` keep what they keep of the rows `fed`, in a store of as many blocks as the target's, in a
        format."""
        super().__init__(layers, fed, space, kv_format)
        self._masked = layers
        self.looks_back = layers.looks_back
        self.logits_behind = layers.logits

    @inference
    def guess(self, rows: torch.Tensor, asked: list[int], draft_len: int, context: int) -> torch.Tensor:
        """Run a draft of each row.

        Args:
            rows: [R] int64 on the device.
            asked: of each how many tokens it needs; a row that needs none takes no part.
            draft_len: the most of them.
            context: upper bound of positions, plus one.

        Returns:
            [R, draft_len, hidden]: what says the first token, the second, and so on.
        """
        device, count, first = rows.device, len(asked), 0 if self._masked.from_newest else 1
        width = draft_len + first
        lengths = self.rows.lengths.index_select(0, rows).unsqueeze(1)
        counts = cached_tensor([needed + first if needed else 0 for needed in asked], device).unsqueeze(1)
        steps = cached_range(0, width, device)
        positions = torch.where(steps < counts, lengths - 1 + steps, -1)
        ends = torch.where(steps < counts, lengths - 2 + counts, -1)
        last = cached_range(0, count, device).unsqueeze(1) * width + (counts - 1).clamp(min=0)
        newest = self.rows.token_ids[rows, (lengths[:, 0] - 1).clamp(min=0)].to(torch.int64)
        tokens = newest.new_full((count, width), self._masked.mask_token)
        tokens[:, 0] = newest
        tables = self.tables(rows, context)
        own, whole = (
            AttentionBatch([AttentionSegment(0, count, width, tables, at)], self.block_size) for at in (positions, ends)
        )
        drafted = DraftedBlocks(own, whole, last.expand(-1, width).reshape(-1))
        at = positions.reshape(-1).clamp(min=0)
        states = self._masked.guess(tokens.reshape(-1), at, drafted, self._store)
        return states.view(count, width, -1)[:, first:]

    def warm_up_rows(self, count: int, draft_len: int) -> None:
        """Feed and draft as rounds of so many rows do; nothing is at a position, so that all is written to the null
        block. Collective over the group."""
        rows = cached_range(0, count, self.rows.lengths.device)
        nothing = torch.zeros((count, draft_len + 1), dtype=torch.int64, device=rows.device)
        tapped = torch.zeros((*nothing.shape, *self.tapped_shape), dtype=self.dtype, device=rows.device)
        self.feed([FedPart(rows, nothing, nothing - 1, tapped)], 1)
        states = self.guess(rows, [0] * count, draft_len, 1).flatten(0, 1)
        logits = self.logits_behind(states, nothing[:, 1:].reshape(-1) if self.looks_back else None)
        self.share(torch.empty_like(nothing[:, 1:]) if logits is None else logits.argmax(dim=1).view(count, -1))
