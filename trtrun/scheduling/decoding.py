"""Decoding rows of a round: how much is drafted for each, and who gives its blocks to whom where they are short.

Rows are planned in the order of their admission, so that the oldest always makes progress. It knows rows, blocks and
tokens. It does not know prompts, results or how drafts are made.
"""

from __future__ import annotations

from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completion import NO_ROW, Completion
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import PlanBuilder
from trtrun.scheduling.queue import WaitingQueue

_SHARE_OF_PROMPTS = 4
"""One part in so many of a round's tokens is not drafted where prompts wait to be read."""


class Decoding:
    """Plans the decoding rows of rounds."""

    def __init__(self, limits: SchedulerLimits, batch: RunningBatch, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._batch = batch
        self._waiting = waiting

    def rows(self) -> list[Completion]:
        """Rows whose prefill is planned to its end, in order of admission."""
        return [running for running in self._batch.requests if running.is_decoding]

    def load(self) -> tuple[int, int]:
        """How many `rows` there are, and how many of them are as if nothing were drafted for them: one that wants fewer
        tokens drafted than the limits' counts as its share of a row."""
        wanted = [running.most_drafted if running.drafted else 0 for running in self.rows()]
        most = self._limits.draft_len
        return len(wanted), len(wanted) + -sum(wanted) // most if most else 0

    def plan_rows(
        self, plan: PlanBuilder, rows: list[Completion], draft_len: int, takes_given: bool, has_prompts: bool
    ) -> None:
        """Plan the decoding rows, the oldest first, and preempt the newest where blocks are short.

        Args:
            plan: nothing is in it yet.
            rows: `rows`.
            draft_len: most tokens to draft for a row.
            takes_given: whether rows have the drafts that came with their requests verified, whatever `draft_len` says.
            has_prompts: whether prompts are to be read in the round.
        """
        batch, limits = self._batch, self._limits
        # Where prompts are to be read, drafts leave them a share of the round: else they might never be. And each row
        # further back keeps one token of the budget, so that drafts never keep a row from running.
        kept = len(rows) + (plan.budget // _SHARE_OF_PROMPTS if has_prompts else 0)
        for running in rows:
            if plan.budget <= 0 or running.row == NO_ROW:  # preempted meanwhile, and so were all behind it
                break
            follows_given = takes_given and running.given_draft and running.may_follow_given_draft
            wanted = limits.draft_len if follows_given else draft_len
            longest = running.longest
            left = max(0, plan.budget - kept) // limits.max_paths
            most = self._choose_draft_len(running, longest, min(wanted, left))
            kept -= 1
            if most is None:
                continue
            # The row's last token is written at position longest - 1 at most, its drafts behind it. In most rounds the
            # blocks that it holds take them all.
            if longest + most > running.table.capacity:
                if running.num_pending_rounds and batch.room(running) < longest:
                    continue  # the outstanding result will say how much it needs at most, which may be there
                for preempted in batch.make_room(running, longest):
                    self._waiting.put_back(preempted)
                if running.row == NO_ROW:
                    break
                most = min(most, batch.room(running) - longest)
                plan.add_blocks(running, running.table.reserve(longest + most))
            plan.decode(running, longest, most)

    def _choose_draft_len(self, running: Completion, longest: int, most: int) -> int | None:
        """Tokens to draft for a row, which may get `longest` tokens long by then, or None to leave it out until its
        outstanding result is known."""
        left_in_context = self._limits.max_length - longest
        # Each outstanding round gives one token at least; with none left the row is sure to end at that commit.
        left_to_generate = running.request.sampling.max_tokens - running.num_output_tokens - running.num_pending_rounds
        if left_in_context <= 0 or left_to_generate <= 0:
            return None
        if not running.drafted:
            return 0
        most = min(running.most_drafted, most, left_in_context - 1, left_to_generate - 1)
        if not running.followed or self._limits.draft_max_seq_len is None:
            return most
        left_in_draft = self._limits.draft_max_seq_len - longest
        if left_in_draft < 0:
            # From here on the draft engine's keys and values fall behind, so it cannot come back to this row.
            running.drafted = running.followed = False
            return 0
        return min(most, left_in_draft)
