"""Masks of a round, filled by matchers: along chains and at the nodes of trees, in threads where there are many.

A request decides how long its guide takes, and all rows wait for the round's own thread. So a round has a budget of
computing time for guides: what is beyond it is left to other threads, and its rows wait for them. Time that the thread
computes counts, not how long it waits for a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from llguidance import LLExecutor, LLMatcher

from trtrun.guiding.host_copies import HostDraft

SECONDS, SECONDS_EACH = 0.005, 0.001
"""Seconds of a round, over all its guided rows, and beyond that of each of them, which is what others take."""


class RoundBudget:
    """The seconds of one round at a time, counted for as long as the process runs."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._whole = self._left = SECONDS
        self._untold = 0.0

    def begin(self, num_rows: int) -> None:
        """A round begins that has so many rows that are guided."""
        self._whole = self._left = SECONDS + num_rows * SECONDS_EACH

    @property
    def is_spent(self) -> bool:
        """Whether the round is to do nothing more for guides."""
        return self._left <= 0

    @property
    def is_short(self) -> bool:
        """Whether the round is to do no more than it has to: drafts can do without."""
        return 2 * self._left <= self._whole

    def spend(self, seconds: float) -> None:
        """So much was computed."""
        self._left -= seconds
        self._untold += seconds

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count what this thread computes meanwhile."""
        started = self._clock()
        try:
            yield
        finally:
            self.spend(self._clock() - started)

    def take_seconds(self) -> float:
        """What was computed since the last call."""
        seconds, self._untold = self._untold, 0.0
        return seconds


_MOST_THREADS = 8
_FEW_MASKS = 4
"""Masks that one thread makes: to wake others takes longer."""
_FEW_TOKENS = 64
"""Tokens that one thread has matchers take: each takes some microseconds."""
_MASKS_EACH = 4
"""Masks that each of several threads makes before the clock is looked at."""
_MOST_SECONDS = 0.5
"""What the masks of one row may take, whatever the lexer finds out on the way and keeps."""
_LONG_SECONDS, _LOOKED_AT = 0.01, 4
"""Calls in which one thread makes all masks, after one in which several threads took that long by the clock for some
masks each: which of the rows it was only one thread can tell, and that of a machine that is busy otherwise none was it.
With many rows one thread takes longer than a round has for guides. So it looks for about one round, and masks of those
that are known to be slow are left to one thread anyway (`MaskMaker.fill`)."""


@dataclass(frozen=True)
class MaskJob:
    """Masks along one row's draft, or of one node: of lines from `line` on, for the place that the matcher has come to
    and those behind each of `drafts`, up to the first that is not allowed.

    Attributes:
        matcher: nobody else's: it is left in error where a bound is passed.
        is_first: whether the first line is of the place behind the row's own tokens.
    """

    matcher: LLMatcher
    line: int
    drafts: list[int]
    is_first: bool


class MaskMaker:
    """Fills lines of bits, in several threads where there are many, as far as the round's budget goes.

    Attributes:
        times: of the last call, of what this thread made alone: the first lines of jobs, or lines, and seconds a mask.
        skipped: of the last call: first lines of jobs, or lines, for which nothing was left of the budget.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        """Masks have `vocab_size` bits, as the grammar engine has it."""
        self.words = -(-vocab_size // 32)
        self._num_threads = min(num_threads, _MOST_THREADS)
        self._executor: LLExecutor | None = None
        self._num_looked_at = 0
        self.times: list[tuple[int, float]] = []
        self.skipped: list[int] = []

    @property
    def slow_lines(self) -> list[int]:
        """First lines of jobs, or lines, of the last call that took far too long, as far as is known."""
        return [line for line, seconds in self.times if seconds > _MOST_SECONDS]

    def fill(
        self,
        bits: torch.Tensor,
        jobs: Sequence[MaskJob],
        budget: RoundBudget | None = None,
        slow: Sequence[MaskJob] = (),
    ) -> list[MaskJob]:
        """Write the masks of `jobs` to bits [lines, words] int32 on the host, contiguous; others stay as they are.
        Those of `slow` come last, and this thread makes them: several would wait for them.

        Where the budget gets short, lines of drafts are left out, and once it is spent whole jobs are (`skipped`): they
        allow nothing.

        Returns:
            Jobs in which a bound was passed. Their lines allow nothing: what the engine writes there is no answer.
        """
        budget = budget or RoundBudget()
        self.times, self.skipped = [], []
        left, jobs = [*jobs], [*jobs, *slow]
        self._share_out(bits, left)
        for job in [*left, *slow]:
            if budget.is_spent or (budget.is_short and not job.is_first):
                self.skipped.append(job.line)
            else:
                self._fill_alone(bits, job, budget)
        skipped = {*self.skipped}
        failed = [job for job in jobs if job.line not in skipped and job.matcher.is_error()]
        for job in jobs if skipped else failed:
            if job.line in skipped or job.matcher.is_error():
                bits[job.line : job.line + 1 + len(job.drafts)] = 0
        return failed

    def consume(self, takes: Sequence[tuple[LLMatcher, int]], budget: RoundBudget) -> list[bool]:
        """Have matchers take a token each; whether they did. One that did not is of no more use."""
        if self._has_threads_for(len(takes)) and len(takes) > _FEW_TOKENS:
            return self._threads().consume_token_par([*takes])
        with budget.spending():
            return [matcher.consume_token(token) for matcher, token in takes]

    def fill_next(
        self, bits: torch.Tensor, matchers: Mapping[int, LLMatcher], budget: RoundBudget | None = None
    ) -> set[int]:
        """Write what may follow `matchers` to the lines of bits [lines, words] int32 that they are of, on the host,
        contiguous; other lines allow nothing, and so do those for which nothing is left of the budget.

        Returns:
            Lines of matchers that did not pass a bound; one that did is of no more use, and its line allows nothing.
        """
        budget = budget or RoundBudget()
        self.times, self.skipped = [], []
        where = bits.data_ptr(), 4 * self.words
        if self._shares_out(len(matchers)):
            started = time.perf_counter()
            self._threads().unsafe_compute_mask_ptr([(one, line) for line, one in matchers.items()], *where, len(bits))
            self._note_threads(time.perf_counter() - started)
        else:
            for line, matcher in matchers.items():
                if budget.is_spent:
                    self.skipped.append(line)
                    continue
                began = time.thread_time()
                matcher.unsafe_compute_mask_ptr(where[0] + line * where[1], where[1])
                self.times.append((line, time.thread_time() - began))
                budget.spend(self.times[-1][1])
        allowed = {line for line, matcher in matchers.items() if line not in self.skipped and not matcher.is_error()}
        for line in range(len(bits)) if len(allowed) < len(bits) else ():
            if line not in allowed:
                bits[line] = 0
        return allowed

    def _has_threads_for(self, num_masks: int) -> bool:
        return self._num_threads > 1 and num_masks > _FEW_MASKS

    def _shares_out(self, num_masks: int) -> bool:
        """Whether several threads are to make masks now."""
        if not self._has_threads_for(num_masks):
            return False
        self._num_looked_at = max(0, self._num_looked_at - 1)
        return not self._num_looked_at

    def _note_threads(self, seconds: float) -> None:
        """Several threads are done: where they took long, it is looked at who it is."""
        if seconds > _LONG_SECONDS:
            self._num_looked_at = 1 + _LOOKED_AT

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        return self._executor

    def _share_out(self, bits: torch.Tensor, left: list[MaskJob]) -> None:
        """Have several threads do the first of the jobs in `left`, where they are many, and take these out."""
        num_left = sum(1 + len(job.drafts) for job in left)
        if not self._shares_out(num_left):
            return
        executor, where = self._threads(), (bits.data_ptr(), 4 * self.words, len(bits))
        while left and not self._num_looked_at:
            part, num_masks = list[MaskJob](), 0
            while left and num_masks < _MASKS_EACH * self._num_threads:
                part.append(left.pop(0))
                num_masks += 1 + len(part[-1].drafts)
            started = time.perf_counter()
            alone = [(job.matcher, job.line) for job in part if not job.drafts]
            along = [(job.matcher, job.line, job.drafts) for job in part if job.drafts]
            if alone:
                executor.unsafe_compute_mask_ptr(alone, *where)
            if along:
                executor.unsafe_compute_mask_ptr_with_draft_token(along, *where)
            self._note_threads(time.perf_counter() - started)

    def _fill_alone(self, bits: torch.Tensor, job: MaskJob, budget: RoundBudget) -> None:
        """Write the masks of a job in this thread."""
        began = last = time.thread_time()
        for place in range(1 + len(job.drafts)):
            if place and (budget.is_short or not job.matcher.try_consume_tokens([job.drafts[place - 1]])):
                break
            address = bits.data_ptr() + 4 * self.words * (job.line + place)
            job.matcher.unsafe_compute_mask_ptr(address, 4 * self.words)
            now = time.thread_time()
            budget.spend(now - last)
            last, num_made = now, place + 1
        self.times.append((job.line, (last - began) / num_made))


def mask_jobs(matcher: LLMatcher, line: int, draft: HostDraft | None, place: int) -> list[MaskJob]:
    """What masks of one row take: along its draft, or for each node of its tree that its grammar lets stand. They are
    made by forks of `matcher`."""
    first = matcher.deep_copy()
    if draft is None or place >= draft.num_rows:
        return [MaskJob(first, line, [], is_first=True)]
    if not draft.is_tree:
        return [MaskJob(first, line, draft.chain(place), is_first=True)]
    jobs, forks = [MaskJob(first, line, [], is_first=True)], {-1: matcher}
    for parent, node, token in draft.edges(place):
        if parent in forks and node not in forks:
            fork = forks[parent].deep_copy()
            if fork.try_consume_tokens([token]):
                forks[node] = fork
                jobs.append(MaskJob(fork.deep_copy(), line + 1 + node, [], is_first=False))
    return jobs
