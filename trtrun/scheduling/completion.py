"""One completion from its arrival to its end: what was asked, what came of it, and where it stands in the batch.

Plain state without rules: the scheduler changes it, the engine core makes deltas of it. It knows no rank and no tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from trtrun.core.nouns import FinishReason, Request
from trtrun.core.request_statistics import RequestStatistics
from trtrun.kvcache.tables import BlockTable
from trtrun.tokens.aho_corasick import ROOT, AhoCorasick
from trtrun.tokens.detokenizer import CompletionText

NO_ROW = -1


@dataclass(eq=False, slots=True)
class Completion:
    """One completion of a prompt.

    Attributes:
        request: as it was added.
        table: its KV blocks; empty while it waits.
        token_ids: prompt and committed output.
        text: the output as text; None without a tokenizer.
        stops: finds the sequences of tokens that end it; None without any.
        stop_state: of these, behind the newest token.
        statistics: times are of `time.perf_counter`.
        finish_reason: None until it ends.
        row: its row of the running batch, -1 while it waits and after its end.
        epoch: number of its present admission, counted over all requests; -1 without a row. A result carries the
            epoch of its plan, so results planned before the row was preempted or ended are told apart.
        drafted: whether tokens are proposed for the row.
        followed: whether a draft store follows the row, so that it may lack what it has not fed yet.
        num_admitted_tokens: length of `token_ids` when it got its row, all of which prefill computes.
        num_prefilled: how many of them were reused or planned so far; equal means that the row decodes.
        num_pending_rounds: plans without results that give this row tokens, each of them at least one.
        num_pending_tokens: most tokens that those plans can give.
        num_missed_rounds: rounds that the draft engine sat out since it last fed the row; each gave one token.
        last_accepted: draft tokens that the last round accepted.
        most_drafted: most tokens to draft for it in a round.
        group: of completions that were asked for together, which share their turns (`queue.py`).
        num_overtaken: how often another one got a row while this one was next and waited for blocks.
        given_draft: the draft that came with the request, as long as the output is its start; then empty.
    """

    request: Request
    table: BlockTable
    token_ids: list[int]
    text: CompletionText | None = None
    stops: AhoCorasick | None = None
    stop_state: int = ROOT
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    finish_reason: FinishReason | None = None
    row: int = NO_ROW
    epoch: int = -1
    drafted: bool = False
    followed: bool = False
    num_admitted_tokens: int = 0
    num_prefilled: int = 0
    num_pending_rounds: int = 0
    num_pending_tokens: int = 0
    num_missed_rounds: int = 0
    last_accepted: int = 0
    most_drafted: int = 0
    given_draft: tuple[int, ...] = ()
    group: Hashable = None
    num_overtaken: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the row's whole prefill is planned, so that it drafts and verifies from the next plan on."""
        return self.num_prefilled == self.num_admitted_tokens

    @property
    def num_unread(self) -> int:
        """Of the tokens that prefill computes for the row, those that are not planned yet."""
        return self.num_admitted_tokens - self.num_prefilled

    @property
    def may_follow_given_draft(self) -> bool:
        """Whether some of the given draft may be left to verify once the plans that are out have their results."""
        return self.num_output_tokens + self.num_pending_rounds < len(self.given_draft)

    def compare_given_draft(self, num_new_tokens: int) -> None:
        """Forget the given draft where it does not have the newest tokens, or ends with them."""
        end = self.num_output_tokens
        new = self.token_ids[len(self.token_ids) - num_new_tokens :]
        if list(self.given_draft[end - num_new_tokens : end]) != new or end >= len(self.given_draft):
            self.given_draft = ()

    def finish(self, reason: FinishReason, now: float) -> None:
        """It has ended, at `now` seconds of `time.perf_counter`; its row and blocks are another's business."""
        self.finish_reason = reason
        self.statistics.finished = now

    @property
    def longest(self) -> int:
        """Upper bound of the row's length once the plans that are out have their results."""
        return len(self.token_ids) + self.num_pending_tokens


class RowResult(NamedTuple):
    """What one round gave one completion.

    Attributes:
        completion: already updated; its `finish_reason` is set where this round ended it.
        new_token_ids: tokens appended to its output: the verdict's, cut at the token that ended it.
        index_in_verdict: its place in `plan.sampled_rows`, for logprobs.
        token_origins: how each of the new tokens came, a letter each; see `request_statistics`.
    """

    completion: Completion
    new_token_ids: list[int]
    index_in_verdict: int
    token_origins: str = ""


class Work(enum.Enum):
    """What a plan has a row do."""

    DECODE = enum.auto()
    LAST_CHUNK = enum.auto()
    CHUNK = enum.auto()


class PlannedRow(NamedTuple):
    """One row's part in a plan that has no result yet.

    Attributes:
        completion: whose row it is.
        epoch: its admission when the plan was made.
        work: what the row does.
        draft_len: tokens it verifies, 0 in prefill.
        followed: of the request, when the plan was made.
        num_missed_rounds: rounds, this one included, since it last fed the row.
        end: positions below which the row is written after a CHUNK; 0 for the others.
    """

    completion: Completion
    epoch: int
    work: Work
    draft_len: int
    followed: bool
    num_missed_rounds: int
    end: int
