"""In-flight batching: which rows run in the next round, on which blocks, and what a round's result means for them.

Pure bookkeeping of the orchestrator. It knows completions, rows, blocks and lengths; it does not know ranks, models,
tensors or how drafts are verified. `schedule` makes a plan, `commit` takes its result, in the same order; with
`plans_ahead` 1 one plan may be out while the next is made. For a row with results outstanding the scheduler knows its
committed length and an upper bound; blocks and contexts are reserved for the upper bound, so that ranks, which know
the true length from verdicts, never meet a position without a block.

Rows go in turns to those who ask (`queue.py`), and a round's tokens to decoding rows first, then to prompts
(`admission.py`). Only the most recently admitted row is ever preempted, and gets a row again before all that wait, so
the oldest row always makes progress and nothing can wait for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from trtrun.core import FinishReason, Request, RequestStatistics, RoundPlan, token_origins
from trtrun.detokenizer import CompletionText
from trtrun.errors import InvalidRequestError, QueueFullError
from trtrun.scheduling.admission import Admission
from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completion import NO_ROW, Completion, PlannedRow, RowResult, Work
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import PlanBuilder
from trtrun.scheduling.queue import WaitingQueue
from trtrun.scheduling.stop_rules import append_tokens

_SHARE_OF_PROMPTS = 4
"""One part in so many of a round's tokens is not drafted where prompts wait to be read."""


class _Outstanding(NamedTuple):
    round_index: int
    sampled: list[PlannedRow]
    chunks: list[PlannedRow]


