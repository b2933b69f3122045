"""The byte layout of plans, which go out over the control plane every round.

A fixed layout, no pickles: a header of numbers, numpy records where rows are admitted, and arrays whose lengths the
header gives. Most rounds admit nobody and prefill nothing; their plan costs a few microseconds at either end, while
engines wait for it. A plan begins with its round, 0 or more; what begins with a negative number is no plan
(timing/tracing.py). It knows the nouns of `core` and nothing of MPI: `parallel.control` carries the bytes.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np

from trtrun.core.guide import Guide
from trtrun.core.nouns import LogitsPart, PrefillChunk, RoundPlan, RowAdmission, ScoredPart
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import NO_LISTS, ThoughtBounds, TokenLists, TokenSequences


class _PlanHeader(NamedTuple):
    """The numbers in front of a plan: int64, little-endian. Those after round_index up to decode, and
    from given on, count what follows."""

    round_index: int
    dropped: int
    admissions: int
    updates: int
    prefill: int
    decode: int
    max_context: int
    num_guesses: int
    redraft_threshold: int
    given: int
    timed: int
    places: int
    starts: int
    saves: int
    lists: int
    guides: int
    integers: int
    floats: int


# Not numpy records: taking their fields one by one is what a short message would cost most.
_PLAN_HEADER = struct.Struct("<18q")
_ROUND = struct.Struct("<q")
_ADMISSION = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row", "request_id", "num_tokens", "num_prompt_tokens", "num_cached_tokens", "has_draft_kv",
            "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "num_draft_tokens", "lists", "guide",
            "window", "ngram", "verified", "adapter_slot", "return_generation_logits",
            "has_cache_salt",
        )
    ]
    + [
        (name, np.float64)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )
    ]
)  # fmt: skip
_NOT_SCORED = ScoredPart(0, 0, 0)
_NOT_REPORTED = LogitsPart(0, 0)
_CHUNK_NUMBERS = 5 + len(_NOT_SCORED) + len(_NOT_REPORTED)
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "seed")
_ARRAYS_OF_LISTS, _ARRAYS_OF_THOUGHTS = 4, 5
_LOOKAHEAD = ("window", "ngram", "verified")
"""Fields of SamplingParams.lookahead_config; 0 without one."""
_SOME_SALT = "*"
"""The salt of a request that has one: ranks need not know which."""

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def encode_plan(plan: RoundPlan) -> bytes:
    """The bytes of a plan: header, admissions, one pool of int64 and one of float64, and guides as JSON."""
    integers: list[np.ndarray] = [
        np.asarray(plan.dropped_rows, dtype=np.int64),
        plan.block_updates.astype(np.int64).reshape(-1),
        np.array([_chunk_numbers(chunk) for chunk in plan.prefill], dtype=np.int64).reshape(-1),
        plan.decode_rows.astype(np.int64),
        plan.draft_lens.astype(np.int64),
        plan.catch_up.astype(np.int64),
        np.asarray(plan.predicted_output_rows, dtype=np.int64),
        np.asarray(plan.timed_rows, dtype=np.int64),
        plan.window_places.astype(np.int64).reshape(-1),
        np.array(plan.snapshot_starts, dtype=np.int64).reshape(-1),
        np.array(plan.snapshot_saves, dtype=np.int64).reshape(-1),
    ]
    lists: dict[int, TokenLists] = {}
    floats: list[np.ndarray] = []
    records = told = b""
    if plan.admissions:
        admissions = np.zeros(len(plan.admissions), dtype=_ADMISSION)
        lists = {id(admission.lists): admission.lists for admission in plan.admissions}
        lists.pop(id(NO_LISTS), None)
        places = {known: place for place, known in enumerate(lists)}
        named = dict.fromkeys(admission.sampling.guided for admission in plan.admissions)
        named.pop(None, None)
        guides = {guide: place for place, guide in enumerate(named)}
        told = json.dumps([*named]).encode() if named else b""
        for record, admission in zip(admissions, plan.admissions, strict=True):
            record["lists"] = places.get(id(admission.lists), -1)
            record["guide"] = guides.get(admission.sampling.guided, -1)
            _encode_admission(record, admission, integers)
        for of_rows in lists.values():
            _encode_lists(of_rows, integers, floats)
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
        redraft_threshold=plan.redraft_threshold,
        given=len(plan.predicted_output_rows),
        timed=len(plan.timed_rows),
        places=len(plan.window_places),
        starts=len(plan.snapshot_starts),
        saves=len(plan.snapshot_saves),
        lists=len(lists),
        guides=len(told),
        integers=sum(map(len, integers)),
        floats=sum(map(len, floats)),
    )
    pools = (array.tobytes() for array in (*integers, *floats))
    return b"".join((_PLAN_HEADER.pack(*header), records, *pools, told))


def is_plan(message: bytes) -> bool:
    """Whether a message that goes the way of plans is one."""
    return bool(_ROUND.unpack_from(message)[0] >= 0)


def _chunk_numbers(chunk: PrefillChunk) -> tuple[int, ...]:
    """A chunk's `_CHUNK_NUMBERS`."""
    asked = (*(chunk.scored or _NOT_SCORED), *(chunk.reported or _NOT_REPORTED))
    return (chunk.row, chunk.start, chunk.length, chunk.is_last, chunk.has_draft_kv, *asked)


