"""Completions: what was asked for and what came of it, and what chunks report of a prompt's tokens.

A completion is plain state: the scheduler changes it, the engine core makes deltas of it. It knows no rows of others,
ranks or tensors.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trtrun.core.guide import GuideStart
from trtrun.core.nouns import FinishReason, LogitsPart, Request, ScoredPart
from trtrun.core.outputs import Logits, PromptLogprobs, join_logits
from trtrun.core.request_statistics import RequestStatistics
from trtrun.kvcache.block_table import BlockTable
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.matches import OwnMatch
from trtrun.tokens.detokenizer import ROOT, AhoCorasick, CompletionText

NO_ROW = -1


class PromptLogits:
    """The target's logits behind a prompt's tokens: what is there, and what is still to be computed. It outlives
    preemption.

    Attributes:
        num_reported: leading positions whose logits are there. Their keys and values may come from the cache; those of
            others must be computed, as only then there are logits.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        """Begin with none, of a prompt of so many tokens."""
        self._num_positions = num_prompt_tokens
        self._untold: Logits | None = None
        self.num_reported = 0

    @property
    def is_whole(self) -> bool:
        """Whether those of all positions are there."""
        return self.num_reported == self._num_positions

    def part_of(self, start: int, length: int) -> LogitsPart | None:
        """What a chunk that begins at `start` has to report; None for nothing."""
        first, end = max(start, self.num_reported), min(start + length, self._num_positions)
        return LogitsPart(first, end - first) if first < end else None

    def take(self, logits: np.ndarray) -> None:
        """Add those of the next positions, [positions, vocab] float32. They are copied."""
        self._untold = join_logits([self._untold, Logits(logits.shape[1], (logits.tobytes(),))])
        self.num_reported += len(logits)

    def take_new(self) -> Logits | None:
        """Logits that came since the last call; None where none did."""
        found, self._untold = self._untold, None
        return found


