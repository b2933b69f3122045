"""Who gets what of a round: decoding rows first, then those who get a row, and the prompts that are read.

Decoding rows are planned in the order of their admission, so that the oldest always makes progress: how much is drafted
for each, and who gives its blocks to whom where they are short. What they leave of a round's tokens is shared out among
prompts. Completions get rows in the queue's order (`queue.py`). Half of the tokens are the oldest prompt's that is
being read, so that every prompt comes to its end; the others go to the prompt with the least left to read, and one that
waits is admitted when it would be that. So a short prompt does not wait behind a long one, and prompts of one length
are read one after the other, which is the earliest for each but the last. No prompt is admitted before it is read: by
then more of it may be in the cache. (Shortest remaining work first, with a share for the oldest against starvation.)

Before a round is planned, an owner without a row may be given one of another's.

It knows completions, rows, blocks and tokens. It does not know results, ranks, or how drafts are made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from itertools import islice

from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completions import NO_ROW, Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import MOST_FED_LATE, PlanBuilder
from trtrun.scheduling.queue import WaitingQueue

_TRIED = 16
"""Where drafts do not pay the draft store follows one in so many completions: drafts of other texts may."""

_FED_AT_ONCE = 8
"""Rows with a draft whose prompts the draft store reads at once while nothing is known of drafts."""

MOST_ANNOUNCED = 1 << 17
"""Tokens of completions that get a row in one round, beyond those of the first: ranks are told all of them, also where
their keys and values are there and nothing is to be read, and each takes some time in which all rows wait."""

_MOST_LOOKED_AT = 8
"""Waiting completions that are looked at in a round for one that may go ahead of those before it."""


class Admission:
    """Plans the prompts of rounds."""

    def __init__(
        self,
        limits: SchedulerLimits,
        batch: RunningBatch,
        waiting: WaitingQueue,
        put_back: Callable[[Completion], None],
    ) -> None:
        """Plan prompts of `batch`, and of those that wait; `put_back` is told of those that were preempted."""
        self._limits = limits
        self._batch = batch
        self._waiting = waiting
        self._put_back = put_back
        self._num_left = 0
        self._drafts_pay = True
        self._may_feed_late = False

    def share_rows(self) -> None:
        """Where an owner waits that has no row, take one from the owner that has more than an equal part for each: of
        the rows, or where one is free of the blocks. Nobody's last row is taken, one in a round, and from no completion
        twice, so that what is computed again is bounded. Before a round is planned."""
        first, batch = self._waiting.first_without_rows(), self._batch
        if first is None or batch.may_admit(first):
            return
        unread = [running.num_unread for running in batch.requests if not running.is_decoding]
        if unread and batch.num_to_read(first, has_draft_kv=False) >= max(unread):
            return  # shorter prompts are read before it
        lacks_blocks = batch.has_free_row()
        rows, held = Counter[Hashable](), Counter[Hashable]()
        for running in batch.requests:
            rows[running.owner] += 1
            held[running.owner] += running.table.capacity if lacks_blocks else 1
        most = self._limits.num_stored_tokens if lacks_blocks else self._limits.max_batch_size
        owner, part = max(held.items(), key=lambda item: item[1], default=(None, 0))
        if part <= most // self._waiting.num_owners or rows[owner] <= 1:
            return
        newest = next((one for one in reversed(batch.requests) if one.owner == owner and not one.has_yielded), None)
        if newest is not None:
            newest.has_yielded = True
            batch.preempt(newest)
            self._put_back(newest)

    def plan_prompts(
        self, plan: PlanBuilder, speculating: bool, *, drafts_pay: bool = True, is_unsure: bool = False
    ) -> None:
        """Fill the rest of a round with prompts, of rows and of completions that get one now.

        Args:
            plan: the decoding rows are in it.
            speculating: whether tokens may be drafted for the rows that are admitted.
            drafts_pay: False where nothing has been worth drafting for long: then a draft engine follows few of them.
            is_unsure: whether nothing is known of drafts yet: then it reads few prompts before they are drafted for.
        """
        self._drafts_pay = drafts_pay
        # A draft store that reads a prompt late takes no snapshots of it.
        self._may_feed_late = is_unsure and self._limits.may_sit_out and not self._limits.num_snapshots
        if plan.budget <= 0:
            return
        reading = [running for running in self._batch.requests if not running.is_decoding]
        if not reading:
            self._admit(plan, plan.budget, None, speculating)
            return
        oldest = plan.oldest = reading[0]
        kept = min(plan.most_read(oldest), -(-plan.budget // 2))
        for preempted in self._batch.make_room_to_read(oldest, kept):
            reading.remove(preempted)
            self._put_back(preempted)
        for running in sorted(reading, key=lambda running: running.num_unread):
            self._admit(plan, plan.budget - kept, running.num_unread, speculating)
            if running is oldest:
                kept = 0
            most = self._batch.most_readable(running, self._room(plan, running, kept))
            if plan.may_read(running) and (plan.takes_prompts(most) or (running is oldest and most > 0)):
                plan.prefill(running, most)
        self._admit(plan, plan.budget, None, speculating)

    def _room(self, plan: PlanBuilder, running: Completion, kept: int) -> int:
        """Tokens of a prompt that there is room for where `kept` are others': more where the round is for it alone. It
        is read the sooner, the more is read at once; but rows that decode would wait for it, and shorter prompts, too.
        """
        if kept or not plan.is_empty or plan.most_alone <= plan.budget:
            return plan.budget - kept
        waiting = islice(self._waiting.in_turn(), _MOST_LOOKED_AT)
        is_first = all(len(other.token_ids) >= running.num_unread for other in waiting)
        return plan.most_alone if is_first else plan.budget

    def _admit(self, plan: PlanBuilder, budget: int, below: int | None, speculating: bool) -> None:
        """Admit completions in turn, and read what fits into `budget` tokens of their prompts; with `below` only those
        with fewer tokens to read."""
        end = plan.budget - budget
        while plan.takes_prompts(plan.budget - end) and self._waiting and self._batch.has_free_row():
            admitted = self._admit_one(plan, below, speculating)
            if admitted is None:
                return
            if admitted.statistics.admitted is None:
                admitted.statistics.admitted = time.perf_counter()
            plan.admit(admitted)
            plan.prefill(admitted, self._room(plan, admitted, end))

    def _admit_one(self, plan: PlanBuilder, below: int | None, speculating: bool) -> Completion | None:
        """Give a row to the first in turn that may have one now, and return it."""
        draft_context, has_store = self._limits.draft_max_seq_len, self._limits.has_draft_store
        blocked: Completion | None = None
        for running in islice(filter(plan.may_read, self._waiting.in_turn()), _MOST_LOOKED_AT):
            if plan.num_announced and plan.num_announced + len(running.token_ids) > MOST_ANNOUNCED:
                return None
            fits = draft_context is None or len(running.token_ids) + 2 <= draft_context
            is_drafted_for = speculating and running.most_drafted > 0 and fits
            is_left = is_drafted_for and not self._drafts_pay and has_store and not running.predicted_output
            if is_left and ((self._num_left + 1) % _TRIED or self._is_one_tried):
                is_drafted_for = False
            has_draft_kv = is_drafted_for and has_store
            if below is not None and self._batch.num_to_read(running, has_draft_kv) >= below:
                if not self._waiting.has_rows(running.owner):
                    return None  # it is next, however much it has to read, and a row may have been taken for it
                continue
            if self._batch.try_admit(
                running, is_drafted_for, has_draft_kv, has_draft_kv and self._is_fed_late(running)
            ):
                self._num_left += is_left
                self._waiting.take(running)
                if blocked is not None:
                    blocked.num_overtaken += 1
                return running
            # It waits for blocks. Others may take some meanwhile, but not for ever.
            if running.num_overtaken >= self._limits.max_batch_size:
                return None
            blocked = blocked or running
        return None

    @property
    def _is_one_tried(self) -> bool:
        """Whether the draft store follows a row: one is enough to see whether drafts are better than they were."""
        return any(running.has_draft_kv for running in self._batch.requests)

    def _is_fed_late(self, running: Completion) -> bool:
        """Whether the draft store need not read a prompt before tokens are drafted for it."""
        if not self._may_feed_late or len(running.token_ids) > MOST_FED_LATE:
            return False
        return sum(other.is_prompt_fed for other in self._batch.requests) >= _FED_AT_ONCE


_SHARE_OF_PROMPTS = 4
"""One part in so many of a round's tokens is not drafted where prompts wait to be read."""


