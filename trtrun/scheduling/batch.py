"""The running batch: which row each completion has and which blocks, in order of admission; and rows' parts in plans.

The batch moves rows and blocks and keeps them whole. It knows no ranks, tensors or draft lengths: when to admit or to
make room is decided in `admission.py`.
"""

from __future__ import annotations

import enum
import heapq
from typing import NamedTuple

from trtrun.core.nouns import LoadedAdapter
from trtrun.kvcache.block_table import BlockTable
from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix_cache import NO_ADAPTER, PrefixCache, salted
from trtrun.kvcache.state_snapshots import StateSnapshots
from trtrun.kvcache.window_blocks import WindowBlocks
from trtrun.scheduling.completions import NO_ROW, Completion
from trtrun.scheduling.limits import SchedulerLimits


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
        requests: in order of admission; where blocks are short only the last one is ever preempted, and where places
            are, the last one whose prompt is read.
        num_reporting: of them, those whose tokens' logits are reported.
        pool: the blocks.
        cache: which of them hold reusable tokens.
        windows: places of blocks in layers with windows; None where these keep all.
        snapshots: of states at the ends of blocks; None where there are none.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._free_rows = list(range(limits.max_batch_size))  # a heap: the smallest first keeps buckets of rows small
        self._dropped: list[int] = []
        self._growth = -(-(limits.draft_len + 1) * (limits.plans_ahead + 1) // limits.block_size)
        self._next_epoch = 0
        self.pool = BlockPool(limits.num_blocks)
        self.windows = None
        if limits.windows is not None:
            self.windows = WindowBlocks(limits.num_places, limits.windows, limits.block_size)
        self.snapshots = StateSnapshots(limits.num_snapshots) if limits.num_snapshots else None
        self.cache = PrefixCache(self.pool, limits.enable_block_reuse, self.windows, self.snapshots)
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
        return running.table.match_prefix(running.token_ids, has_draft_kv, running.most_cached_tokens)

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
        if needed + sum(map(self.pool.is_evictable, cached)) > available:
            return None
        return cached if self._has_places_for(len(running.token_ids), cached) else None

    def _has_places_for(self, length: int, cached: list[int]) -> bool:
        """Whether there are places for a prompt of `length` tokens behind `cached`, beside what the rows that read
        theirs may still need, and the growth of all."""
        if self.windows is None or self._limits.windows is None:
            return True
        most, shared = self._limits.windows.blocks_per_row, self.windows.seen_behind(len(cached))
        needed = _num_missing_places(shared, self._num_blocks_of(length), most)
        needed += self.windows.num_evictable_of(cached[shared.start :])
        for running in self.requests:
            if not running.is_decoding:
                held = running.table.placed
                needed += _num_missing_places(held, self._num_blocks_of(running.num_admitted_tokens), most)
        return needed + len(self.requests) * self._growth <= self.windows.num_available

    def _num_blocks_of(self, num_positions: int) -> int:
        return -(-num_positions // self._limits.block_size)

    def may_admit(self, running: Completion) -> bool:
        """Whether there are a row and blocks for a request."""
        return self.has_free_row() and self._fitting(running, has_draft_kv=False) is not None

    def preempt(self, running: Completion) -> None:
        """Take row and blocks from a request, which is to be computed again."""
        self.release(running)
        running.statistics.num_preemptions += 1

    def room(self, running: Completion) -> int:
        """Positions that the row could hold if it took every block that is available, and every place."""
        room = running.table.capacity + self.pool.num_available * self._limits.block_size
        return room if self.windows is None else min(room, self._placed_room(running))

    def _placed_room(self, running: Completion) -> int:
        """Positions that the row would have places for if it took every one that is available."""
        assert self.windows is not None
        return (running.table.placed.stop + self.windows.num_available) * self._limits.block_size

    def give_back_places(self) -> None:
        """Take from rows the places of what no engine looks at any more, before a round is planned.

        That is safe with a plan out, and with draft ranks that are late: each rank executes plans in order, and takes
        in a plan's places before it computes anything of it. So what counts is what this plan and those behind it feed.
        The target feeds a row's newest token and what follows; the row has gained one token at least from each plan
        that is out. The draft engine begins with what its store lacks: no more than the row says, nor, behind a round
        in which it was fed, than such a round leaves.
        """
        if self.windows is None:
            return
        for running in self.requests:
            length = len(running.token_ids) + running.num_pending_rounds
            first = length - 1 if running.is_decoding else running.num_prefilled
            if running.has_draft_kv and (running.is_decoding or running.is_fed_late):
                first = min(first, length - max(running.num_unfed, self._limits.most_unfed(self._limits.draft_len)))
            running.table.give_back_places(first)

    def most_readable(self, running: Completion, most: int) -> int:
        """How many of the next `most` tokens of a row's prompt there is room for."""
        return most if self.windows is None else min(most, self._placed_room(running) - running.num_prefilled)

    def make_room_to_read(self, oldest: Completion, most: int) -> list[Completion]:
        """Hold places for the next `most` tokens of the oldest prompt that is being read, or for as many as there are
        places; where there are none, preempt rows whose prompts are read behind it. Rows that decode come to their end.

        Returns:
            The preempted requests, the most recently admitted first.
        """
        preempted: list[Completion] = []
        if self.windows is None or self._limits.windows is None:
            return preempted
        while self._placed_room(oldest) <= oldest.num_prefilled:
            newest = next(running for running in reversed(self.requests) if not running.is_decoding)
            if newest is oldest:
                return preempted
            self.preempt(newest)
            preempted.append(newest)
        most = min(most, self._limits.windows.chunk)
        oldest.table.hold_places(min(oldest.num_prefilled + most, self._placed_room(oldest)))
        return preempted

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

    def take_places(self) -> list[tuple[int, int]]:
        """Places that blocks got or lost since the last call, which the ranks must be told."""
        return [] if self.windows is None else self.windows.take_changes()

    def drop_all(self) -> None:
        """Have the ranks forget every row and place, also those that this batch never gave away."""
        self._dropped = list(range(self._limits.max_batch_size))
        if self.windows is not None:
            self.windows.forget_all(self._limits.num_blocks)

    def leaks(self) -> list[str]:
        """Blocks and rows that are held, as phrases; empty when the batch is empty and whole."""
        held = sorted(set(range(self._limits.max_batch_size)) - set(self._free_rows))
        beside = [one for places in (self.windows, self.snapshots) if places is not None for one in places.leaks()]
        return self.pool.leaks() + beside + [f"row {row} is held" for row in held]


def _num_missing_places(held: range, end: int, most: int) -> int:
    """Places that a row may still need until it has read `end` blocks, of which it holds at most `most` at a time."""
    return max(0, min(most, end - held.start) - len(held))
