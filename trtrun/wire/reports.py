"""The byte layout of reports, which come back over the control plane every round.

A fixed layout, no pickles: a header of numbers, then int64, then float32; the header says how many of each. A report
without logprobs costs a few microseconds at either end, while the next plan waits for it. It knows the nouns of `core`
and nothing of MPI: `parallel.control` carries the bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trtrun.core.nouns import TokenLogprobs
from trtrun.warmup_misses import WarmupMisses


class ReportKind(IntEnum):
    """What a report on the control plane is: of a round, what a request is answered with, or that a guide is built, or
    an adapter read."""

    ROUND = 0
    ANSWER = 1
    GUIDE_BUILT = 2
    ADAPTER_READ = 3


class _ReportHeader(NamedTuple):
    """The numbers in front of a report: int64 and float64 (seconds), little-endian."""

    round_index: int
    is_verdict: int
    rows: int
    width: int
    logprob_rows: int
    logprob_width: int
    prompt_rows: int
    prompt_width: int
    vocab_size: int
    logits_rows: int
    prompt_logits: int
    num_guesses: int
    hit_chances: int
    captures: int
    compilations: int
    drafting: float
    transferring: float
    verifying: float
    anticipating: float
    guiding: float


_REPORT_HEADER = struct.Struct("<15q5d")


@dataclass(frozen=True)
class RoundTimes:
    """Seconds that a round spent in each of its phases, on the leader that did the work, and what held it up.

    Attributes:
        drafting: a draft that the target waits for.
        transferring: the target's wait for it, and its way.
        verifying: the forward and the acceptance.
        anticipating: drafting for guesses while the target verifies.
        guiding: what the target leader's thread computed for rows that are guided.
        warmup_misses: what the leader's process captured and compiled in rounds since it told that last.
    """

    drafting: float = 0.0
    transferring: float = 0.0
    verifying: float = 0.0
    anticipating: float = 0.0
    guiding: float = 0.0
    warmup_misses: WarmupMisses = field(default_factory=WarmupMisses)


@dataclass(frozen=True)
class RoundReport:
    """What a leader tells the orchestrator of one round.

    Attributes:
        round_index: of the plan.
        times: the phases that this leader saw; 0 for the others.
        is_verdict: whether it carries tokens (the target leader's does, the draft leader's does not).
        num_tokens: one a sampled row; less of one that waits for its guide
            (`core.nouns.WAITS`).
        draft_lens: one a sampled row: draft tokens that were verified.
        tokens: [sampled_rows][num_tokens] the tokens gained.
        logprobs: for each sampled row that asked, in order, one entry a token gained.
        cache_hits: one a sampled row: whether its draft was made before the verdict that it follows.
        num_suffix_tokens: one a sampled row: how many of its first draft tokens were found in texts, beside a model.
        num_guesses: drafts that a draft leader of its own made ahead.
        hit_chances: how likely a verdict is among one row's guesses, by their number from 1 on; empty in most rounds.
        prompt_ids: [positions, 1 + alternatives] int64 of the plan's scored positions, in order: the prompt's token
            behind each, then the most likely ones; empty where there are none.
        prompt_values: of these the log probabilities, the same shape, float32. Comparisons leave arrays out.
        logits: of the sampled rows that asked, by their places, [num_tokens, vocab] float32.
        prompt_logits: [positions, vocab] float32 of the plan's reported positions, in order; empty without any.
    """

    round_index: int
    times: RoundTimes
    is_verdict: bool
    num_tokens: list[int]
    draft_lens: list[int]
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    cache_hits: list[bool] = field(default_factory=list)
    num_suffix_tokens: list[int] = field(default_factory=list)
    num_guesses: int = 0
    hit_chances: list[float] = field(default_factory=list)
    prompt_ids: np.ndarray = field(default_factory=lambda: _no_rows(2), compare=False)
    prompt_values: np.ndarray = field(default_factory=lambda: _no_rows(2), compare=False)
    logits: dict[int, np.ndarray] = field(default_factory=dict, compare=False)
    prompt_logits: np.ndarray = field(default_factory=lambda: _no_rows(2), compare=False)


def _no_rows(dimensions: int) -> np.ndarray:
    return np.empty((0,) * dimensions, dtype=np.int64)


@dataclass(frozen=True)
class ReportArrays:
    """A report as a leader makes it, in numpy arrays: bytes for another process, lists for the own one.

    Attributes:
        round_index: of the plan.
        times: seconds.
        num_tokens: [rows] of a verdict; None for a report without one, whose other arrays are empty.
        draft_lens: [rows].
        tokens: [rows, width].
        logprob_ids: [logprob_rows, width, 1 + alternatives].
        logprob_values: the same shape.
        cache_hits: [rows] of 0 and 1; see RoundReport for this and what follows.
    """

    round_index: int
    times: RoundTimes
    num_tokens: np.ndarray | None = None
    draft_lens: np.ndarray = field(default_factory=lambda: _no_rows(1))
    tokens: np.ndarray = field(default_factory=lambda: _no_rows(2))
    logprob_ids: np.ndarray = field(default_factory=lambda: _no_rows(3))
    logprob_values: np.ndarray = field(default_factory=lambda: _no_rows(3))
    cache_hits: np.ndarray = field(default_factory=lambda: _no_rows(1))
    num_suffix_tokens: np.ndarray = field(default_factory=lambda: _no_rows(1))
    num_guesses: int = 0
    hit_chances: np.ndarray = field(default_factory=lambda: _no_rows(1))
    prompt_ids: np.ndarray = field(default_factory=lambda: _no_rows(2))
    prompt_values: np.ndarray = field(default_factory=lambda: _no_rows(2))
    logits: dict[int, np.ndarray] = field(default_factory=dict)
    prompt_logits: np.ndarray = field(default_factory=lambda: _no_rows(2))

    def encode(self) -> bytes:
        """The bytes of the report."""
        rows, width = self.tokens.shape
        logprob_rows, _, logprob_width = self.logprob_ids.shape
        prompt_rows, prompt_width = self.prompt_ids.shape
        reported = [*self.logits.values(), self.prompt_logits]
        header = _ReportHeader(
            round_index=self.round_index,
            is_verdict=self.num_tokens is not None,
            rows=rows,
            width=width,
            logprob_rows=logprob_rows,
            logprob_width=logprob_width,
            prompt_rows=prompt_rows,
            prompt_width=prompt_width,
            vocab_size=max(one.shape[1] for one in reported),
            logits_rows=len(self.logits),
            prompt_logits=len(self.prompt_logits),
            num_guesses=self.num_guesses,
            hit_chances=len(self.hit_chances),
            captures=self.times.warmup_misses.captures,
            compilations=self.times.warmup_misses.compilations,
            drafting=self.times.drafting,
            transferring=self.times.transferring,
            verifying=self.times.verifying,
            anticipating=self.times.anticipating,
            guiding=self.times.guiding,
        )
        counts = _no_rows(1) if self.num_tokens is None else self.num_tokens
        parts = [_REPORT_HEADER.pack(*header)]
        cache_hits, found = (
            array if len(array) == len(counts) else np.zeros(len(counts), dtype=np.int64)
            for array in (self.cache_hits, self.num_suffix_tokens)
        )
        places = np.array([*self.logits], dtype=np.int64)
        for array in (
            counts,
            self.draft_lens,
            cache_hits,
            found,
            self.tokens,
            self.logprob_ids,
            self.prompt_ids,
            places,
        ):
            parts.append(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        for array in (self.logprob_values, self.prompt_values, *reported, self.hit_chances):
            parts.append(np.ascontiguousarray(array, dtype=np.float32).tobytes())
        return b"".join(parts)

    def unpack(self) -> RoundReport:
        """The report as the orchestrator reads it."""
        num_tokens: list[int] = [] if self.num_tokens is None else self.num_tokens.tolist()
        return RoundReport(
            round_index=self.round_index,
            times=self.times,
            is_verdict=self.num_tokens is not None,
            num_tokens=num_tokens,
            draft_lens=self.draft_lens.tolist(),
            tokens=[row[: max(0, count)] for row, count in zip(self.tokens.tolist(), num_tokens, strict=True)],
            logprobs=_list_logprobs(self.logprob_ids, self.logprob_values) if len(self.logprob_ids) else [],
            cache_hits=list(map(bool, self.cache_hits.tolist())) or [False] * len(num_tokens),
            num_suffix_tokens=self.num_suffix_tokens.tolist() or [0] * len(num_tokens),
            num_guesses=self.num_guesses,
            hit_chances=self.hit_chances.astype(np.float32).tolist(),
            prompt_ids=self.prompt_ids,
            prompt_values=self.prompt_values,
            logits=self.logits,
            prompt_logits=self.prompt_logits,
        )


def decode_report(payload: bytes) -> RoundReport:
    """The report whose bytes `ReportArrays.encode` gave."""
    header = _ReportHeader(*_REPORT_HEADER.unpack_from(payload))
    rows, width = header.rows, header.width
    # Plain integers: for few rows that takes half of the time of numpy's arrays.
    integers = struct.unpack_from(f"<{rows * (4 + width)}q", payload, _REPORT_HEADER.size)
    num_tokens, draft_lens, cache_hits, found = (list(integers[rows * part : rows * (part + 1)]) for part in range(4))
    starts = range(4 * rows, len(integers), width) if width else [0] * rows
    at = _REPORT_HEADER.size + 8 * len(integers)
    shape, of_prompts = (header.logprob_rows, width, header.logprob_width), (header.prompt_rows, header.prompt_width)
    counts, num_chances = (math.prod(shape) if header.logprob_rows else 0, math.prod(of_prompts)), header.hit_chances
    ids, prompt_ids = _split(payload, np.int64, at, counts)
    at += 8 * sum(counts)
    places = struct.unpack_from(f"<{header.logits_rows}q", payload, at)
    at += 8 * len(places)
    values, prompt_values = _split(payload, np.float32, at, counts)
    logits: dict[int, np.ndarray] = {}
    prompt_logits = _no_rows(2)
    if header.vocab_size:
        gained = [*(max(0, num_tokens[place]) for place in places), header.prompt_logits]
        *of_rows, prompt_logits = _split_logits(payload, at + 4 * sum(counts), gained, header.vocab_size)
        logits = dict(zip(places, of_rows, strict=True))
    return RoundReport(
        round_index=header.round_index,
        times=RoundTimes(
            header.drafting,
            header.transferring,
            header.verifying,
            header.anticipating,
            header.guiding,
            WarmupMisses(header.captures, header.compilations),
        ),
        is_verdict=bool(header.is_verdict),
        num_tokens=num_tokens,
        draft_lens=draft_lens,
        tokens=[list(integers[start : start + max(0, count)]) for start, count in zip(starts, num_tokens, strict=True)],
        logprobs=_list_logprobs(ids.reshape(shape), values.reshape(shape)) if header.logprob_rows else [],
        cache_hits=list(map(bool, cache_hits)),
        num_suffix_tokens=found,
        num_guesses=header.num_guesses,
        hit_chances=list(struct.unpack_from(f"<{num_chances}f", payload, len(payload) - 4 * num_chances)),
        prompt_ids=prompt_ids.reshape(of_prompts),
        prompt_values=prompt_values.reshape(of_prompts),
        logits=logits,
        prompt_logits=prompt_logits,
    )


def _split_logits(payload: bytes, at: int, counts: list[int], vocab_size: int) -> list[np.ndarray]:
    """[count, vocab_size] float32 for each of the counts, one behind the other from byte `at` on."""
    whole = np.frombuffer(payload, dtype=np.float32, count=sum(counts) * vocab_size, offset=at)
    ends = np.cumsum(counts, dtype=np.int64)
    return np.split(whole.reshape(-1, vocab_size), ends[:-1])


def _split(payload: bytes, dtype: type[np.generic], at: int, counts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays, one behind the other from byte `at` on, of so many numbers each."""
    if not any(counts):
        empty = np.empty(0, dtype=dtype)
        return empty, empty
    both = np.frombuffer(payload, dtype=dtype, count=sum(counts), offset=at)
    return both[: counts[0]], both[counts[0] :]


def _list_logprobs(ids: np.ndarray, values: np.ndarray) -> list[list[TokenLogprobs]]:
    """[rows, width, 1 + alternatives] → for each row one entry a position."""
    return [_token_logprobs(row_ids, row_values) for row_ids, row_values in zip(ids, values, strict=True)]


def _token_logprobs(ids: np.ndarray, values: np.ndarray) -> list[TokenLogprobs]:
    """[width, 1 + alternatives] of one row → one entry a position; the caller knows how many positions count."""
    return [
        TokenLogprobs(chosen[0], numbers[0], tuple(zip(chosen[1:], numbers[1:], strict=True)))
        for chosen, numbers in zip(ids.tolist(), values.tolist(), strict=True)
    ]
