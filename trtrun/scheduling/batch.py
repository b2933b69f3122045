"""The running batch: which request holds which row and which blocks, in order of admission.

It moves rows and blocks and keeps them whole. It does not know rounds, token budgets or draft lengths: when to admit or
to make room is decided in `admission.py` and `decoding.py`.
"""

from __future__ import annotations

import heapq

from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix import PrefixCache
from trtrun.kvcache.tables import BlockTable
from trtrun.scheduling.completion import NO_ROW, Completion
from trtrun.scheduling.limits import SchedulerLimits


class RunningBatch:
    """Rows and blocks of the requests that run.

    Attributes:
        requests: in order of admission; only the last one is ever preempted.
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

    def new_table(self) -> BlockTable:
        """An empty block table on this batch's pool."""
        return BlockTable(self.pool, self.cache, self._limits.block_size)

    def has_free_row(self) -> bool:
        """Whether another request could get a row."""
        return bool(self._free_rows)

    def num_to_read(self, running: Completion, followed: bool) -> int:
        """Tokens that a waiting request would have to compute if it got a row now: those that are not in the cache."""
        cached = running.table.match_prefix(running.token_ids, in_draft_store=followed)
        return len(running.token_ids) - len(cached) * self._limits.block_size

    def try_admit(self, running: Completion, drafted: bool, followed: bool) -> bool:
        """Give a request a row and blocks for all its tokens, reusing cached ones; False when blocks are short."""
        # What the running rows may grow by until the next commit is left alone: without that, a row let in now would
        # be preempted at once by the rows before it. With no row running all blocks are there for this one.
        available = self.pool.num_available - len(self.requests) * self._growth
        if available <= 0:
            return False
        cached = running.table.match_prefix(running.token_ids, in_draft_store=followed)
        length = len(running.token_ids)
        needed = -(-length // self._limits.block_size) - len(cached)
        # Reused blocks that nobody holds are counted as available but are about to be taken.
        if needed + sum(map(self.pool.is_evictable, cached)) > available:
            return False
        running.table.adopt(cached)
        running.table.reserve(length)
        running.row = heapq.heappop(self._free_rows)
        running.epoch = self._next_epoch
        self._next_epoch += 1
        running.drafted, running.followed = drafted, followed
        running.num_missed_rounds = 0
        running.num_admitted_tokens = length
        running.num_prefilled = len(cached) * self._limits.block_size
        if running.statistics.num_preemptions == 0:
            running.statistics.num_cached_prompt_tokens = running.num_prefilled
        self.requests.append(running)
        return True

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
            self.release(newest)
            newest.statistics.num_preemptions += 1
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
