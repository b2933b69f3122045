"""Drafts made of continuations that were found somewhere, predicted outputs that came with requests, and what methods
have in common that look for continuations in the target's rows.

A client may know better than any model what comes: it has an earlier answer to nearly the same prompt, or has run a
draft model of its own. For as long as a row's output is the start of such a predicted output, what follows there is
proposed, without probabilities (one-hot distributions), as in prompt lookup. Rows are compared on the device, so that a
plan may be sent before the verdict of the round before is known, and no rank has to be told how far a row has followed
its predicted output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from trtrun.core.nouns import Draft, RoundPlan, RowAdmission
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.protocols import Rows
from trtrun.tensors import cached_range, cached_tensor, device_integers, inference


def usable_draft(admission: RowAdmission, vocab_size: int | None) -> list[int]:
    """The draft that a request came with, up to the first id that is not below `vocab_size`; None takes all."""
    tokens: list[int] = admission.draft_tokens.tolist()
    if vocab_size is None:
        return tokens
    return tokens[: next((place for place, token in enumerate(tokens) if token >= vocab_size), len(tokens))]


def with_certain_tokens(probs: Tensor, tokens: Tensor, is_given: Tensor) -> Tensor:
    """draft_probs [R, K, V] in which the tokens [R, K] that are given have a probability of 1."""
    certain = torch.zeros_like(probs).scatter_(2, tokens.unsqueeze(2), 1.0)
    return torch.where(is_given.unsqueeze(2), certain, probs)


class PredictedOutputs:
    """What requests said would follow their prompts, by row, where a drafter proposes for them; and before that what
    must follow, where a row is guided.

    Attributes:
        guides: of the rows; None where nobody asks them.
    """

    def __init__(self, rows: Rows, vocab_size: int | None = None) -> None:
        """Compare with `rows`; ids from `vocab_size` on are never proposed, as a draft model does not have them."""
        self._rows = rows
        self._vocab_size = vocab_size
        self._drafts: dict[int, tuple[Tensor, int]] = {}
        self._packed: tuple[tuple[int, ...], Tensor, Tensor, Tensor] | None = None
        self.guides: RowGuides | None = None

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        for row in plan.dropped_rows:
            self._forget(row)
        for admission in plan.admissions:
            self._forget(admission.row)
            draft = usable_draft(admission, self._vocab_size)
            if draft:
                tokens = device_integers(draft, self._rows.lengths.device)
                self._drafts[admission.row] = tokens, admission.num_prompt_tokens

    def propose(self, plan: RoundPlan) -> tuple[Tensor, Tensor] | None:
        """What the predicted outputs say for the plan's decode rows, and what must follow.

        Returns:
            tokens: [decode_rows, draft_len] int64 on the rows' device.
            is_given: [decode_rows, draft_len] bool: which of them are from a predicted output, or must follow, in each
                row the first ones; the others are any token.
            None where no row of the plan can have one.
        """
        given = self._of_requests(plan)
        forced = None if self.guides is None else self.guides.forced(plan)
        if given is None or forced is None:
            return forced if given is None else given
        return torch.where(forced[1], forced[0], given[0]), forced[1] | given[1]

    def _of_requests(self, plan: RoundPlan) -> tuple[Tensor, Tensor] | None:
        """Propose what predicted outputs say alone, as `propose` does."""
        of_plan = set(plan.predicted_output_rows) & self._drafts.keys() if plan.predicted_output_rows else ()
        if not of_plan or not plan.draft_len:
            return None
        listed = plan.decode_rows.tolist()
        picks = [index for index, row in enumerate(listed) if row in of_plan]
        drafts, ends, starts = self._pack(tuple(listed[index] for index in picks))
        device, draft_len = drafts.device, plan.draft_len
        rows, places = (cached_tensor(one, device) for one in ([listed[index] for index in picks], picks))
        token_ids, width = self._rows.token_ids, drafts.shape[1]
        behind = (self._rows.lengths[rows] - starts).unsqueeze(1)
        columns = torch.arange(self._num_compared(of_plan, plan.max_context), device=device)
        output = token_ids[rows.unsqueeze(1), (starts.unsqueeze(1) + columns).clamp(max=token_ids.shape[1] - 1)]
        holds = ((output == drafts[:, : len(columns)]) | (columns >= behind)).all(dim=1, keepdim=True)
        ahead = behind + torch.arange(draft_len, device=device)
        tokens = torch.zeros((len(listed), draft_len), dtype=torch.int64, device=device)
        is_given = torch.zeros((len(listed), draft_len), dtype=torch.bool, device=device)
        tokens[places] = drafts.gather(1, ahead.clamp(max=width - 1))
        is_given[places] = holds & (ahead < ends.unsqueeze(1))
        return tokens, is_given

    def _num_compared(self, rows: Collection[int], max_context: int) -> int:
        """Tokens of output that any of the rows may have, at most those of the longest draft: one long draft makes the
        others no wider than that. `max_context` bounds the rows' lengths."""
        drafts = [self._drafts[row] for row in rows]
        longest = max(len(tokens) for tokens, _ in drafts)
        return min(longest, max(0, max_context - min(start for _, start in drafts)))

    def _pack(self, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts [rows, longest] int64, padded with 0, their lengths [rows], and where they start in their rows."""
        if self._packed is None or self._packed[0] != rows:
            drafts = [self._drafts[row] for row in rows]
            device = drafts[0][0].device
            ends, starts = ([len(tokens) for tokens, _ in drafts], [start for _, start in drafts])
            packed = pad_sequence([tokens for tokens, _ in drafts], batch_first=True)
            self._packed = rows, packed, device_integers(ends, device), device_integers(starts, device)
        return self._packed[1:]

    def _forget(self, row: int) -> None:
        if self._drafts.pop(row, None) is not None:
            self._packed = None


class HostPredictedOutputs:
    """Predicted outputs where the host knows every row's tokens, as on draft ranks that draft ahead."""

    def __init__(self, vocab_size: int) -> None:
        """Ids from `vocab_size` on are never proposed, as the draft model does not have them."""
        self._vocab_size = vocab_size
        self._drafts: dict[int, tuple[list[int], int]] = {}

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        for row in plan.dropped_rows:
            self._drafts.pop(row, None)
        for admission in plan.admissions:
            self._drafts[admission.row] = usable_draft(admission, self._vocab_size), admission.num_prompt_tokens

    def learn(self, row: int, length: int, tokens: list[int]) -> None:
        """A row of `length` tokens gains these: it may not follow its draft any longer."""
        if row in self._drafts and self.behind(row, length, len(tokens)) != tokens:
            del self._drafts[row]

    def behind(self, row: int, length: int, most: int) -> list[int]:
        """What the row's draft says behind its first `length` tokens, `most` of it; none where it says nothing."""
        draft, start = self._drafts.get(row, ((), 0))
        return list(draft[length - start : length - start + most])


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
        given: what `PredictedOutputs.propose` says.
    """
    tokens, counts = found
    device, max_paths = tokens.device, tokens.shape[1]
    most = cached_tensor(plan.draft_lens.clip(min=0).tolist(), device)
    if given is not None:
        num_given = given[1].sum(dim=1)
        agrees = ((tokens[:, 0] == given[0]) | ~given[1]).all(dim=1)
        is_given = (num_given > 0) & ~(agrees & (counts[:, 0] >= num_given))
        tokens[:, 0] = torch.where(is_given.unsqueeze(1), given[0], tokens[:, 0])
        counts[:, 0] = torch.where(is_given, num_given, counts[:, 0])
    if max_paths == 1:
        return Draft(tokens[:, 0], torch.minimum(counts[:, 0], most))
    nodes = cached_range(0, max_paths * plan.draft_len, device).view(1, max_paths, -1)
    steps = cached_range(0, plan.draft_len, device)
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
        self._given = PredictedOutputs(rows)

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
        device = self._rows.lengths.device
        if plan.draft_len == 0:
            return no_draft(plan, device)
        rows = cached_tensor(plan.decode_rows.tolist(), device)
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = max(1, self._rows_at_a_time(columns, plan.draft_len))
        starts = range(0, len(rows), share)
        found = [self._look_up(rows[start : start + share], plan.draft_len, columns) for start in starts]
        tokens, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        return draft_of_paths(plan, Continuations(tokens, counts), self._given.propose(plan))

    @abstractmethod
    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """Rows to look at at once, so that memory stays bounded; 0 is taken for 1."""

    @abstractmethod
    def _look_up(self, rows: Tensor, draft_len: int, columns: int) -> Continuations:
        """What may follow some rows.

        Args:
            rows: [R] int64.
            draft_len: K, tokens of each continuation at most.
            columns: upper bound of the rows' lengths, which the host knows.
        """
