"""Token Recycling on the target ranks: the drafting method `token_recycling` (Luo et al. 2024, arXiv:2408.08696).

Verification computes the target's likeliest next tokens behind every token that it looks at, of which one is used. A
table keeps them: of each token of the vocabulary the k likeliest that followed it last. A draft is a tree of a fixed
shape that is looked up in it, level by level from the row's newest token, or a chain of the likeliest. It needs no
model. The table is all rows' together: it learns from one what it proposes for another, but nothing from rows with a
cache_salt. No text depends on it.

Sampled rows take successors in the order in which the target would choose among them at that place, by their logits of
that time and with the row's own random numbers (Daliri et al. 2024, arXiv:2408.07978).

It knows the target's rows and logits. It does not know where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import ChoiceTree
from trtrun.configuration.drafting.text_methods import TokenRecyclingSection
from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.errors import ConfigError
from trtrun.sampling.filters import likeliest
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.leader_drafts import DraftShape, LeaderDrafter, verified_nodes
from trtrun.speculation.protocols import Rows, TargetGroup
from trtrun.tensors import cached_range, cached_tensor, inference


class SuccessorTable:
    """The likeliest tokens behind each token of a vocabulary, as the target said last.

    Attributes:
        tokens: [vocab, top_k] int32, the likeliest first; -1 where nothing is known.
        logits: [vocab, top_k] float32 beside them.
    """

    def __init__(self, vocab_size: int, top_k: int, device: torch.device) -> None:
        """Know nothing of any token."""
        # One line more: what was not verified is written there.
        self._lines = torch.full((vocab_size + 1, top_k), -1, dtype=torch.int32, device=device)
        self._line_logits = torch.zeros(self._lines.shape, dtype=torch.float32, device=device)
        self._written = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=device)
        self._count = 0
        self.tokens, self.logits = self._lines[:vocab_size], self._line_logits[:vocab_size]

    def follow(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What follows each of `tokens` [...] int64: tokens [..., top_k] int64, -1 where nothing is known, and behind
        -1; and their logits [..., top_k] float32."""
        known = tokens.clamp(min=0)
        found = self._lines[known].to(torch.int64)
        return torch.where(tokens.unsqueeze(-1) < 0, -1, found), self._line_logits[known]

    def learn(self, tokens: Tensor, is_verified: Tensor, logits: Tensor) -> None:
        """Take in the logits [n, vocab] float32 behind `tokens` [n] int64, where `is_verified` [n] bool. Of a token
        that is there more than once the last one counts."""
        # Of a row whose numbers overflowed nothing is likely: any tokens will do, but tokens they must be.
        ranked = likeliest(logits, self._lines.shape[1]).clamp_(0, logits.shape[1] - 1)
        count = len(tokens)
        # A draft that came with a request may hold ids that the target does not have.
        lines = torch.where(is_verified & (tokens < len(self.tokens)), tokens, len(self.tokens))
        # Who writes a line last must not depend on threads: all of a token write what the last of them has.
        order = cached_range(0, count, tokens.device)
        self._written.scatter_reduce_(0, lines, order + self._count, "amax")
        last = self._written[lines] - self._count
        self._count += count
        ranked = ranked[last]
        self._lines[lines] = ranked.to(torch.int32)
        self._line_logits[lines] = logits[last.unsqueeze(1), ranked]


class TokenRecyclingDrafter(LeaderDrafter):
    """Proposes what the table says; nothing behind a token that it does not know."""

    def __init__(self, rows: Rows, group: TargetGroup, table: SuccessorTable | None, tree: ChoiceTree | None) -> None:
        """Draft for `rows` from a table, which only the rank that decides has; without a tree the likeliest tokens."""
        super().__init__(rows, group)
        self._table = table
        self._tree = tree
        self._levels: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._salted: set[int] = set()

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go: of those with a salt nothing is learned."""
        super().begin_round(plan)
        self._salted.difference_update(plan.dropped_rows)
        for admission in plan.admissions:
            self._salted.discard(admission.row)
            if admission.sampling.cache_salt is not None:
                self._salted.add(admission.row)

    @inference
    @override
    def warm_up(self) -> None:
        """Do nothing: nothing is learned."""
        if self._table is not None:
            nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
            logits = torch.zeros((1, len(self._table.tokens)), device=self._device)
            self._table.learn(nothing, nothing > 0, logits)

    @override
    def _make_shape(self, depth: int) -> DraftShape:
        tree = ChoiceTree.chain(depth) if self._tree is None else self._tree.cut(depth)
        self._levels[depth] = self._make_levels(tree)
        return DraftShape.of(tree.paths, depth, self._device, is_chain=self._tree is None)

    def _make_levels(self, tree: ChoiceTree) -> list[tuple[Tensor, Tensor]]:
        """For each depth the place of each node's parent among those of the depth before, and the node's rank."""
        levels: list[tuple[Tensor, Tensor]] = []
        before: list[tuple[int, ...]] = [()]
        for depth in range(1, tree.depth + 1):
            nodes = [node for node in tree.nodes if len(node) == depth]
            parents = [before.index(node[:-1]) for node in nodes]
            ranks = [node[-1] for node in nodes]
            of_level = (torch.tensor(one, dtype=torch.int64, device=self._device) for one in (parents, ranks))
            levels.append((next(of_level), next(of_level)))
            before = nodes
        return levels

    @override
    def _draft(self, plan: RoundPlan, rows: Tensor, newest: Tensor, shape: DraftShape) -> Tensor:
        assert self._table is not None
        lengths, listed = self._rows.lengths.index_select(0, rows), plan.decode_rows.tolist()
        of_level, levels = newest.unsqueeze(1), []
        for depth, (parents, ranks) in enumerate(self._levels[plan.draft_len]):
            successors = self._rows.sampling.rank_few(*self._table.follow(of_level), listed, lengths + depth)
            of_level = successors.flatten(1).index_select(1, parents * successors.shape[2] + ranks)
            levels.append(of_level)
        return torch.cat(levels, dim=1)

    @override
    def _learn(self, plan: RoundPlan, rows: Tensor, proposed: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Learn from rounds without drafts, too, so that drafts may pay later; but not where speculation is off."""
        if plan.draft_lens.max() < 0:
            return
        assert self._table is not None and self._newest is not None
        tokens = torch.cat((self._newest.unsqueeze(1), proposed.tokens), dim=1)
        is_verified = verified_nodes(proposed)
        if plan.is_warm_up:  # of made-up rows
            is_verified.zero_()
        elif self._salted:
            salted = [row in self._salted for row in plan.decode_rows.tolist()]
            is_verified[cached_tensor([place for place, one in enumerate(salted) if one], self._device)] = False
        self._table.learn(tokens.flatten(), is_verified.flatten(), logits[: len(rows)].flatten(0, 1))


@DRAFTERS.register("token_recycling")
def make_token_recycling_drafter(context: DrafterContext) -> Drafter:
    """A table of the target's successors, with the section's tree.

    Raises:
        ConfigError: the table is to keep more successors than there are tokens.
    """
    section, target, group = context.section, context.target, context.group
    assert isinstance(section, TokenRecyclingSection) and target is not None and group is not None
    if section.token_recycling_top_k > target.vocab_size:
        raise ConfigError(
            f"speculation.token_recycling_top_k is {section.token_recycling_top_k}, but the target has "
            f"{target.vocab_size} tokens"
        )
    table = None
    if group.decides:
        table = SuccessorTable(target.vocab_size, section.token_recycling_top_k, target.device)
    return TokenRecyclingDrafter(target.rows, group, table, section.tree)
