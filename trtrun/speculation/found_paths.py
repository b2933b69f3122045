"""Drafts made of continuations that were found somewhere, and of what came with requests; and what methods have in
common that look for them in the target's rows.

It knows no method, and not where anything is found.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtrun.core.nouns import Draft, RoundPlan
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.given_drafts import GivenDrafts
from trtrun.speculation.protocols import Rows
from trtrun.tensors import inference, kept_integers, kept_range


class Continuations(NamedTuple):
    """What may follow each of a plan's decode rows, the best first.

    Attributes:
        tokens: [decode_rows, paths, draft_len] int64.
        counts: [decode_rows, paths] int64: how many of them there are; 0 where there is no such path.
    """

    tokens: Tensor
    counts: Tensor


def no_draft(plan: RoundPlan, device: torch.device) -> Draft:
    """The draft of a round without drafts."""
    rows = len(plan.decode_rows)
    empty = torch.zeros((rows, 0), dtype=torch.int64, device=device)
    return Draft(empty, torch.zeros(rows, dtype=torch.int64, device=device))


def draft_of_paths(plan: RoundPlan, found: Continuations, given: tuple[Tensor, Tensor] | None) -> Draft:
    """The continuations as a chain, or with several paths as a draft tree.

    Args:
        plan: the round's.
        found: of its decode rows; where a draft was given it takes the place of the first path, unless that goes on
            from it.
        given: what `GivenDrafts.propose` says.
    """
    tokens, counts = found
    device, max_paths = tokens.device, tokens.shape[1]
    most = kept_integers(plan.draft_lens.clip(min=0).tolist(), device)
    if given is not None:
        num_given = given[1].sum(dim=1)
        agrees = ((tokens[:, 0] == given[0]) | ~given[1]).all(dim=1)
        is_given = (num_given > 0) & ~(agrees & (counts[:, 0] >= num_given))
        tokens[:, 0] = torch.where(is_given.unsqueeze(1), given[0], tokens[:, 0])
        counts[:, 0] = torch.where(is_given, num_given, counts[:, 0])
    if max_paths == 1:
        return Draft(tokens[:, 0], torch.minimum(counts[:, 0], most))
    nodes = kept_range(0, max_paths * plan.draft_len, device).view(1, max_paths, -1)
    steps = kept_range(0, plan.draft_len, device)
    paths = torch.where(steps < counts.unsqueeze(2), nodes, -1)
    return Draft(tokens.flatten(1), torch.minimum(counts.amax(dim=1), most), paths=paths)


def distinct(tokens: Tensor, counts: Tensor, most: int) -> Continuations:
    """The first `most` of continuations [R, candidates, K] that say something new, with their counts [R, candidates].

    One that is the start of another says nothing; of equal ones the first stays.
    """
    num_candidates, draft_len = tokens.shape[1:]
    order = torch.arange(num_candidates, device=tokens.device)
    steps = torch.arange(draft_len, device=tokens.device)
    # starts[r, a, b]: continuation a is the start of b.
    behind = steps >= counts.unsqueeze(2)
    starts = ((tokens.unsqueeze(2) == tokens.unsqueeze(1)) | behind.unsqueeze(2)).all(dim=3)
    starts &= counts.unsqueeze(2) <= counts.unsqueeze(1)
    equal = counts.unsqueeze(2) == counts.unsqueeze(1)
    is_said = (starts & (~equal | (order.unsqueeze(1) > order))).any(dim=2) | (counts == 0)
    kept = torch.sort(is_said.to(torch.int8), dim=1, stable=True).indices[:, :most]
    counts = counts.masked_fill(is_said, 0).gather(1, kept)
    tokens = tokens.gather(1, kept.unsqueeze(2).expand(-1, -1, draft_len))
    missing = most - kept.shape[1]
    return Continuations(pad(tokens, (0, 0, 0, missing)), pad(counts, (0, missing)))


class LookupDrafter(Drafter):
    """Proposes continuations that are found by a row's last tokens; nothing where there are none. What came with a
    request is proposed first.

    A proposal is no sample, so it has no draft_probs: the target chooses its own token at every position, greedy or
    sampled, and a draft token is kept where it is that token.
    """

    def __init__(self, rows: Rows) -> None:
        """Look for the rows of the target."""
        self._rows = rows
        self._given = GivenDrafts(rows)

    @property
    def rows(self) -> Rows:
        """See Drafter."""
        return self._rows

    def guide(self, guides: RowGuides) -> None:
        """See Drafter."""
        self._given.guides = guides

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._given.begin_round(plan)

    @inference
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """See Drafter."""
        device = self._rows.lengths.device
        if plan.draft_len == 0:
            return no_draft(plan, device)
        rows = kept_integers(plan.decode_rows.tolist(), device)
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = max(1, self._rows_at_a_time(columns, plan.draft_len))
        starts = range(0, len(rows), share)
        found = [self._look_up(rows[start : start + share], plan.draft_len, columns) for start in starts]
        tokens, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        return draft_of_paths(plan, Continuations(tokens, counts), self._given.propose(plan))

    @abstractmethod
    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """For how many rows to look at once, so that memory stays bounded; 0 is taken for 1."""

    @abstractmethod
    def _look_up(self, rows: Tensor, draft_len: int, columns: int) -> Continuations:
        """What may follow some rows.

        Args:
            rows: [R] int64.
            draft_len: K, tokens of each continuation at most.
            columns: upper bound of the rows' lengths, which the host knows.
        """