class Scheduler:
    """Rows, blocks and the waiting queue of one job. Not thread-safe: one caller, the orchestrator's loop."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._batch = RunningBatch(limits)
        self._waiting = WaitingQueue()
        self._admission = Admission(limits, self._batch, self._waiting)
        self._requests: dict[int, Completion] = {}
        self._outstanding: deque[_Outstanding] = deque()
        self._next_round = 0
        self._speculating = limits.draft_len > 0

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._batch.requests)

    @property
    def num_decoding(self) -> int:
        """Requests whose prefill is planned to its end: those that draft and verify in the next plan."""
        return sum(running.is_decoding for running in self._batch.requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones among them."""
        return len(self._waiting)

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
    ) -> Completion:
        """Put a completion into the waiting queue and return its state, which lives on after its end.

        Args:
            request: what is asked.
            text: the output as text, without any so far; None without a tokenizer.
            generated: output tokens of a completion that goes on where another engine left it. They count as output in
                every respect, as those of a preempted completion do.
            group: of completions that were asked for together: rows are shared fairly between groups. None makes it a
                group of its own.

        Raises:
            InvalidRequestError: it can never run, wants more drafted than is, or had ended with one of the tokens in
                `generated`.
            QueueFullError: no more may wait; the message holds the numbers.
            ValueError: its request_id is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id} is in use")
        self.limits.check_prompt(len(request.prompt_token_ids))
        most_drafted = request.sampling.draft_len
        self.limits.check_draft_len(most_drafted)
        self.check_room(1)
        completion = Completion(
            request=request,
            table=self._batch.new_table(),
            token_ids=list(request.prompt_token_ids),
            text=text,
            statistics=RequestStatistics(arrival=time.perf_counter()),
            most_drafted=self.limits.draft_len if most_drafted is None else most_drafted,
            group=("completion", request.request_id) if group is None else group,
            given_draft=request.sampling.draft_token_ids[: request.sampling.max_tokens],
        )
        appended, reason = append_tokens(completion, generated, self.limits)
        completion.compare_given_draft(len(appended))
        if reason is not None:
            raise InvalidRequestError(
                f"the completion cannot go on behind {len(generated)} tokens: it ended with token {len(appended)} "
                f"({reason}); another engine with other limits may have made them"
            )
        self._requests[request.request_id] = completion
        self._waiting.add(completion)
        return completion

    def check_room(self, count: int) -> None:
        """Raise QueueFullError unless `count` more may wait."""
        most = self.limits.max_waiting
        if most is not None and len(self._waiting) + count > most:
            raise QueueFullError(
                f"the queue is full: {len(self._waiting)} completions wait, {count} more are asked for and "
                f"scheduler.max_waiting is {most}; send the request again later"
            )

    def decoding_load(self) -> tuple[int, int]:
        """`num_decoding`, and how many of these rows are as if nothing were drafted for them: one that wants fewer
        tokens drafted than the limits' counts as its share of a row."""
        decoding = [running for running in self._batch.requests if running.is_decoding]
        wanted = [running.most_drafted if running.drafted else 0 for running in decoding]
        most = self.limits.draft_len
        return len(wanted), len(wanted) + -sum(wanted) // most if most else 0

    def reset(self) -> None:
        """Forget everything: all requests, plans without results and cached blocks, whatever state they are in.

        For use after an exception that came from the middle of a change. The next plan drops every row at the ranks.
        """
        self._requests.clear()
        self._outstanding.clear()
        self._waiting = WaitingQueue()
        self._batch = RunningBatch(self.limits)
        self._batch.drop_all()
        self._admission = Admission(self.limits, self._batch, self._waiting)

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
        self._finish(running, FinishReason.CANCELLED, time.perf_counter())
        return True

    def has_begun(self, request_id: int) -> bool:
        """Whether a request has, or had before it was preempted, a row; False when it is unknown or has ended."""
        running = self._requests.get(request_id)
        return running is not None and running.num_admitted_tokens > 0

    def set_speculation(self, enabled: bool) -> None:
        """Turn drafting on or off for requests to come; where the limits' draft_len is 0 it stays off.

        Cached blocks are forgotten at a switch: those made while it was off were never written by a draft engine.

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

    def schedule(self, draft_len: int | None = None, *, takes_given: bool = True) -> RoundPlan | None:
        """Plan the next round, or None when nothing can run before an outstanding result is committed, or at all.

        Every plan that is returned must be executed and then committed, in order. Rows that ended are dropped by the
        next plan in which some row runs: at idle the ranks keep their slots a while, which costs them nothing.

        Args:
            draft_len: most tokens to draft for a row in this round; None for the limits' own.
            takes_given: whether rows whose output is the start of the draft that came with their request have as many
                of its tokens verified as they may, whatever `draft_len` says: these need no drafting.

        Raises:
            RuntimeError: called with more than `plans_ahead` results outstanding.
        """
        if len(self._outstanding) > self.limits.plans_ahead:
            raise RuntimeError(f"{len(self._outstanding)} results are due but plans_ahead is {self.limits.plans_ahead}")
        if not self._requests:
            return None
        plan = PlanBuilder(self.limits.max_num_tokens)
        num_decoding = self.num_decoding
        has_free_row = self._batch.has_free_row()
        has_prompts = num_decoding < self.num_running or (has_free_row and len(self._waiting) > 0)
        # Where prompts are to be read, drafts leave them a share of the round: else they might never be.
        kept = num_decoding + (plan.budget // _SHARE_OF_PROMPTS if has_prompts else 0)
        self._plan_decoding(plan, self.limits.draft_len if draft_len is None else draft_len, takes_given, kept)
        if has_prompts:
            self._admission.plan_prompts(plan, self._speculating)
        if plan.is_empty:
            if not self._outstanding:
                raise RuntimeError(f"nothing can run and nothing is outstanding: {self._describe_work()}")
            return None
        plan.settle_drafting()
        self._outstanding.append(_Outstanding(self._next_round, plan.sampled(), plan.chunks()))
        built = plan.build(self._next_round, self._batch.take_dropped())
        self._next_round += 1
        return built

    def _plan_decoding(self, plan: PlanBuilder, draft_len: int, takes_given: bool, kept: int) -> None:
        """Plan the decoding rows; drafts leave `kept` tokens of the budget, one for each of these rows among them."""
        batch = self._batch
        index = 0
        while index < len(batch.requests):  # preemption shortens the list from its end
            running = batch.requests[index]
            index += 1
            if not running.is_decoding:
                continue
            if plan.budget <= 0:
                break
            # Each row further back keeps one token of the budget, so that drafts never keep a row from running.
            follows_given = takes_given and running.given_draft and running.may_follow_given_draft
            wanted = self.limits.draft_len if follows_given else draft_len
            most = self._choose_draft_len(running, min(wanted, max(0, plan.budget - kept)))
            kept -= 1
            if most is None:
                continue
            # The row's last token is written at position longest - 1 at most, its drafts behind it.
            longest = running.longest
            if running.num_pending_rounds and batch.room(running) < longest:
                continue  # the outstanding result will say how much it needs at most, which may be there
            for preempted in batch.make_room(running, longest):
                self._waiting.put_back(preempted)
            if running.row == NO_ROW:
                break
            most = min(most, batch.room(running) - longest)
            plan.add_blocks(running, running.table.reserve(longest + most))
            plan.decode(running, most)

    def _choose_draft_len(self, running: Completion, most: int) -> int | None:
        """Tokens to draft for a row, or None to leave it out until its outstanding result is known."""
        longest = running.longest
        left_in_context = self.limits.max_length - longest
        # Each outstanding round gives one token at least; with none left the row is sure to end at that commit.
        left_to_generate = running.request.sampling.max_tokens - running.num_output_tokens - running.num_pending_rounds
        if left_in_context <= 0 or left_to_generate <= 0:
            return None
        if not running.drafted:
            return 0
        most = min(running.most_drafted, most, left_in_context - 1, left_to_generate - 1)
        if not running.followed or self.limits.draft_max_seq_len is None:
            return most
        left_in_draft = self.limits.draft_max_seq_len - longest
        if left_in_draft < 0:
            # From here on the draft engine's keys and values fall behind, so it cannot come back to this row.
            running.drafted = running.followed = False
            return 0
        return min(most, left_in_draft)

    def commit(
        self,
        plan: RoundPlan,
        num_tokens: Sequence[int],
        tokens: Sequence[Sequence[int]],
        draft_lens: Sequence[int] | None = None,
        foreseen: Sequence[bool] | None = None,
    ) -> list[RowResult]:
        """Take a round's result: append tokens, end requests, offer verified blocks for reuse.

        Args:
            plan: the oldest plan without a result; a plan without sampled rows is committed too, with empty lists.
            num_tokens: per row of `plan.sampled_rows`, the tokens it gained: accepted + 1; 0 where the target's logits
                were not finite, which ends the completion with reason "error".
            tokens: per row, at least that many token ids; what follows is ignored.
            draft_lens: per row, how many draft tokens were verified; None stands for as many as were planned.
            foreseen: per row, whether its draft was made before the verdict that it follows; None where none are.

        Returns:
            One entry for each sampled row whose request is still in that row, in the order of `plan.sampled_rows`.

        Raises:
            RuntimeError: the plan is not the oldest one out, or the lists do not fit it.
        """
        if not self._outstanding or self._outstanding[0].round_index != plan.round_index:
            due = self._outstanding[0].round_index if self._outstanding else "none"
            raise RuntimeError(f"result of round {plan.round_index} but the round due is {due}")
        record = self._outstanding[0]
        if len(num_tokens) != len(record.sampled) or len(tokens) != len(record.sampled):
            raise RuntimeError(
                f"result of round {plan.round_index} has {len(num_tokens)} counts and {len(tokens)} token lists "
                f"for {len(record.sampled)} rows"
            )
        self._outstanding.popleft()
        for planned in record.chunks:
            if planned.completion.epoch == planned.epoch:
                self._commit_blocks(planned, planned.end)
        now = time.perf_counter()
        results = []
        for index, planned in enumerate(record.sampled):
            # A result planned before the row was preempted, cancelled or ended belongs to nobody. A preempted row
            # gets the same tokens again: randomness is keyed by position.
            if planned.completion.epoch == planned.epoch:
                verified = planned.draft_len if draft_lens is None else draft_lens[index]
                if foreseen is not None and planned.draft_len > 0:
                    running = planned.completion
                    running.statistics.foresight.record(running.last_accepted, foreseen[index], verified)
                results.append(self._commit_row(planned, index, verified, num_tokens[index], tokens[index], now))
        return results

    def _commit_row(
        self,
        planned: PlannedRow,
        index: int,
        verified: int,
        num_tokens: int,
        tokens: Sequence[int],
        now: float,
    ) -> RowResult:
        running = planned.completion
        request = running.request
        if not 0 <= num_tokens <= verified + 1 <= planned.draft_len + 1 or len(tokens) < num_tokens:
            raise RuntimeError(
                f"request {request.request_id} got {num_tokens} tokens ({len(tokens)} listed) "
                f"from a round that verified {verified} of {planned.draft_len}"
            )
        running.num_pending_rounds -= 1
        running.num_pending_tokens -= planned.draft_len + 1
        if num_tokens == 0:
            self._release(running)
            self._finish(running, FinishReason.ERROR, now)
            return RowResult(running, [], index)
        running.last_accepted = num_tokens - 1
        if planned.work is Work.DECODE:
            running.statistics.record_round(verified, num_tokens - 1)
        if running.statistics.first_token is None:
            running.statistics.first_token = now
        new_token_ids, reason = append_tokens(running, tokens[:num_tokens], self.limits)
        if running.given_draft:
            running.compare_given_draft(len(new_token_ids))
        # The target has written all but the last token. The draft may lack the one before it too (the bonus hole) and
        # one for each round that it sat out, and writes them at its next catch-up.
        lacking = 2 + planned.num_missed_rounds if planned.followed else 1
        self._commit_blocks(planned, len(running.token_ids) - lacking)
        if reason is not None:
            self._release(running)
            self._finish(running, reason, now)
        return RowResult(running, new_token_ids, index, token_origins(verified, num_tokens)[: len(new_token_ids)])

    def _commit_blocks(self, planned: PlannedRow, num_positions: int) -> None:
        # While a draft store follows rows, blocks of one that it does not follow are in the target's store only.
        has_draft_store = self._speculating and self.limits.draft_max_seq_len is not None
        if planned.followed or not has_draft_store:
            planned.completion.table.commit(planned.completion.token_ids, num_positions)

    def _release(self, running: Completion) -> None:
        self._batch.release(running)
        self._waiting.end_row(running)

    def _finish(self, running: Completion, reason: FinishReason, now: float) -> None:
        running.finish_reason = reason
        running.statistics.finished = now
        del self._requests[running.request.request_id]

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
