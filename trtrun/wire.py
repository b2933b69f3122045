"""Byte layouts of what crosses the control plane every round: plans out, reports back.

Fixed layouts, no pickles: a message is a header of numbers, numpy records where rows are admitted, and arrays whose
lengths the header gives. Most rounds admit nobody and prefill nothing; their plan costs a few microseconds at either
end, while engines wait for it. A plan begins with its round, 0 or more; what begins with a negative number is no plan
(roles/tracing.py). It knows the nouns of `core` and nothing of MPI: `parallel.control` carries the bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trtrun.core import PrefillChunk, RoundPlan, RowAdmission, TokenLogprobs
from trtrun.sampling_params import SamplingParams


class _PlanHeader(NamedTuple):
    """The numbers in front of a plan: int64, little-endian. Those after round_index up to decode, and
    the last two, count what follows."""

    round_index: int
    dropped: int
    admissions: int
    updates: int
    prefill: int
    decode: int
    max_context: int
    num_guesses: int
    redraft_from: int
    integers: int
    floats: int


class _ReportHeader(NamedTuple):
    """The numbers in front of a report: int64 and float64 (seconds), little-endian."""

    round_index: int
    is_verdict: int
    rows: int
    width: int
    logprob_rows: int
    logprob_width: int
    num_guesses: int
    num_redrafted: int
    hit_chances: int
    drafting: float
    transferring: float
    verifying: float
    anticipating: float


# Not numpy records: taking their fields one by one is what a short message would cost most.
_PLAN_HEADER = struct.Struct("<11q")
_REPORT_HEADER = struct.Struct("<9q4d")
_ADMISSION = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row", "request_id", "num_tokens", "num_prompt_tokens", "num_cached_tokens", "followed",
            "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "num_stop_ids", "num_biases", "num_bad_words",
        )
    ]
    + [
        (name, np.float64)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    ]
)  # fmt: skip
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "seed")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def encode_plan(plan: RoundPlan) -> bytes:
    """The bytes of a plan: header, admissions, one pool of int64 and one of float64."""
    integers: list[np.ndarray] = [
        np.asarray(plan.dropped_rows, dtype=np.int64),
        plan.block_updates.astype(np.int64).reshape(-1),
        np.array([(c.row, c.start, c.length, c.is_last, c.followed) for c in plan.prefill], dtype=np.int64).reshape(-1),
        plan.decode_rows.astype(np.int64),
        plan.draft_lens.astype(np.int64),
        plan.catch_up.astype(np.int64),
    ]
    floats: list[np.ndarray] = []
    records = b""
    if plan.admissions:
        admissions = np.zeros(len(plan.admissions), dtype=_ADMISSION)
        for record, admission in zip(admissions, plan.admissions, strict=True):
            _encode_admission(record, admission, integers, floats)
        records = admissions.tobytes()
    header = _PlanHeader(
        round_index=plan.round_index,
        dropped=len(plan.dropped_rows),
        admissions=len(plan.admissions),
        updates=len(plan.block_updates),
        prefill=len(plan.prefill),
        decode=len(plan.decode_rows),
        max_context=plan.max_context,
        num_guesses=plan.num_guesses,
        redraft_from=plan.redraft_from,
        integers=sum(map(len, integers)),
        floats=sum(map(len, floats)),
    )
    pools = (array.tobytes() for array in (*integers, *floats))
    return b"".join((_PLAN_HEADER.pack(*header), records, *pools))


def _encode_admission(
    record: np.void, admission: RowAdmission, integers: list[np.ndarray], floats: list[np.ndarray]
) -> None:
    sampling = admission.sampling
    for name in ("row", "request_id", "num_prompt_tokens", "num_cached_tokens", "followed"):
        record[name] = getattr(admission, name)
    for name in _INTEGERS + _NUMBERS:
        record[name] = getattr(sampling, name)
    record["logprobs"] = -1 if sampling.logprobs is None else sampling.logprobs
    record["num_tokens"] = len(admission.tokens)
    record["num_stop_ids"] = len(admission.stop_ids)
    record["num_biases"] = len(sampling.logit_bias)
    record["num_bad_words"] = len(admission.bad_word_ids)
    integers.append(admission.tokens.astype(np.int64))
    integers.append(np.array(admission.stop_ids, dtype=np.int64))
    integers.append(np.array(list(sampling.logit_bias), dtype=np.int64))
    integers.append(np.array([len(word) for word in admission.bad_word_ids], dtype=np.int64))
    integers.append(np.array([token for word in admission.bad_word_ids for token in word], dtype=np.int64))
    floats.append(np.array(list(sampling.logit_bias.values()), dtype=np.float64))


class _Pool:
    """Takes arrays off the front of a pool, in the order in which they were put in."""

    def __init__(self, pool: np.ndarray) -> None:
        self._pool = pool
        self._at = 0

    def take(self, count: int) -> np.ndarray:
        self._at += count
        return self._pool[self._at - count : self._at]


def decode_plan(payload: bytes) -> RoundPlan:
    """The plan that `encode_plan` wrote."""
    header = _PlanHeader(*_PLAN_HEADER.unpack_from(payload))
    at = _PLAN_HEADER.size + header.admissions * _ADMISSION.itemsize
    integers = _Pool(np.frombuffer(payload, dtype=np.int64, count=header.integers, offset=at))
    dropped = tuple(integers.take(header.dropped).tolist())
    updates = integers.take(3 * header.updates).reshape(-1, 3).astype(np.int32)
    chunks = integers.take(5 * header.prefill).reshape(-1, 5).tolist()
    decode = integers.take(3 * header.decode).reshape(3, -1).astype(np.int32)
    admissions: tuple[RowAdmission, ...] = ()
    if header.admissions:
        records = np.frombuffer(payload, dtype=_ADMISSION, count=header.admissions, offset=_PLAN_HEADER.size)
        at += 8 * header.integers
        floats = _Pool(np.frombuffer(payload, dtype=np.float64, count=header.floats, offset=at))
        admissions = tuple(_decode_admission(record, integers, floats) for record in records)
    return RoundPlan(
        round_index=header.round_index,
        dropped_rows=dropped,
        admissions=admissions,
        block_updates=updates,
        prefill=tuple(
            PrefillChunk(row, start, length, bool(last), bool(followed))
            for row, start, length, last, followed in chunks
        ),
        decode_rows=decode[0],
        draft_lens=decode[1],
        catch_up=decode[2],
        max_context=header.max_context,
        num_guesses=header.num_guesses,
        redraft_from=header.redraft_from,
    )


def _decode_admission(record: np.void, integers: _Pool, floats: _Pool) -> RowAdmission:
    tokens = integers.take(int(record["num_tokens"])).astype(np.int32)
    stop_ids = tuple(integers.take(int(record["num_stop_ids"])).tolist())
    bias_ids = integers.take(int(record["num_biases"])).tolist()
    word_lengths = integers.take(int(record["num_bad_words"])).tolist()
    words = tuple(tuple(integers.take(length).tolist()) for length in word_lengths)
    values: dict[str, Any] = {name: int(record[name]) for name in _INTEGERS}
    values |= {name: float(record[name]) for name in _NUMBERS}
    values["logprobs"] = None if record["logprobs"] < 0 else int(record["logprobs"])
    values["logit_bias"] = dict(zip(bias_ids, floats.take(len(bias_ids)).tolist(), strict=True))
    return RowAdmission(
        row=int(record["row"]),
        request_id=int(record["request_id"]),
        tokens=tokens,
        num_prompt_tokens=int(record["num_prompt_tokens"]),
        num_cached_tokens=int(record["num_cached_tokens"]),
        followed=bool(record["followed"]),
        sampling=SamplingParams(**values),
        stop_ids=stop_ids,
        bad_word_ids=words,
    )


@dataclass(frozen=True)
class RoundTimes:
    """Seconds that a round spent in each of its phases, on the leader that did the work.

    Attributes:
        drafting: a draft that the target waits for.
        transferring: the target's wait for it, and its way.
        verifying: the forward and the acceptance.
        anticipating: drafting for guesses while the target verifies.
    """

    drafting: float = 0.0
    transferring: float = 0.0
    verifying: float = 0.0
    anticipating: float = 0.0


@dataclass(frozen=True)
class RoundReport:
    """What a leader tells the orchestrator of one round.

    Attributes:
        round_index: of the plan.
        times: the phases that this leader saw; 0 for the others.
        is_verdict: whether it carries tokens (the target leader's does, the draft leader's does not).
        num_tokens: one a sampled row.
        draft_lens: one a sampled row: draft tokens that were verified.
        tokens: [sampled_rows][num_tokens] the tokens gained.
        logprobs: for each sampled row that asked, in order, one entry a token gained.
        foreseen: one a sampled row: whether its draft was made before the verdict that it follows.
        num_guesses: drafts that a draft leader of its own made ahead.
        num_redrafted: rows that it drafted for while the target waited.
        hit_chances: how likely a verdict is among one row's guesses, by their number from 1 on; empty in most rounds.
    """

    round_index: int
    times: RoundTimes
    is_verdict: bool
    num_tokens: list[int]
    draft_lens: list[int]
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    foreseen: list[bool] = field(default_factory=list)
    num_guesses: int = 0
    num_redrafted: int = 0
    hit_chances: list[float] = field(default_factory=list)


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
        foreseen: [rows] of 0 and 1; see RoundReport for this and what follows.
    """

    round_index: int
    times: RoundTimes
    num_tokens: np.ndarray | None = None
    draft_lens: np.ndarray = field(default_factory=lambda: _no_rows(1))
    tokens: np.ndarray = field(default_factory=lambda: _no_rows(2))
    logprob_ids: np.ndarray = field(default_factory=lambda: _no_rows(3))
    logprob_values: np.ndarray = field(default_factory=lambda: _no_rows(3))
    foreseen: np.ndarray = field(default_factory=lambda: _no_rows(1))
    num_guesses: int = 0
    num_redrafted: int = 0
    hit_chances: np.ndarray = field(default_factory=lambda: _no_rows(1))

    def encode(self) -> bytes:
        """The bytes of the report."""
        rows, width = self.tokens.shape
        logprob_rows, _, logprob_width = self.logprob_ids.shape
        header = _ReportHeader(
            round_index=self.round_index,
            is_verdict=self.num_tokens is not None,
            rows=rows,
            width=width,
            logprob_rows=logprob_rows,
            logprob_width=logprob_width,
            num_guesses=self.num_guesses,
            num_redrafted=self.num_redrafted,
            hit_chances=len(self.hit_chances),
            drafting=self.times.drafting,
            transferring=self.times.transferring,
            verifying=self.times.verifying,
            anticipating=self.times.anticipating,
        )
        counts = _no_rows(1) if self.num_tokens is None else self.num_tokens
        parts = [_REPORT_HEADER.pack(*header)]
        foreseen = self.foreseen if len(self.foreseen) == len(counts) else np.zeros(len(counts), dtype=np.int64)
        for array in (counts, self.draft_lens, foreseen, self.tokens, self.logprob_ids):
            parts.append(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        for array in (self.logprob_values, self.hit_chances):
            parts.append(np.ascontiguousarray(array, dtype=np.float32).tobytes())
        return b"".join(parts)

    def unpack(self) -> RoundReport:
        """The report as the orchestrator reads it."""
        num_tokens = [] if self.num_tokens is None else self.num_tokens.tolist()
        both = zip(self.logprob_ids, self.logprob_values, strict=True) if len(self.logprob_ids) else ()
        return RoundReport(
            round_index=self.round_index,
            times=self.times,
            is_verdict=self.num_tokens is not None,
            num_tokens=num_tokens,
            draft_lens=self.draft_lens.tolist(),
            tokens=[row[:count] for row, count in zip(self.tokens.tolist(), num_tokens, strict=True)],
            logprobs=[_token_logprobs(row_ids, row_values) for row_ids, row_values in both],
            foreseen=[bool(value) for value in self.foreseen] or [False] * len(num_tokens),
            num_guesses=self.num_guesses,
            num_redrafted=self.num_redrafted,
            hit_chances=self.hit_chances.tolist(),
        )


def decode_report(payload: bytes) -> RoundReport:
    """The report whose bytes `ReportArrays.encode` gave."""
    header = _ReportHeader(*_REPORT_HEADER.unpack_from(payload))
    rows, width = header.rows, header.width
    shape = (header.logprob_rows, width, header.logprob_width)
    num_logprobs = math.prod(shape)
    count = rows * (3 + width) + num_logprobs
    pool = _Pool(np.frombuffer(payload, dtype=np.int64, count=count, offset=_REPORT_HEADER.size))
    num_tokens, draft_lens, foreseen = (pool.take(rows) for _ in range(3))
    tokens = pool.take(rows * width).reshape(rows, width)
    logprobs: dict[str, np.ndarray] = {}
    values = np.frombuffer(payload, dtype=np.float32, offset=_REPORT_HEADER.size + 8 * count)
    if header.logprob_rows:
        of_logprobs = values[:num_logprobs].reshape(shape)
        logprobs = {"logprob_ids": pool.take(num_logprobs).reshape(shape), "logprob_values": of_logprobs}
    return ReportArrays(
        round_index=header.round_index,
        times=RoundTimes(header.drafting, header.transferring, header.verifying, header.anticipating),
        num_tokens=num_tokens if header.is_verdict else None,
        draft_lens=draft_lens,
        tokens=tokens,
        foreseen=foreseen,
        num_guesses=header.num_guesses,
        num_redrafted=header.num_redrafted,
        hit_chances=values[len(values) - header.hit_chances :],
        **logprobs,
    ).unpack()


def _token_logprobs(ids: np.ndarray, values: np.ndarray) -> list[TokenLogprobs]:
    """[width, 1 + alternatives] of one row → one entry a position; the caller knows how many positions count."""
    return [
        TokenLogprobs(chosen[0], numbers[0], tuple(zip(chosen[1:], numbers[1:], strict=True)))
        for chosen, numbers in zip(ids.tolist(), values.tolist(), strict=True)
    ]