def _chunk(row: int, start: int, length: int, is_last: int, has_draft_kv: int, *asked: int) -> PrefillChunk:
    """The chunk of `_chunk_numbers`."""
    scored = ScoredPart(*asked[: len(_NOT_SCORED)])
    reported = LogitsPart(*asked[len(_NOT_SCORED) :])
    return PrefillChunk(
        row,
        start,
        length,
        bool(is_last),
        bool(has_draft_kv),
        scored if scored.length else None,
        reported if reported.length else None,
    )


def _encode_admission(record: np.void, admission: RowAdmission, integers: list[np.ndarray]) -> None:
    sampling = admission.sampling
    for name in ("row", "request_id", "num_prompt_tokens", "num_cached_tokens", "has_draft_kv", "adapter_slot"):
        record[name] = getattr(admission, name)
    for name in _INTEGERS + _NUMBERS:
        record[name] = getattr(sampling, name)
    record["logprobs"] = -1 if sampling.logprobs is None else sampling.logprobs
    record["return_generation_logits"] = sampling.return_generation_logits
    record["has_cache_salt"] = sampling.cache_salt is not None
    for name, size in zip(_LOOKAHEAD, sampling.lookahead_config, strict=False):
        record[name] = size
    record["num_tokens"] = len(admission.tokens)
    record["num_draft_tokens"] = len(admission.draft_tokens)
    integers.append(admission.tokens.astype(np.int64))
    integers.append(admission.draft_tokens.astype(np.int64))