class PromptScores:
    """Log probabilities of a prompt's tokens: what is there, and what is still to be computed. It outlives preemption.

    Attributes:
        num_scored: leading positions whose numbers are there. Their keys and values may come from the cache; those of
            others must be computed, as only then there are logits.
    """

    def __init__(self, num_prompt_tokens: int, alternatives: int) -> None:
        """Begin with none, of a prompt of so many tokens: nothing is said of its first."""
        self._num_positions = num_prompt_tokens - 1
        self._alternatives = alternatives
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.num_scored = 0

    @property
    def is_whole(self) -> bool:
        """Whether all positions are scored."""
        return self.num_scored == self._num_positions

    def part_of(self, start: int, length: int) -> ScoredPart | None:
        """What a chunk that begins at `start` has to score; None for nothing."""
        first, end = max(start, self.num_scored), min(start + length, self._num_positions)
        return ScoredPart(first, end - first, self._alternatives) if first < end else None

    def take(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Add what the next positions' logits said, [positions, 1 + alternatives or more] each."""
        width = 1 + self._alternatives
        self._ids.append(ids[:, :width].astype(np.int32))
        self._values.append(values[:, :width].astype(np.float32))
        self.num_scored += len(ids)

    def whole(self) -> PromptLogprobs:
        """All of it."""
        ids, values = (b"".join(part.tobytes() for part in parts) for parts in (self._ids, self._values))
        return PromptLogprobs(1 + self._alternatives if not self._ids else self._ids[0].shape[1], ids, values)


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
        is_drafted_for: whether tokens are proposed for the row.
        has_draft_kv: whether the draft store has keys and values of the row; it may lack what was not fed yet.
        is_fed_late: whether that store lacks the row's prompt until tokens are drafted for it.
        num_admitted_tokens: length of `token_ids` when it got its row, all of which prefill computes.
        num_prefilled: how many of them were reused or planned so far; equal means that the row decodes.
        num_pending_rounds: plans without results that give this row tokens, each of them at least one.
        num_pending_tokens: most tokens that those plans can give.
        num_missed_rounds: rounds that the draft engine sat out since it last fed the row; each gave one token. Where
            heads are fed in every round: those without a draft since the last one with.
        num_unfed: tokens at the row's end that the draft store lacks when the next plan begins, at most.
        last_accepted: draft tokens that the last round accepted.
        most_drafted: most tokens to draft for it in a round.
        group: of completions that were asked for together, which share their turns (`queue.py`).
        owner: of groups, such as a server's client, among whom rows are shared first.
        has_yielded: whether it has given up its row to another owner: it does so once.
        arrival: its number among those that came.
        num_overtaken: how often another one got a row while this one was next and waited for blocks.
        predicted_output: the draft that came with the request, as long as the output is its start; then empty.
        scores: log probabilities of its prompt, until they are told; None where nobody asked.
        logits: logits of its prompt; None where nobody asked.
        guide_start: where its text is guided, what ranks build before it has a row; None elsewhere.
        match: of its last tokens in its own text; None where drafts are not made of texts.
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
    is_drafted_for: bool = False
    has_draft_kv: bool = False
    is_fed_late: bool = False
    num_admitted_tokens: int = 0
    num_prefilled: int = 0
    num_pending_rounds: int = 0
    num_pending_tokens: int = 0
    num_missed_rounds: int = 0
    num_unfed: int = 0
    last_accepted: int = 0
    most_drafted: int = 0
    predicted_output: tuple[int, ...] = ()
    group: Hashable = None
    owner: Hashable = None
    has_yielded: bool = False
    arrival: int = 0
    num_overtaken: int = 0
    scores: PromptScores | None = None
    logits: PromptLogits | None = None
    guide_start: GuideStart | None = None
    match: OwnMatch | None = None

    @classmethod
    def begin(
        cls,
        request: Request,
        table: BlockTable,
        limits: SchedulerLimits,
        text: CompletionText | None = None,
        stops: AhoCorasick | None = None,
        group: Hashable = None,
        owner: Hashable = None,
        *,
        is_told: bool = True,
    ) -> Completion:
        """A completion that waits, without any output so far.

        Args:
            request, text, stops, group, owner: as of `Scheduler.add`.
            table: without blocks.
            limits: of its length and draft.
            is_told: whether what was asked of its prompt is told; it is not where another engine has done so.
        """
        prompt, sampling = request.prompt_token_ids, request.sampling
        most_output = min(sampling.max_tokens, limits.max_length - len(prompt))
        begun = cls(
            request=request,
            table=table,
            token_ids=list(prompt),
            text=text,
            stops=stops,
            statistics=RequestStatistics(arrival=time.perf_counter()),
            most_drafted=limits.draft_len if sampling.draft_len is None else sampling.draft_len,
            group=("completion", request.request_id) if group is None else group,
            owner=owner,
            predicted_output=sampling.draft_token_ids[:most_output],
        )
        if is_told and sampling.prompt_logprobs is not None:
            begun.scores = PromptScores(len(prompt), sampling.prompt_logprobs)
        if is_told and sampling.return_context_logits:
            begun.logits = PromptLogits(len(prompt))
        return begun

    @property
    def match_kind(self) -> int:
        """The kind of its match (matches.py): 0 where it has none, or wants no drafts."""
        return self.match.kind(self.token_ids) if self.match is not None and self.is_drafted_for else 0

    @property
    def most_cached_tokens(self) -> int:
        """Leading tokens that may come from the cache, as what is to be told of their positions is there."""
        found = len(self.token_ids)
        if self.scores is not None and not self.scores.is_whole:
            found = min(found, self.scores.num_scored)
        if self.reports_prompt:
            assert self.logits is not None
            found = min(found, self.logits.num_reported)
        return found

    @property
    def reports_prompt(self) -> bool:
        """Whether logits of its prompt are still to come."""
        return self.logits is not None and not self.logits.is_whole

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether the row's whole prefill is planned, so that it drafts and verifies from the next plan on."""
        return self.num_prefilled == self.num_admitted_tokens

    @property
    def is_prompt_fed(self) -> bool:
        """Whether the draft store reads the row's prompt as the target does."""
        return self.has_draft_kv and not self.is_fed_late

    @property
    def num_unread(self) -> int:
        """Tokens that prefill computes for the row, and that are not planned yet."""
        return self.num_admitted_tokens - self.num_prefilled

    @property
    def may_follow_predicted_output(self) -> bool:
        """Whether some of the predicted output may be left to verify once the plans that are out have their results."""
        return self.num_output_tokens + self.num_pending_rounds < len(self.predicted_output)

    def may_change_by_length(self, last: int) -> bool:
        """Whether min_tokens or a budget for thoughts may change a token between the next one of the committed output
        and the one at place `last` of the output."""
        first, thoughts = self.num_output_tokens, self.request.lists.thoughts
        if first < self.request.sampling.min_tokens:
            return True
        return thoughts is not None and thoughts.may_be_due(first, last)

    def compare_given_draft(self, num_new_tokens: int) -> None:
        """Forget the predicted output where it does not have the newest tokens, or ends with them."""
        end = self.num_output_tokens
        new = self.token_ids[len(self.token_ids) - num_new_tokens :]
        if list(self.predicted_output[end - num_new_tokens : end]) != new or end >= len(self.predicted_output):
            self.predicted_output = ()

    def finish(self, reason: FinishReason, now: float) -> None:
        """End it, at `now` seconds of `time.perf_counter`; its row and blocks are another's business."""
        self.finish_reason = reason
        self.statistics.finished = now

    @property
    def longest(self) -> int:
        """Upper bound of the row's length once the plans that are out have their results."""
        return len(self.token_ids) + self.num_pending_tokens


NO_PLACE = -1
"""The place of a row that gets no tokens in a round."""


class RowResult(NamedTuple):
    """What one round gave one completion.

    Attributes:
        completion: already updated; its `finish_reason` is set where this round ended it.
        new_token_ids: tokens appended to its output: the verdict's, cut at the token that ended it.
        index_in_verdict: its place in `plan.sampled_rows`, for logprobs and logits; NO_PLACE where it is none of them.
        token_origins: how each of the new tokens came, a letter each; see `request_statistics`.
    """

    completion: Completion
    new_token_ids: list[int]
    index_in_verdict: int
    token_origins: str = ""
