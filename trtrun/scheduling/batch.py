"""Completions and the running batch: what was asked for and what came of it, which row each has and which blocks, in
order of admission.

A completion is plain state: the scheduler changes it, the engine core makes deltas of it. The batch moves rows and
blocks and keeps them whole. Neither knows ranks, tensors or draft lengths: when to admit or to make room is decided in
`admission.py`.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from trtrun.core.guide import GuideStart
from trtrun.core.nouns import FinishReason, LoadedAdapter, Request
from trtrun.core.request_statistics import RequestStatistics
from trtrun.kvcache.blocks import NO_ADAPTER, BlockPool, BlockTable, PrefixCache, salted
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.matches import OwnMatch
from trtrun.scheduling.prompt_results import PromptLogits, PromptScores
from trtrun.tokens.detokenizer import ROOT, AhoCorasick, CompletionText

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
        has_draft_kv: of the completion, when the plan was made.
        num_unfed: tokens at the row's end that the draft store may lack when the plan has run.
        end: positions below which the row is written after a CHUNK; 0 for the others.
    """

    completion: Completion
    epoch: int
    work: Work
    draft_len: int
    has_draft_kv: bool
    num_unfed: int
    end: int


class ScoredRow(NamedTuple):
    """How many positions of a prompt a plan without a result tells something of, whose, and its admission
    then."""

    completion: Completion
    epoch: int
    num_positions: int


class RunningBatch:
    """Rows and blocks of the requests that run.

    Attributes:
        requests: in order of admission; where blocks are short only the last one is ever preempted.
        num_reporting: of them, those whose tokens' logits are reported.
        pool: the blocks.
        cache: which of them hold reusable tokens.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._free_rows = list(range(limits.max_batch_size))  # a heap: the smallest first keeps buckets of rows small
        self._dropped: list[int] = []
        self._growth = -(-(limits.draft_len + 1) * (limits.plans_ahead + 1) // limits.block_size)
        self._next_epoch = 0
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.enable_block_reuse)
        self.requests: list[Completion] = []
        self.num_reporting = 0

    def new_table(self, adapter: LoadedAdapter | None = None, salt: str | None = None) -> BlockTable:
        """An empty block table on this batch's pool, for a request with an adapter or none; its blocks are shared with
        requests of the same salt."""
        root = salted(NO_ADAPTER if adapter is None else adapter.key, salt)
        return BlockTable(self.pool, self.cache, self._limits.block_size, self._limits.num_behind, root)

    def has_free_row(self) -> bool:
        """Whether another request could get a row."""
        return bool(self._free_rows)

    def num_to_read(self, running: Completion, has_draft_kv: bool) -> int:
        """Tokens that a waiting request would have to compute if it got a row now: those that are not in the cache."""
        cached = self._cached(running, has_draft_kv)
        return len(running.token_ids) - len(cached) * self._limits.block_size

    def _cached(self, running: Completion, has_draft_kv: bool) -> list[int]:
        """Cached blocks that the request can start with: where its prompt is scored, or its logits are reported, those
        of which there is all."""
        cached = running.table.match_prefix(running.token_ids, in_draft_store=has_draft_kv)
        return cached[: running.most_cached_tokens // self._limits.block_size]

    def try_admit(
        self, running: Completion, is_drafted_for: bool, has_draft_kv: bool, is_fed_late: bool = False
    ) -> bool:
        """Give a request a row and blocks for all its tokens, reusing cached ones; False when blocks are short."""
        cached = self._fitting(running, has_draft_kv)
        if cached is None:
            return False
        length = len(running.token_ids)
        running.table.adopt(cached)
        running.table.reserve(length)
        running.row = heapq.heappop(self._free_rows)
        running.epoch = self._next_epoch
        self._next_epoch += 1
        running.is_drafted_for, running.has_draft_kv, running.is_fed_late = is_drafted_for, has_draft_kv, is_fed_late
        running.num_missed_rounds = 0
        running.num_admitted_tokens = length
        running.num_prefilled = len(cached) * self._limits.block_size
        running.num_unfed = self._limits.most_unfed(0) + (length - running.num_prefilled if is_fed_late else 0)
        if running.statistics.num_preemptions == 0:
            running.statistics.num_cached_prompt_tokens = running.num_prefilled
        self.requests.append(running)
        self.num_reporting += running.request.sampling.return_generation_logits
        return True

    def _fitting(self, running: Completion, has_draft_kv: bool) -> list[int] | None:
        """Cached blocks that the request can start with, where there are blocks for the rest; None where there are
        not."""
        # What the running rows may grow by until the next commit is left alone: without that, a row let in now would
        # be preempted at once by the rows before it. With no row running all blocks are there for this one.
        available = self.pool.num_available - len(self.requests) * self._growth
        if available <= 0:
            return None
        cached = self._cached(running, has_draft_kv)
        needed = -(-len(running.token_ids) // self._limits.block_size) - len(cached)
        # Reused blocks that nobody holds are counted as available but are about to be taken.
        return None if needed + sum(map(self.pool.is_evictable, cached)) > available else cached

    def may_admit(self, running: Completion) -> bool:
        """Whether there are a row and blocks for a request."""
        return self.has_free_row() and self._fitting(running, has_draft_kv=False) is not None

    def preempt(self, running: Completion) -> None:
        """Take row and blocks from a request, which is to be computed again."""
        self.release(running)
        running.statistics.num_preemptions += 1

    def room(self, running: Completion) -> int:
        """Positions that the row could hold if it took every block that is available."""
        return running.table.capacity + self.pool.num_available * self._limits.block_size

    def make_room(self, running: Completion, num_positions: int) -> list[Completion]:
        """Preempt the most recently admitted rows until `running` can hold `num_positions`, or is preempted itself.

        Returns:
            The preempted requests, the most recently admitted first; they have neither row nor blocks.

        Raises:
            RuntimeError: the oldest row would have to go, which `SchedulerLimits.max_length` rules out.
        """
        preempted = []
        while running.row != NO_ROW and self.room(running) < num_positions:
            if len(self.requests) == 1:
                raise RuntimeError(f"request {running.request.request_id} alone cannot hold {num_positions} positions")
            newest = self.requests[-1]
            self.preempt(newest)
            preempted.append(newest)
        return preempted

    def release(self, running: Completion) -> None:
        """Take row and blocks from a request.

        An outstanding plan may still write to these blocks while the next plan gives them to another row. That is
        safe: every rank executes plans in order, so the other row writes over what the outstanding plan left, and no
        row reads a position before it has written it. Blocks that stay cached are not written by an outstanding
        plan: they end before the first position that any engine writes again.
        """
        running.table.release()
        self.requests.remove(running)
        self.num_reporting -= running.request.sampling.return_generation_logits
        heapq.heappush(self._free_rows, running.row)
        self._dropped.append(running.row)
        running.row = NO_ROW
        running.epoch = -1
        running.num_pending_rounds = 0
        running.num_pending_tokens = 0

    def take_dropped(self) -> tuple[int, ...]:
        """Rows released since the last call, which the ranks must be told."""
        dropped = tuple(self._dropped)
        self._dropped.clear()
        return dropped

    def drop_all(self) -> None:
        """Have the ranks forget every row, also those that this batch never gave away."""
        self._dropped = list(range(self._limits.max_batch_size))

    def leaks(self) -> list[str]:
        """Blocks and rows that are held, as phrases; empty when the batch is empty and whole."""
        held = sorted(set(range(self._limits.max_batch_size)) - set(self._free_rows))
        return self.pool.leaks() + [f"row {row} is held" for row in held]
