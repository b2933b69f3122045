"""Draft trees of heads that go on with their own states, depth by depth: what follows each node, and who is fed next.

All nodes of a depth that have others behind them are fed in one forward, each behind its parent. Sampled rows rank
tokens as the target will choose them, with its random numbers of each place (Daliri et al. 2024, arXiv:2408.07978).

It knows rows and heads by protocol. It does not know what heads compute, or where states come from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trtrun.configuration.drafting.draft_trees import ChoiceTree, DynamicTree
from trtrun.core.nouns import RoundPlan
from trtrun.sampling.distributions import Distributions, distributions_of
from trtrun.sampling.filters import likeliest
from trtrun.speculation.growing_trees import DynamicGrowth, Given, Growth, Ranked, StaticGrowth, StaticShape
from trtrun.speculation.protocols import FeatureHeads, GrowTree, Rows
from trtrun.speculation.text_drafts import Suggestion
from trtrun.tensors import cached_range, cached_tensor


class HeadTrees:
    """Draws up the trees of rows."""

    def __init__(self, rows: Rows, heads: FeatureHeads[Any], tree: ChoiceTree | DynamicTree) -> None:
        """Draw trees for `rows` with `heads`: of one shape, or with bounds."""
        self._rows = rows
        self._heads = heads
        self._tree = tree
        self._shapes: dict[int, StaticShape] = {}

    def warm_up(self, rows: Tensor, draft_len: int) -> None:
        """Play a tree of `rows` [R] int64 that writes to scratch alone, for kernels that are compiled then."""
        lens = torch.full_like(rows, draft_len)
        hidden = torch.zeros((len(rows), self._heads.hidden_size), dtype=self._heads.dtype, device=rows.device)
        positions = rows.new_full((len(rows), max(0, draft_len - 1)), -1)
        self._draw(draft_len, lens, hidden, self._heads.begin_tree(rows, positions, 1))
        for depth in range(1, draft_len + 1):
            for context in self._heads.tree_contexts(len(rows), depth):
                self._draw_as_one(depth, rows, positions[:, : depth - 1], lens, hidden, context)

    def _draw(self, depth: int, lens: Tensor, hidden: Tensor, grow: GrowTree) -> Tensor:
        """The trees of R greedy rows, so deep, [R, nodes + paths * depth] int64, behind states [R, hidden]; see
        `DrawTree`."""
        growth = self._growth(len(lens), depth, lens)
        hidden = hidden.unsqueeze(1)
        for step in range(depth):
            logits, ranked = self._heads.logits(hidden.flatten(0, 1)), None
            if logits is not None:
                ranked = _likeliest(logits, growth, (len(lens), hidden.shape[1]))
            nodes, parents = growth.spread(ranked, None, self._heads.share)
            if step + 1 < depth:
                hidden = grow(parents, nodes, hidden)
        tokens, paths = growth.finish(self._heads.share)
        return torch.cat((tokens, paths.flatten(1)), dim=1)

    def _draw_as_one(
        self, depth: int, rows: Tensor, positions: Tensor, lens: Tensor, hidden: Tensor, context: int
    ) -> tuple[Tensor, Tensor]:
        nodes, paths = self._sizes(depth)
        width = nodes + paths * depth
        told = self._heads.draw_tree(partial(self._draw, depth), rows, positions, lens, hidden, context, width)
        return told[:, :nodes], told[:, nodes:].reshape(len(rows), paths, depth)

    def draft(
        self,
        plan: RoundPlan,
        listed: list[int],
        asked: list[int],
        rows: Tensor,
        positions: Tensor,
        hidden: Tensor,
        given: Suggestion | None,
    ) -> tuple[Tensor, Tensor]:
        """The trees of some rows, plan.draft_len deep. Collective over the group.

        Args:
            plan: the round's.
            listed: R rows.
            asked: of each how deep it needs to be.
            rows: [R] int64: the same on the device.
            positions: [R, draft_len - 1] int64: where nodes of each depth but the last are fed; -1 where a row needs no
                more.
            hidden: [R, hidden] states behind which the first nodes are chosen.
            given: tokens that take the place of the best path's.

        Returns:
            tokens [R, nodes] int64 and paths [R, paths, draft_len] int64 (see `Draft`), equal on all ranks.
        """
        is_greedy = given is None and self._rows.sampling.passes(listed)
        if is_greedy and self._heads.tree_contexts(len(listed), plan.draft_len):
            needed = cached_tensor(asked, rows.device)
            return self._draw_as_one(plan.draft_len, rows, positions, needed, hidden, plan.max_context)
        lengths, lens = self._rows.lengths.index_select(0, rows), None
        if min(asked) < plan.draft_len:
            lens = cached_tensor(asked, rows.device)
        growth = self._growth(len(listed), plan.draft_len, lens)
        hidden = hidden.unsqueeze(1)
        # Of each node that is continued the tokens on its way, where choices look at them.
        looks_back = self._rows.sampling.needs_history(listed)
        ways = lengths.new_zeros((len(listed), 1, 0)) if looks_back else None
        grow = None
        for step in range(plan.draft_len):
            ranked = self._rank(plan, listed, lengths + step, hidden, growth, ways)
            of_step = None if given is None else Given(given.tokens[:, step], given.is_given[:, step])
            tokens, parents = growth.spread(ranked, of_step, self._heads.share)
            if step + 1 == plan.draft_len:
                break
            if ways is not None:
                before = ways.gather(1, parents.unsqueeze(2).expand(-1, -1, ways.shape[2]))
                ways = torch.cat((before, tokens.unsqueeze(2)), dim=2)
            if grow is None:
                grow = self._heads.begin_tree(rows, positions, plan.max_context)
            hidden = grow(parents, tokens, hidden)
        return growth.finish(self._heads.share)

    def _sizes(self, depth: int) -> tuple[int, int]:
        """Nodes and paths of each tree, so deep."""
        if isinstance(self._tree, DynamicTree):
            return self._tree.num_nodes(depth), self._tree.num_paths(depth)
        tree = self._tree.cut(depth)
        return len(tree.nodes), len(tree.paths)

    def _growth(self, rows: int, depth: int, lens: Tensor | None = None) -> Growth:
        if isinstance(self._tree, DynamicTree):
            return DynamicGrowth(self._tree, rows, depth, self._rows.lengths.device, lens)
        assert self._tree is not None
        if depth not in self._shapes:  # of all depths with as many ranks: kernels are compiled for them
            self._shapes[depth] = StaticShape(self._tree.cut(depth), self._tree.num_ranks, self._rows.lengths.device)
        return StaticGrowth(self._shapes[depth], rows)

    def _rank(
        self,
        plan: RoundPlan,
        listed: list[int],
        where: Tensor,
        hidden: Tensor,
        growth: Growth,
        ways: Tensor | None,
    ) -> Ranked | None:
        """What follows each of R rows' F nodes, best first, at places `where` [R], behind states [R, F, hidden]; None
        on ranks that are told. With `ways` [R, F, depth] the choices of some rows look at the tokens before."""
        logits = self._heads.logits(hidden.flatten(0, 1))
        if logits is None:
            return None
        state, nodes = self._rows, hidden.shape[1]
        if ways is None:
            every = [row for row in listed for _ in range(nodes)]
            places = where.repeat_interleave(nodes)
            found = distributions_of(state.sampling, logits.unsqueeze(1), every, places, state.token_ids)
            return _best(found, growth, (len(listed), nodes))
        of_nodes, rows = list[Ranked](), cached_tensor(listed, where.device).unsqueeze(1)
        columns = where.unsqueeze(1) - cached_range(0, ways.shape[2], where.device).flip(0) - 1
        by_node = logits.view(len(listed), nodes, -1)
        for node in range(nodes):
            # Scratch behind the row's length, which a verdict overwrites.
            state.token_ids[rows, columns] = ways[:, node].to(torch.int32)
            lines = by_node[:, node : node + 1]
            found = distributions_of(state.sampling, lines, listed, where, state.token_ids, None, plan.max_context)
            of_nodes.append(_best(found, growth, (len(listed), 1)))
        tokens = torch.cat([one.tokens for one in of_nodes], dim=1)
        if not growth.has_log_probs:
            return Ranked(tokens, None)
        return Ranked(tokens, torch.cat([one.log_probs for one in of_nodes if one.log_probs is not None], dim=1))


def _best(found: Distributions, growth: Growth, shape: tuple[int, int]) -> Ranked:
    """What the target would choose from each of R * F lines, the best first, for (R, F). Log probabilities are those
    under its random numbers: how sure the choice is that they make."""
    if not growth.has_log_probs:
        return Ranked(found.rank(growth.num_ranks).view(*shape, -1), None)
    return _likeliest(found.scores(), growth, shape)


def _likeliest(scores: Tensor, growth: Growth, shape: tuple[int, int]) -> Ranked:
    """The largest of scores [R * F, V], for (R, F)."""
    tokens = likeliest(scores, growth.num_ranks)
    if not growth.has_log_probs:
        return Ranked(tokens.view(*shape, -1), None)
    log_probs = scores.gather(1, tokens) - scores.logsumexp(dim=1, keepdim=True)
    return Ranked(tokens.view(*shape, -1), log_probs.view(*shape, -1))
