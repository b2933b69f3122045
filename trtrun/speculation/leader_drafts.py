"""Drafts of one shape that a single rank of the target's group makes from what it has seen of the target's logits; the
others are told.

Only the rank that decides has logits, so only it keeps what a method learns from them. Ranks that propose different
tokens would part for ever: what it proposes is broadcast, and no rank relies on its own. It knows the target's rows and
trees of a fixed shape. It does not know what is learned.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.found_paths import PredictedOutputs, no_draft
from trtrun.speculation.protocols import Rows, TargetGroup
from trtrun.tensors import cached_range, cached_tensor, inference


@dataclass(frozen=True)
class DraftShape:
    """The nodes of drafts of one length, on the device.

    Attributes:
        num_nodes: of each row.
        paths: [paths, depth] int64, see Draft; None where drafts are chains.
        spine: [depth] int64: the nodes of a path of the whole depth, which a draft that came with a request takes.
    """

    num_nodes: int
    paths: Tensor | None
    spine: Tensor

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], depth: int, device: torch.device, *, is_chain: bool) -> DraftShape:
        """Lay out the nodes along each path from the root to a leaf; one of them has `depth` nodes."""
        spine = next(path for path in paths if len(path) == depth)
        padded = [[*path, *[-1] * (depth - len(path))] for path in paths]
        of_paths, of_spine = (torch.tensor(one, dtype=torch.int64, device=device) for one in (padded, list(spine)))
        num_nodes = 1 + max(max(path) for path in paths)
        return cls(num_nodes, None if is_chain else of_paths, of_spine)

    def draft_of(self, tokens: Tensor, most: Tensor) -> Draft:
        """A draft of `tokens` [R, nodes] int64, -1 for a node that is not there, and nothing is behind it; no deeper
        than `most` [R] int64."""
        is_there = tokens >= 0
        found = tokens.clamp(min=0)
        if self.paths is None:
            return Draft(found, torch.minimum(is_there.to(torch.int64).cumprod(dim=1).sum(dim=1), most))
        paths = self.paths.expand(len(tokens), -1, -1)
        along = is_there.gather(1, paths.clamp(min=0).flatten(1)).view(paths.shape) & (paths >= 0)
        reached = along.to(torch.int64).cumprod(dim=2)
        lens = torch.minimum(reached.sum(dim=2).amax(dim=1), most)
        return Draft(found, lens, paths=torch.where(reached > 0, paths, -1))


class LeaderDrafter(Drafter):
    """Proposes what the rank that decides makes of what it has learned. What came with a request is proposed first.

    A proposal is no sample, so it has no draft_probs: the target chooses its own token at every position.
    """

    def __init__(self, rows: Rows, group: TargetGroup) -> None:
        """Draft for the rows of the target, whose ranks are `group`."""
        self._rows = rows
        self._group = group
        self._device = rows.lengths.device
        self._given = PredictedOutputs(rows)
        self._shapes: dict[int, DraftShape] = {}
        self._proposed: Draft | None = None
        self._newest: Tensor | None = None

    @property
    @override
    def rows(self) -> Rows:
        return self._rows

    @override
    def guide(self, guides: RowGuides) -> None:
        self._given.guides = guides

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._given.begin_round(plan)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        listed = plan.decode_rows.tolist()
        rows = cached_tensor(listed, self._device)
        if plan.draft_lens.size and plan.draft_lens.max() >= 0:
            newest = self._rows.lengths.index_select(0, rows) - 1
            self._newest = self._rows.token_ids[rows, newest].to(torch.int64)
        if not plan.draft_len:
            self._proposed = no_draft(plan, self._device)
            return self._proposed
        assert self._newest is not None
        shape = self._shape(plan.draft_len)
        if self._group.decides:
            tokens = self._draft(plan, rows, self._newest, shape)
        else:
            tokens = torch.empty((len(listed), shape.num_nodes), dtype=torch.int64, device=self._device)
        tokens = self._group.share(tokens)
        given = self._given.propose(plan)
        if given is not None:
            tokens.index_copy_(1, shape.spine, torch.where(given[1], given[0], tokens.index_select(1, shape.spine)))
        most = cached_tensor(plan.draft_lens.clip(min=0).tolist(), self._device)
        self._proposed = shape.draft_of(tokens, most)
        return self._proposed

    def _shape(self, depth: int) -> DraftShape:
        if depth not in self._shapes:
            self._shapes[depth] = self._make_shape(depth)
        return self._shapes[depth]

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Learn from the logits of what was verified, where the rank decides."""
        proposed, self._proposed = self._proposed, None
        if not self._group.decides or not len(plan.decode_rows):
            return
        assert verdict is not None and step is not None and proposed is not None
        self._learn(plan, cached_tensor(plan.decode_rows.tolist(), self._device), proposed, verdict, step.logits)

    @abstractmethod
    def _make_shape(self, depth: int) -> DraftShape:
        """The nodes of drafts of which up to `depth` follow one another, at least 1."""

    @abstractmethod
    def _draft(self, plan: RoundPlan, rows: Tensor, newest: Tensor, shape: DraftShape) -> Tensor:
        """What is proposed, on the rank that decides.

        Args:
            plan: the round's; its draft_len is at least 1.
            rows: [R] int64: its decode rows.
            newest: [R] int64: their newest tokens.
            shape: of drafts of its draft_len.

        Returns:
            [R, nodes] int64 that may be written to; -1 for a node of which nothing is known.
        """

    @abstractmethod
    def _learn(self, plan: RoundPlan, rows: Tensor, proposed: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Learn what the target said of the decode rows, on the rank that decides.

        Args:
            plan: the round's.
            rows: [R] int64: its decode rows, which have moved on.
            proposed: their draft.
            verdict: of these and of rows whose prompts have ended, behind them.
            logits: [R or more, width + 1, vocab] float32: see Step; not to be altered.
        """


def verified_nodes(draft: Draft) -> Tensor:
    """[R, width + 1] bool: whether a row's newest token and each of its draft's tokens were verified."""
    count, width = draft.tokens.shape
    device = draft.tokens.device
    is_verified = torch.zeros((count, width + 1), dtype=torch.bool, device=device)
    is_verified[:, 0] = True
    if draft.paths is None:
        is_verified[:, 1:] = cached_range(0, width, device) < draft.draft_lens.unsqueeze(1)
        return is_verified
    steps = cached_range(0, draft.depth, device)
    columns = torch.where(steps < draft.path_lens().unsqueeze(2), draft.paths + 1, 0)
    return is_verified.scatter_(1, columns.flatten(1), True)
