"""Who gets a row, and whose prompts are read in a round: what decoding rows leave of its tokens is shared out here.

Completions get rows in the queue's order (`queue.py`). Of a round's tokens half are the oldest prompt's that is being
read, so that every prompt comes to its end; the others go to the prompt with the least left to read, and one that waits
is admitted when it would be that. So a short prompt does not wait behind a long one, and prompts of one length are read
one after the other, which is the earliest for each but the last. No prompt is admitted before it is read: by then more
of it may be in the cache. (Shortest remaining work first, with a share for the oldest against starvation.)

It knows completions, blocks and tokens. It does not know drafts, results or ranks.
"""

from __future__ import annotations

import time
from itertools import islice

from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completion import Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import PlanBuilder
from trtrun.scheduling.queue import WaitingQueue

_MOST_LOOKED_AT = 8
"""Waiting completions that are looked at in a round for one that may go ahead of those before it."""


class Admission:
    """Plans the prompts of rounds."""

    def __init__(self, limits: SchedulerLimits, batch: RunningBatch, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._batch = batch
        self._waiting = waiting

    def plan_prompts(self, plan: PlanBuilder, speculating: bool) -> None:
        """Fill the rest of a round with prompts, of rows and of completions that get one now.

        Args:
            plan: the decoding rows are in it.
            speculating: whether tokens may be drafted for the rows that are admitted.
        """
        if plan.budget <= 0:
            return
        reading = [running for running in self._batch.requests if not running.is_decoding]
        if not reading:
            self._admit(plan, plan.budget, None, speculating)
            return
        oldest = reading[0]
        kept = min(oldest.num_unread, -(-plan.budget // 2))
        for running in sorted(reading, key=lambda running: running.num_unread):
            self._admit(plan, plan.budget - kept, running.num_unread, speculating)
            if running is oldest:
                kept = 0
            most = plan.budget - kept
            if plan.takes_prompts(most) or (running is oldest and most > 0):
                plan.prefill(running, most)
        self._admit(plan, plan.budget, None, speculating)

    def _admit(self, plan: PlanBuilder, budget: int, below: int | None, speculating: bool) -> None:
        """Admit completions in turn, and read what fits into `budget` tokens of their prompts; with `below` only those
        with fewer tokens to read."""
        end = plan.budget - budget
        while plan.takes_prompts(plan.budget - end) and self._waiting and self._batch.has_free_row():
            admitted = self._admit_one(below, speculating)
            if admitted is None:
                return
            if admitted.statistics.admitted is None:
                admitted.statistics.admitted = time.perf_counter()
            plan.admit(admitted)
            plan.prefill(admitted, plan.budget - end)

    def _admit_one(self, below: int | None, speculating: bool) -> Completion | None:
        """Give a row to the first in turn that may have one now, and return it."""
        draft_context = self._limits.draft_max_seq_len
        blocked: Completion | None = None
        for running in islice(self._waiting.in_turn(), _MOST_LOOKED_AT):
            fits = draft_context is None or len(running.token_ids) + 2 <= draft_context
            drafted = speculating and running.most_drafted > 0 and fits
            followed = drafted and draft_context is not None
            if below is not None and self._batch.num_to_read(running, followed) >= below:
                continue
            if self._batch.try_admit(running, drafted, followed):
                self._waiting.take(running)
                if blocked is not None:
                    blocked.num_overtaken += 1
                return running
            # It waits for blocks. Others may take some meanwhile, but not for ever.
            if running.num_overtaken >= self._limits.max_batch_size:
                return None
            blocked = blocked or running
        return None
