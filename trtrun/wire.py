"""Byte layouts of what crosses the control plane every round: plans out, reports back.

Fixed numpy layouts, no pickles: a message is a few headers of numbers followed by arrays whose lengths the headers
give. A plan begins with its round, 0 or more; what begins with a negative number is no plan (roles/tracing.py). It
knows the nouns of `core` and nothing of MPI: `parallel.control` carries the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtrun.core import PrefillChunk, RoundPlan, RowAdmission, TokenLogprobs
from trtrun.sampling_params import SamplingParams

_PLAN_HEADER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "round_index", "dropped", "admissions", "updates", "prefill", "decode", "max_context", "integers", "floats",
        )
    ]
)  # fmt: skip
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
_REPORT_HEADER = np.dtype(
    [(name, np.int64) for name in ("round_index", "is_verdict", "rows", "width", "logprob_rows", "logprob_width")]
    + [(name, np.float64) for name in ("drafting", "transferring", "verifying")]
)


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
    admissions = np.zeros(len(plan.admissions), dtype=_ADMISSION)
    for record, admission in zip(admissions, plan.admissions, strict=True):
        _encode_admission(record, admission, integers, floats)
    integer_pool = np.concatenate(integers)
    float_pool = np.concatenate(floats) if floats else np.empty(0)
    header = np.zeros(1, dtype=_PLAN_HEADER)
    header[0] = (
        plan.round_index, len(plan.dropped_rows), len(plan.admissions), len(plan.block_updates), len(plan.prefill),
        len(plan.decode_rows), plan.max_context, len(integer_pool), len(float_pool),
    )  # fmt: skip
    return header.tobytes() + admissions.tobytes() + integer_pool.tobytes() + float_pool.tobytes()


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
    header = np.frombuffer(payload, dtype=_PLAN_HEADER, count=1)[0]
    at = _PLAN_HEADER.itemsize
    records = np.frombuffer(payload, dtype=_ADMISSION, count=int(header["admissions"]), offset=at)
    at += records.nbytes
    integers = _Pool(np.frombuffer(payload, dtype=np.int64, count=int(header["integers"]), offset=at))
    floats = _Pool(
        np.frombuffer(payload, dtype=np.float64, count=int(header["floats"]), offset=at + 8 * int(header["integers"]))
    )
    dropped = tuple(integers.take(int(header["dropped"])).tolist())
    updates = integers.take(3 * int(header["updates"])).reshape(-1, 3).astype(np.int32)
    chunks = integers.take(5 * int(header["prefill"])).reshape(-1, 5).tolist()
    decode_rows = integers.take(int(header["decode"])).astype(np.int32)
    draft_lens = integers.take(int(header["decode"])).astype(np.int32)
    catch_up = integers.take(int(header["decode"])).astype(np.int32)
    return RoundPlan(
        round_index=int(header["round_index"]),
        dropped_rows=dropped,
        admissions=tuple(_decode_admission(record, integers, floats) for record in records),
        block_updates=updates,
        prefill=tuple(
            PrefillChunk(row, start, length, bool(last), bool(followed))
            for row, start, length, last, followed in chunks
        ),
        decode_rows=decode_rows,
        draft_lens=draft_lens,
        catch_up=catch_up,
        max_context=int(header["max_context"]),
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
    """Seconds that a round spent in each of its phases, on the leader that did the work."""

    drafting: float = 0.0
    transferring: float = 0.0
    verifying: float = 0.0


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
    """

    round_index: int
    times: RoundTimes
    is_verdict: bool
    num_tokens: list[int]
    draft_lens: list[int]
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]


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
    """

    round_index: int
    times: RoundTimes
    num_tokens: np.ndarray | None = None
    draft_lens: np.ndarray = field(default_factory=lambda: _no_rows(1))
    tokens: np.ndarray = field(default_factory=lambda: _no_rows(2))
    logprob_ids: np.ndarray = field(default_factory=lambda: _no_rows(3))
    logprob_values: np.ndarray = field(default_factory=lambda: _no_rows(3))

    def encode(self) -> bytes:
        """The bytes of the report."""
        header = np.zeros(1, dtype=_REPORT_HEADER)
        rows, width = self.tokens.shape
        logprob_rows, _, logprob_width = self.logprob_ids.shape
        header[0] = (
            self.round_index, self.num_tokens is not None, rows, width, logprob_rows, logprob_width,
            self.times.drafting, self.times.transferring, self.times.verifying,
        )  # fmt: skip
        counts = _no_rows(1) if self.num_tokens is None else self.num_tokens
        parts = [header.tobytes()]
        for array in (counts, self.draft_lens, self.tokens, self.logprob_ids):
            parts.append(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        parts.append(np.ascontiguousarray(self.logprob_values, dtype=np.float32).tobytes())
        return b"".join(parts)

    def unpack(self) -> RoundReport:
        """The report as the orchestrator reads it."""
        num_tokens = [] if self.num_tokens is None else self.num_tokens.tolist()
        both = zip(self.logprob_ids, self.logprob_values, strict=True)
        return RoundReport(
            round_index=self.round_index,
            times=self.times,
            is_verdict=self.num_tokens is not None,
            num_tokens=num_tokens,
            draft_lens=self.draft_lens.tolist(),
            tokens=[row[:count] for row, count in zip(self.tokens.tolist(), num_tokens, strict=True)],
            logprobs=[_token_logprobs(row_ids, row_values) for row_ids, row_values in both],
        )


def decode_report(payload: bytes) -> RoundReport:
    """The report whose bytes `ReportArrays.encode` gave."""
    header = np.frombuffer(payload, dtype=_REPORT_HEADER, count=1)[0]
    rows, width = int(header["rows"]), int(header["width"])
    shape = (int(header["logprob_rows"]), width, int(header["logprob_width"]))
    sizes = (rows, rows, rows * width, shape[0] * shape[1] * shape[2])
    pool = _Pool(np.frombuffer(payload, dtype=np.int64, count=sum(sizes), offset=_REPORT_HEADER.itemsize))
    num_tokens, draft_lens = pool.take(sizes[0]), pool.take(sizes[1])
    tokens, ids = pool.take(sizes[2]).reshape(rows, width), pool.take(sizes[3]).reshape(shape)
    values = np.frombuffer(payload, dtype=np.float32, count=sizes[3], offset=_REPORT_HEADER.itemsize + 8 * sum(sizes))
    return ReportArrays(
        round_index=int(header["round_index"]),
        times=RoundTimes(float(header["drafting"]), float(header["transferring"]), float(header["verifying"])),
        num_tokens=num_tokens if header["is_verdict"] else None,
        draft_lens=draft_lens,
        tokens=tokens,
        logprob_ids=ids,
        logprob_values=values.reshape(shape),
    ).unpack()


def _token_logprobs(ids: np.ndarray, values: np.ndarray) -> list[TokenLogprobs]:
    """[width, 1 + alternatives] of one row → one entry a position; the caller knows how many positions count."""
    return [
        TokenLogprobs(chosen[0], numbers[0], tuple(zip(chosen[1:], numbers[1:], strict=True)))
        for chosen, numbers in zip(ids.tolist(), values.tolist(), strict=True)
    ]
