"""Drafts that came with requests: for as long as a row's output is the start of one, what follows there is proposed.

A client may know better than any model what comes: it has an earlier answer to nearly the same prompt, or has run a
draft model of its own. Its tokens are proposals without probabilities, one-hot distributions, as those of prompt lookup
are. Rows are compared on the device, so that a plan may be sent before the verdict of the round before is known, and no
rank has to be told how far a row has followed its draft. It knows rows by protocol. It does not know engines.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trtrun.core.nouns import RoundPlan, RowAdmission
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.protocols import Rows
from trtrun.tensors import device_integers, kept_integers


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


class GivenDrafts:
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
        """What the given drafts say for the plan's decode rows, and what must follow.

        Returns:
            tokens: [decode_rows, draft_len] int64 on the rows' device.
            is_given: [decode_rows, draft_len] bool: which of them are from a given draft, or must follow, in each row
                the first ones; the others are any token.
            None where no row of the plan can have one.
        """
        given = self._of_requests(plan)
        forced = None if self.guides is None else self.guides.forced(plan)
        if given is None or forced is None:
            return forced if given is None else given
        return torch.where(forced[1], forced[0], given[0]), forced[1] | given[1]

    def _of_requests(self, plan: RoundPlan) -> tuple[Tensor, Tensor] | None:
        """See `propose`: of the given drafts alone."""
        of_plan = set(plan.given_rows) & self._drafts.keys() if plan.given_rows else ()
        if not of_plan or not plan.draft_len:
            return None
        listed = plan.decode_rows.tolist()
        picks = [index for index, row in enumerate(listed) if row in of_plan]
        drafts, ends, starts = self._pack(tuple(listed[index] for index in picks))
        device, draft_len = drafts.device, plan.draft_len
        rows, places = (kept_integers(one, device) for one in ([listed[index] for index in picks], picks))
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


class HostGivenDrafts:
    """The same where the host knows every row's tokens, as on draft ranks that draft ahead."""

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
