"""In-flight batching: which rows run in the next round, on which blocks, and what a round's result means for them.

Pure bookkeeping of the orchestrator. It knows completions, rows, blocks and lengths; it does not know ranks, models,
tensors or how drafts are verified. `schedule` makes a plan, `commit` takes its result, in the same order; with
`plans_ahead` 1 one plan may be out while the next is made. For a row with results outstanding the scheduler knows its
committed length and an upper bound; blocks and contexts are reserved for the upper bound, so that ranks, which know
the true length from verdicts, never meet a position without a block.

Rows go in turns to those who ask (`queue.py`), and a round's tokens to decoding rows first, then to prompts
(`admission.py`); `results.py` takes in what a round gave. Only the most recently admitted row is ever preempted, or
where places are short of those whose prompts are read, and gets a row again before all that wait, so the oldest row
always makes progress and nothing can wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Hashable, Sequence

import numpy as np

from trtrun.core.guide import GuideStart
from trtrun.core.nouns import WAITS_ALONE, FinishReason, Request, RoundPlan
from trtrun.errors import InvalidRequestError, QueueFullError
from trtrun.scheduling.admission import Admission, Decoding
from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completions import NO_PLACE, NO_ROW, Completion, RowResult
from trtrun.scheduling.guide_registry import GuideOrders, GuideRegistry
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.matches import MatchRecord, OwnMatch
from trtrun.scheduling.planning import PlanBuilder
from trtrun.scheduling.queue import WaitingQueue
from trtrun.scheduling.results import (
    PlannedRound,
    append_tokens,
    check_result,
    commit_chunk,
    commit_logits,
    commit_row,
    commit_scores,
    count_draft,
)
from trtrun.tokens.detokenizer import AhoCorasick, CompletionText


class Scheduler:
    """Rows, blocks and the waiting queue of one job. Not thread-safe: one caller, the orchestrator's loop.

    Attributes:
        limits: what it stays within.
        matches: how often matches of rows went on, where drafts are made of texts.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.matches = MatchRecord()
        self._guides = GuideRegistry()
        self._start_empty()
        self._requests: dict[int, Completion] = {}
        self._outstanding: deque[PlannedRound] = deque()
        self._next_round = 0
        self._speculating = limits.draft_len > 0

    def _start_empty(self) -> None:
        """Begin with no row taken and nobody waiting."""
        self._batch = RunningBatch(self.limits)
        self._waiting = WaitingQueue()
        self._decoding = Decoding(self.limits, self._batch, self._put_back)
        self._admission = Admission(self.limits, self._batch, self._waiting, self._put_back)

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._requests)

    @property
    def slots_in_use(self) -> set[int]:
        """Slots of adapters that requests have, which run or wait."""
        adapters = (completion.request.adapter for completion in self._requests.values())
        return {adapter.slot for adapter in adapters if adapter is not None}

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._batch.requests)

    @property
    def num_decoding(self) -> int:
        """Requests whose prefill is planned to its end: those that draft and verify in the next plan."""
        return len(self._decoding.rows())

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones among them."""
        return len(self._waiting)

    def num_waiting_of(self, group: Hashable) -> int:
        """Requests of a group, as `add` was given it, that never had a row."""
        return self._waiting.num_waiting_of(group)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the rows whose prefill is not planned to its end, reused ones among them."""
        return sum(running.num_admitted_tokens for running in self._batch.requests if not running.is_decoding)

    @property
    def num_preempted(self) -> int:
        """Requests without a row that had one."""
        return self._waiting.num_preempted

    @property
    def num_outstanding(self) -> int:
        """Plans whose results were not committed yet."""
        return len(self._outstanding)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be given to a row: free, or cached and held by nobody."""
        return self._batch.pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose tokens a new row could reuse."""
        return len(self._batch.cache)

    def add(
        self,
        request: Request,
        text: CompletionText | None = None,
        generated: Sequence[int] = (),
        group: Hashable = None,
        stops: AhoCorasick | None = None,
        owner: Hashable = None,
    ) -> Completion:
        """Put a completion into the waiting queue and return its state, which lives on after its end.

        Args:
            request: what is asked; its caller has held it to `limits`, and asked `check_room`.
            text: the output as text, without any so far; None without a tokenizer.
            generated: output tokens of a completion that goes on where another engine left it. They count as output in
                every respect, as those of a preempted completion do.
            group: of completions that were asked for together: rows are shared fairly between groups. None makes it a
                group of its own.
            stops: finds the sequences of tokens that end it; completions may share it. None without any.
            owner: of the group: rows are shared fairly between owners first, and then between an owner's groups.

        Raises:
            InvalidRequestError: it had ended with one of the tokens in `generated`.
            ValueError: its request_id is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id} is in use")
        table = self._batch.new_table(request.adapter, request.sampling.cache_salt)
        # What was asked of the prompt is told with the first token.
        is_told = not generated
        completion = Completion.begin(request, table, self.limits, text, stops, group, owner, is_told=is_told)
        if self.limits.match_rule is not None:
            completion.match = OwnMatch(self.limits.match_rule, self.matches)
        appended, reason = append_tokens(completion, generated, self.limits)
        completion.compare_given_draft(len(appended))
        if reason is not None:
            raise InvalidRequestError(
                f"the completion cannot go on behind {len(generated)} tokens: it ended with token {len(appended)} "
                f"({reason}); another engine with other limits may have made them"
            )
        self._requests[request.request_id] = completion
        if request.sampling.guided is not None:
            completion.guide_start = GuideStart(request.sampling.guided, tuple(appended))
        start = completion.guide_start
        self._waiting.add(completion, is_held=start is not None and not self._guides.add(start))
        return completion

    @property
    def has_guide_news(self) -> bool:
        """Whether `take_guide_orders` may give some, or guides that were ordered are not built yet."""
        return self._guides.has_news

    def take_guide_orders(self) -> GuideOrders:
        """Guides that ranks are to begin or to forget before the next plan, once. No completion gets a row before its
        guide is built."""
        return self._guides.take_orders(self._waiting.held_starts)

    def note_built(self, start: GuideStart) -> None:
        """What was ordered is built on all ranks, or cannot be: those that wait for it may have rows."""
        if self._guides.note_built(start):
            self._waiting.release(start)

    def check_room(self, count: int, owner: Hashable = None) -> None:
        """Refuse `count` more of an owner that cannot all wait.

        Raises:
            QueueFullError: not now.
            InvalidRequestError: never.
        """
        most = self.limits.max_waiting
        if most is not None and count > most:
            raise InvalidRequestError(
                f"{count} completions are asked for at once, but scheduler.max_waiting is {most}: ask for fewer, or "
                "raise it"
            )
        if most is not None and not self._waiting.has_share(owner, count, most):
            raise QueueFullError(
                f"the queue is full: {len(self._waiting)} completions wait, {count} more are asked for and "
                f"scheduler.max_waiting is {most}; send the request again later"
            )

    def decoding_load(self) -> tuple[int, int]:
        """`num_decoding`, and how many of these rows are as if nothing were drafted for them: one that wants fewer
        tokens drafted than the limits' counts as its share of a row."""
        return self._decoding.load()

    def match_kinds(self) -> list[int]:
        """The kinds of the matches of rows that decode; see matches.py."""
        return self._decoding.match_kinds()

    def reset(self) -> None:
        """Forget everything: all requests, plans without results and cached blocks, whatever state they are in.

        For use after an exception that came from the middle of a change. The next plan drops every row at the ranks.
        """
        self._requests.clear()
        self._outstanding.clear()
        self._guides.remove_all()
        self._start_empty()
        self._batch.drop_all()

    def cancel(self, request_id: int) -> bool:
        """End a request at once with reason "cancelled"; False when it is unknown or has ended.

        No `RowResult` tells of it: the completion that `add` returned has `finish_reason` set. Results of its
        outstanding plan are ignored, and its row is dropped by the next plan.
        """
        running = self._requests.get(request_id)
        if running is None:
            return False
        if running.row == NO_ROW:
            self._waiting.remove(running)
        else:
            self._release(running)
        running.finish(FinishReason.CANCELLED, time.perf_counter())
        self._forget(running)
        return True

    def has_begun(self, request_id: int) -> bool:
        """Whether a request has, or had before it was preempted, a row; False when it is unknown or has ended."""
        running = self._requests.get(request_id)
        return running is not None and running.num_admitted_tokens > 0

    def set_speculation(self, enabled: bool) -> None:
        """Turn drafting on or off for requests to come; where the limits' draft_len is 0 it stays off.

        Cached blocks are forgotten at a switch, so that a prompt is read again by whichever is compared with the other.

        Raises:
            RuntimeError: a request runs or waits, or a result is outstanding.
        """
        speculating = enabled and self.limits.draft_len > 0
        if speculating == self._speculating:
            return
        if self._requests or self._outstanding:
            raise RuntimeError(f"speculation can be switched at idle only: {self._describe_work()}")
        self._batch.cache.clear()
        self._speculating = speculating

    def schedule(
        self,
        draft_len: int | None = None,
        *,
        most_drafting: int | None = None,
        takes_given: bool = True,
        drafts_pay: bool = True,
        is_unsure: bool = False,
        drafted_kinds: Collection[int] | None = None,
    ) -> RoundPlan | None:
        """Plan the next round, or None when nothing can run before an outstanding result is committed or a guide is
        built, or at all.

        Every plan that is returned must be executed and then committed, in order. Rows that ended are dropped by the
        next plan in which some row runs: at idle the ranks keep their slots a while, which costs them nothing.

        Args:
            draft_len: most tokens to draft for a row in this round; None for the limits' own.
            most_drafting: rows that they are drafted for, the oldest first; None for all. The draft engine may leave
                the others out of the round.
            takes_given: whether rows whose output is the start of the draft that came with their request have as many
                of its tokens verified as they may, whatever `draft_len` says: these need no drafting.
            drafts_pay: False where nothing has been worth drafting for long: the draft engine then follows few of the
                rows that come, and none that it would have to feed.
            is_unsure: whether nothing is known of drafts yet: the draft engine then reads few prompts before tokens are
                drafted for them.
            drafted_kinds: of matches that tokens are drafted for; None for all rows.

        Raises:
            RuntimeError: called with more than `plans_ahead` results outstanding.
        """
        if len(self._outstanding) > self.limits.plans_ahead:
            raise RuntimeError(f"{len(self._outstanding)} results are due but plans_ahead is {self.limits.plans_ahead}")
        if not self._requests:
            return None
        self._batch.give_back_places()
        self._admission.share_rows()
        plan = PlanBuilder.of(self.limits)
        has_free_row = self._batch.has_free_row()
        decoding = self._decoding.rows()
        has_prompts = len(decoding) < self.num_running or (has_free_row and self._waiting.num_ready > 0)
        most_drafted = self.limits.draft_len if draft_len is None else draft_len
        self._decoding.plan_rows(plan, decoding, most_drafted, most_drafting, takes_given, has_prompts, drafted_kinds)
        if has_prompts:
            self._admission.plan_prompts(plan, self._speculating, drafts_pay=drafts_pay, is_unsure=is_unsure)
        if plan.is_empty:
            if not self._outstanding and (self.num_running or self._waiting.num_ready):
                raise RuntimeError(f"nothing can run and nothing is outstanding: {self._describe_work()}")
            return None
        limits = self.limits
        sampled = plan.settle_drafting(
            limits.most_unfed,
            drafts_pay=drafts_pay,
            may_sit_out=limits.may_sit_out,
            apart=most_drafting is not None,
        )
        self._outstanding.append(PlannedRound(self._next_round, sampled, plan.chunks(), plan.scored(), plan.reported()))
        built = plan.build(self._next_round, self._batch.take_dropped(), self._batch.take_places())
        for admission in built.admissions:
            start = self._requests[admission.request_id].guide_start
            if start is not None:
                self._guides.note_row(start)
        self._next_round += 1
        return built

    def commit(
        self,
        plan: RoundPlan,
        num_tokens: Sequence[int],
        tokens: Sequence[Sequence[int]],
        draft_lens: Sequence[int] | None = None,
        cache_hits: Sequence[bool] | None = None,
        num_suffix_tokens: Sequence[int] | None = None,
        prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None,
        prompt_logits: np.ndarray | None = None,
    ) -> list[RowResult]:
        """Take a round's result: append tokens, end requests, offer verified blocks for reuse.

        Args:
            plan: the oldest plan without a result; a plan without sampled rows is committed too, with empty lists.
            num_tokens: per row of `plan.sampled_rows`, the tokens it gained: accepted + 1; 0 where the target's logits
                were not finite, which ends the completion with reason "error"; less where its guide has to go on
                beside the rounds (`core.nouns.WAITS`): the completion loses its row until that is done.
            tokens: per row, at least that many token ids; what follows is ignored.
            draft_lens: per row, how many draft tokens were verified; None stands for as many as were planned.
            cache_hits: per row, whether its draft was made before the verdict that it follows; None where none are.
            num_suffix_tokens: per row, how many of its first draft tokens were found in texts; None where none were.
            prompt_logprobs: token ids and values of the plan's scored positions, [positions, 1 + alternatives] each;
                None where none are.
            prompt_logits: of the plan's reported positions, [positions, vocab] float32; None where none are.

        Returns:
            One entry for each sampled row whose request is still in that row, in the order of `plan.sampled_rows`, and
            behind these one without tokens for each other prompt of which there are logits.

        Raises:
            RuntimeError: the plan is not the oldest one out, or the lists do not fit it.
        """
        due = self._outstanding[0] if self._outstanding else None
        record = check_result(due, plan.round_index, len(num_tokens), len(tokens))
        self._outstanding.popleft()
        if prompt_logprobs is not None:
            commit_scores(record.scored, *prompt_logprobs)
        reported = [] if prompt_logits is None else commit_logits(record.reported, prompt_logits)
        for planned in record.chunks:
            if planned.completion.epoch == planned.epoch:
                commit_chunk(planned)
        self.matches.begin_round()
        now = time.perf_counter()
        results = []
        for index, planned in enumerate(record.sampled):
            # A result planned before the row was preempted, cancelled or ended belongs to nobody. A preempted row
            # gets the same tokens again: randomness is keyed by position.
            if planned.completion.epoch == planned.epoch:
                if num_tokens[index] < 0:
                    # Its guide has to go on beside the rounds.
                    self._batch.preempt(planned.completion)
                    self._put_back(planned.completion, is_alone=num_tokens[index] == WAITS_ALONE)
                    continue
                verified = planned.draft_len if draft_lens is None else draft_lens[index]
                found = min(num_suffix_tokens[index], verified) if num_suffix_tokens else 0
                is_hit = cache_hits[index] if cache_hits is not None else None
                count_draft(planned, verified, num_tokens[index], found, is_hit)
                row = commit_row(planned, index, verified, num_tokens[index], tokens[index], self.limits, now)
                if row.completion.finish_reason is not None:
                    if row.completion.finish_reason == "error":
                        row.completion.table.withdraw()
                    self._release(row.completion)
                    self._forget(row.completion)
                results.append(row)
        for completion in reported:
            if all(completion is not row.completion for row in results):
                results.append(RowResult(completion, [], NO_PLACE))
        return results

    def _put_back(self, preempted: Completion, *, is_alone: bool = False) -> None:
        """A completion has lost its row. One that is guided waits until ranks have built what it goes on with."""
        old = preempted.guide_start
        if old is None:
            self._waiting.put_back(preempted)
            return
        output = preempted.token_ids[len(preempted.request.prompt_token_ids) :]
        preempted.guide_start = GuideStart(old.guide, tuple(output), is_alone)
        is_built = self._guides.add(preempted.guide_start)
        self._guides.remove(old)
        self._waiting.put_back(preempted, is_held=not is_built)

    def _release(self, running: Completion) -> None:
        self._batch.release(running)
        self._waiting.end_row(running)

    def _forget(self, ended: Completion) -> None:
        del self._requests[ended.request.request_id]
        if ended.guide_start is not None:
            self._guides.remove(ended.guide_start)

    def _describe_work(self) -> str:
        return f"{self.num_running} running, {self.num_waiting} waiting, {self.num_outstanding} results due"

    def idle_is_whole(self) -> bool:
        """Check that no request is left and every block and row is free; True, or an error that says what leaked.

        Raises:
            RuntimeError: a request runs or waits, or a block or row is still held.
        """
        if self._requests:
            raise RuntimeError(f"not idle: {self._describe_work()}")
        leaks = self._batch.leaks()
        if leaks:
            raise RuntimeError(f"idle but not whole: {'; '.join(leaks)}")
        return True