def _encode_lists(lists: TokenLists, integers: list[np.ndarray], floats: list[np.ndarray]) -> None:
    words = lists.bad_words
    thoughts = lists.thoughts.arrays() if lists.thoughts is not None else [np.empty(0)] * _ARRAYS_OF_THOUGHTS
    arrays = (lists.stop_ids, lists.bias_ids, words.lengths, words.tokens, *thoughts)
    integers.append(np.array([len(array) for array in arrays], dtype=np.int64))
    integers += [array.astype(np.int64) for array in arrays]
    floats.append(lists.bias_values)


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
    chunks = integers.take(_CHUNK_NUMBERS * header.prefill).reshape(-1, _CHUNK_NUMBERS).tolist()
    decode = integers.take(3 * header.decode).reshape(3, -1).astype(np.int32)
    given = tuple(integers.take(header.given).tolist())
    timed = tuple(integers.take(header.timed).tolist())
    places = integers.take(2 * header.places).reshape(-1, 2).astype(np.int32)
    starts = tuple((row, one) for row, one in integers.take(2 * header.starts).reshape(-1, 2).tolist())
    saves = tuple((row, end, one) for row, end, one in integers.take(3 * header.saves).reshape(-1, 3).tolist())
    admissions: tuple[RowAdmission, ...] = ()
    if header.admissions:
        records = np.frombuffer(payload, dtype=_ADMISSION, count=header.admissions, offset=_PLAN_HEADER.size)
        at += 8 * header.integers
        floats = _Pool(np.frombuffer(payload, dtype=np.float64, count=header.floats, offset=at))
        in_order = [(record, *_take_tokens(record, integers)) for record in records]
        lists = [_decode_lists(integers, floats) for _ in range(header.lists)]
        told = payload[len(payload) - header.guides :]
        guides = [*(Guide(*guide) for guide in (json.loads(told) if told else ())), None]
        admissions = tuple(_decode_admission(*of_row, [*lists, NO_LISTS], guides) for of_row in in_order)
    return RoundPlan(
        round_index=header.round_index,
        dropped_rows=dropped,
        admissions=admissions,
        block_updates=updates,
        prefill=tuple(_chunk(*numbers) for numbers in chunks),
        decode_rows=decode[0],
        draft_lens=decode[1],
        catch_up=decode[2],
        max_context=header.max_context,
        num_guesses=header.num_guesses,
        redraft_threshold=header.redraft_threshold,
        predicted_output_rows=given,
        timed_rows=timed,
        window_places=places,
        snapshot_starts=starts,
        snapshot_saves=saves,
    )


def _take_tokens(record: np.void, integers: _Pool) -> tuple[np.ndarray, np.ndarray]:
    """An admission's tokens and draft tokens."""
    tokens = integers.take(int(record["num_tokens"])).astype(np.int32)
    return tokens, integers.take(int(record["num_draft_tokens"])).astype(np.int32)


def _decode_lists(integers: _Pool, floats: _Pool) -> TokenLists:
    counts = integers.take(_ARRAYS_OF_LISTS + _ARRAYS_OF_THOUGHTS).tolist()
    arrays = [integers.take(count) for count in counts]
    stop_ids, bias_ids, lengths, tokens = (array.astype(np.int32) for array in arrays[:_ARRAYS_OF_LISTS])
    bounds = arrays[_ARRAYS_OF_LISTS:]
    thoughts = ThoughtBounds.of_arrays(*bounds) if len(bounds[0]) else None
    words = TokenSequences(tokens, lengths)
    return TokenLists(stop_ids, bias_ids, floats.take(len(bias_ids)).copy(), words, thoughts)


def _decode_admission(
    record: np.void,
    tokens: np.ndarray,
    draft_tokens: np.ndarray,
    lists: list[TokenLists],
    guides: list[Guide | None],
) -> RowAdmission:
    """`lists` and `guides`: those of the plan, and last the one of no tokens, and none, which are the place -1."""
    values: dict[str, Any] = {name: int(record[name]) for name in _INTEGERS}
    values |= {name: float(record[name]) for name in _NUMBERS}
    values["logprobs"] = None if record["logprobs"] < 0 else int(record["logprobs"])
    values["return_generation_logits"] = bool(record["return_generation_logits"])
    if record["has_cache_salt"]:
        values["cache_salt"] = _SOME_SALT
    if record["ngram"]:
        values["lookahead_config"] = tuple(int(record[name]) for name in _LOOKAHEAD)
    if record["guide"] >= 0:
        values["guided"] = guides[int(record["guide"])]
    return RowAdmission(
        row=int(record["row"]),
        request_id=int(record["request_id"]),
        tokens=tokens,
        num_prompt_tokens=int(record["num_prompt_tokens"]),
        num_cached_tokens=int(record["num_cached_tokens"]),
        has_draft_kv=bool(record["has_draft_kv"]),
        sampling=SamplingParams.from_checked(values),
        lists=lists[int(record["lists"])],
        draft_tokens=draft_tokens,
        adapter_slot=int(record["adapter_slot"]),
    )
