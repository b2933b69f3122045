"""Masks of a round, filled by matchers: along chains and at the nodes of trees, in threads where there are many.

It knows matchers and bits on the host. It does not know rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from llguidance import LLExecutor, LLMatcher

from trtrun.guiding.host_copies import HostDraft

_MOST_THREADS = 8
_FEW_MASKS = 4
"""Which one thread makes: to wake others takes longer."""
_MOST_SECONDS = 0.5
"""What the masks of one row may take, whatever the lexer finds out on the way and keeps: all rows wait for it."""
_LOOKED_AT = 4
"""Calls in which one thread makes all masks, after one in which several threads took longer than that: which of the
rows it was only one thread can tell."""


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
    """Fills lines of bits, in several threads where there are many.

    Attributes:
        slow_lines: of the last call: the first lines of jobs, or lines, that took far too long, as far as is known.
    """

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        """Masks have `vocab_size` bits, as the grammar engine has it."""
        self.words = -(-vocab_size // 32)
        self._num_threads = min(num_threads, _MOST_THREADS)
        self._executor: LLExecutor | None = None
        self._num_looked_at = 0
        self.slow_lines: Sequence[int] = ()

    def fill(self, bits: torch.Tensor, jobs: Sequence[MaskJob]) -> list[MaskJob]:
        """Write the masks of `jobs` to bits [lines, words] int32 on the host, contiguous; others stay as they are.

        Returns:
            Jobs in which a bound was passed. Their lines allow nothing: what the engine writes there is no answer.
        """
        self._fill(bits, jobs)
        failed = [job for job in jobs if job.matcher.is_error()]
        for job in failed:
            bits[job.line : job.line + 1 + len(job.drafts)] = 0
        return failed

    def consume(self, takes: Sequence[tuple[LLMatcher, int]]) -> list[bool]:
        """Have matchers take a token each; whether they did. One that did not is of no more use."""
        if self._has_threads_for(len(takes)):
            return self._threads().consume_token_par([*takes])
        return [matcher.consume_token(token) for matcher, token in takes]

    def fill_next(self, bits: torch.Tensor, matchers: Mapping[int, LLMatcher]) -> set[int]:
        """Write what may follow `matchers` to the lines of bits [lines, words] int32 that they are of, on the host,
        contiguous; other lines allow nothing.

        Returns:
            Lines of matchers that did not pass a bound; one that did is of no more use, and its line allows nothing.
        """
        where = bits.data_ptr(), 4 * self.words
        watch = _Watch()
        if self._shares_out(len(matchers)):
            self._threads().unsafe_compute_mask_ptr([(one, line) for line, one in matchers.items()], *where, len(bits))
            self._look_at_next(watch)
        else:
            for line, matcher in matchers.items():
                matcher.unsafe_compute_mask_ptr(where[0] + line * where[1], where[1])
                watch.note(line)
        self.slow_lines = watch.slow_lines
        allowed = {line for line, matcher in matchers.items() if not matcher.is_error()}
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

    def _look_at_next(self, watch: _Watch) -> None:
        """Several threads are done: where they took far too long, it is looked at who it is."""
        if watch.waited() > _MOST_SECONDS:
            self._num_looked_at = 1 + _LOOKED_AT

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        return self._executor

    def _fill(self, bits: torch.Tensor, jobs: Sequence[MaskJob]) -> None:
        num_masks, watch = sum(1 + len(job.drafts) for job in jobs), _Watch()
        self.slow_lines = watch.slow_lines
        if self._shares_out(num_masks):
            executor = self._threads()
            where = bits.data_ptr(), 4 * self.words, len(bits)
            alone = [(job.matcher, job.line) for job in jobs if not job.drafts]
            along = [(job.matcher, job.line, job.drafts) for job in jobs if job.drafts]
            if alone:
                executor.unsafe_compute_mask_ptr(alone, *where)
            if along:
                executor.unsafe_compute_mask_ptr_with_draft_token(along, *where)
            self._look_at_next(watch)
            return
        for job in jobs:
            for place in range(1 + len(job.drafts)):
                if place and not job.matcher.try_consume_tokens([job.drafts[place - 1]]):
                    break
                address = bits.data_ptr() + 4 * self.words * (job.line + place)
                job.matcher.unsafe_compute_mask_ptr(address, 4 * self.words)
            watch.note(job.line)


class _Watch:
    """Finds out which lines take far too long. What this thread computes counts, not how long it waits for a busy
    machine.

    Attributes:
        slow_lines: which took longer than they may.
    """

    def __init__(self) -> None:
        self.slow_lines: list[int] = []
        self._began, self._last = time.perf_counter(), time.thread_time()

    def note(self, line: int) -> None:
        """A line is done, by this thread."""
        now = time.thread_time()
        if now - self._last > _MOST_SECONDS:
            self.slow_lines.append(line)
        self._last = now

    def waited(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began


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