class Decoding:
    """Plans the decoding rows of rounds."""

    def __init__(self, limits: SchedulerLimits, batch: RunningBatch, put_back: Callable[[Completion], None]) -> None:
        """Plan rows of `batch`; `put_back` is told of those that were preempted."""
        self._limits = limits
        self._batch = batch
        self._put_back = put_back

    def rows(self) -> list[Completion]:
        """Rows whose prefill is planned to its end, in order of admission."""
        return [running for running in self._batch.requests if running.is_decoding]

    def match_kinds(self) -> list[int]:
        """The kinds of the matches of `rows`."""
        return [running.match_kind for running in self.rows()]

    def load(self) -> tuple[int, int]:
        """How many `rows` there are, and how many of them are as if nothing were drafted for them: one that wants fewer
        tokens drafted than the limits' counts as its share of a row."""
        wanted = [running.most_drafted if running.is_drafted_for else 0 for running in self.rows()]
        most = self._limits.draft_len
        return len(wanted), len(wanted) + -sum(wanted) // most if most else 0

    def plan_rows(
        self,
        plan: PlanBuilder,
        rows: list[Completion],
        draft_len: int,
        most_drafting: int | None,
        takes_given: bool,
        has_prompts: bool,
        drafted_kinds: Collection[int] | None = None,
    ) -> None:
        """Plan the decoding rows, the oldest first, and preempt the newest where blocks are short.

        Args:
            plan: nothing is in it yet.
            rows: `rows`.
            draft_len: most tokens to draft for a row.
            most_drafting: rows that these are drafted for; None for all.
            takes_given: whether rows have the drafts that came with their requests verified, whatever `draft_len` says.
            has_prompts: whether prompts are to be read in the round.
            drafted_kinds: of matches that tokens are drafted for; None for all rows.
        """
        batch, limits = self._batch, self._limits
        # Where prompts are to be read, drafts leave them a share of the round: else they might never be. And each row
        # further back keeps one token of the budget, so that drafts never keep a row from running.
        kept = len(rows) + (plan.budget // _SHARE_OF_PROMPTS if has_prompts else 0)
        num_left = len(rows) if most_drafting is None else most_drafting
        for running in rows:
            if plan.budget <= 0 or running.row == NO_ROW:  # preempted meanwhile, and so were all behind it
                break
            follows_given = takes_given and running.predicted_output and running.may_follow_predicted_output
            is_drafted = num_left > 0 and (drafted_kinds is None or running.match_kind in drafted_kinds)
            wanted = limits.draft_len if follows_given else draft_len if is_drafted else 0
            if batch.num_reporting and running.request.sampling.return_generation_logits:
                wanted = min(wanted, limits.longest_reported(batch.num_reporting))
            longest = running.longest
            most = self._choose_draft_len(running, longest, limits.longest_draft(wanted, plan.budget - kept))
            kept -= 1
            if most is None:
                continue
            # The row's last token is written at position longest - 1 at most, its drafts behind it. In most rounds the
            # blocks that it holds take them all.
            if longest + most > running.table.capacity:
                if running.num_pending_rounds and batch.room(running) < longest:
                    continue  # the outstanding result will say how much it needs at most, which may be there
                for preempted in batch.make_room(running, longest):
                    self._put_back(preempted)
                if running.row == NO_ROW:
                    break
                most = min(most, batch.room(running) - longest)
                plan.add_blocks(running, running.table.reserve(longest + most))
                running.table.hold_places(longest + most)
            num_left -= most > 0 and not follows_given
            plan.decode(running, longest, most, limits.num_verified(most))

    def _choose_draft_len(self, running: Completion, longest: int, most: int) -> int | None:
        """Tokens to draft for a row, which may get `longest` tokens long by then, or None to leave it out until its
        outstanding result is known."""
        left_in_context = self._limits.max_length - longest
        # Each outstanding round gives one token at least; with none left the row is sure to end at that commit.
        left_to_generate = running.request.sampling.max_tokens - running.num_output_tokens - running.num_pending_rounds
        if left_in_context <= 0 or left_to_generate <= 0:
            return None
        if not running.is_drafted_for:
            return 0
        most = min(running.most_drafted, most, left_in_context - 1, left_to_generate - 1)
        if not running.has_draft_kv or self._limits.draft_max_seq_len is None:
            return most
        left_in_draft = self._limits.draft_max_seq_len - longest
        if left_in_draft < 0:
            # From here on the draft engine's keys and values fall behind, so it cannot come back to this row.
            running.is_drafted_for = running.has_draft_kv = False
            return 0
        return min(most, left_in_draft)
