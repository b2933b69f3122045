"""What crosses the control plane comes back as it was, whatever it holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtrun.core.guide import Guide
from trtrun.core.nouns import WAITS, LogitsPart, PrefillChunk, RoundPlan, RowAdmission, ScoredPart
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import NO_LISTS, ThoughtBounds, TokenLists, TokenSequences
from trtrun.timing.tracing import Request, encode_request
from trtrun.warmup_misses import WarmupMisses
from trtrun.wire.messages import AdapterOrder, decode_adapter_order, decode_read, encode_adapter_order, encode_read
from trtrun.wire.plans import decode_plan, encode_plan
from trtrun.wire.reports import ReportArrays, RoundReport, RoundTimes, decode_report

TOKEN = st.integers(0, 2**31 - 1)
ROW = st.integers(0, 4095)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 10**6))
    return SamplingParams(
        temperature=draw(st.just(0.0) | st.floats(1e-30, 10)),
        top_k=draw(st.integers(0, 10**6)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        repetition_penalty=draw(st.floats(0.01, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logprobs=draw(st.none() | st.just(0) | st.integers(1, 20)),
        return_generation_logits=draw(st.booleans()),
        cache_salt=draw(st.sampled_from([None, "*"])),  # ranks need not know which
        lookahead_config=draw(st.just(()) | st.tuples(*[st.integers(1, 32)] * 3)),
        guided=draw(st.none() | st.builds(Guide, st.sampled_from(["json", "regex"]), st.text(min_size=1, max_size=9))),
    )


def token_sequences() -> st.SearchStrategy[TokenSequences]:
    return st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=3).map(TokenSequences.of)


@st.composite
def token_lists(draw: st.DrawFn) -> TokenLists:
    return TokenLists.of(
        draw(st.lists(TOKEN, max_size=4)),
        draw(st.dictionaries(TOKEN, st.floats(-100, 100), max_size=5)),
        draw(st.lists(st.lists(TOKEN, min_size=1, max_size=4), max_size=4)),
        draw(st.none() | st.builds(ThoughtBounds, st.integers(0, 2**31 - 1), token_sequences(), token_sequences())),
    )


@st.composite
def admissions(draw: st.DrawFn, lists: list[TokenLists]) -> RowAdmission:
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=40))
    return RowAdmission(
        row=draw(ROW),
        request_id=draw(st.integers(0, 2**62)),
        tokens=np.array(tokens, dtype=np.int32),
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        num_cached_tokens=draw(st.integers(0, len(tokens) - 1)),
        has_draft_kv=draw(st.booleans()),
        sampling=draw(sampling_params()),
        lists=draw(st.sampled_from(lists)),
        draft_tokens=np.array(draw(st.lists(TOKEN, max_size=6)), dtype=np.int32),
        adapter_slot=draw(st.integers(0, 1024)),
    )


@st.composite
def plans(draw: st.DrawFn) -> RoundPlan:
    decode = draw(st.lists(st.tuples(ROW, st.integers(-1, 32), st.integers(0, 8)), max_size=10))
    updates = draw(st.lists(st.tuples(ROW, ROW, TOKEN), max_size=10))
    lists = [NO_LISTS, *draw(st.lists(token_lists(), max_size=3))]
    scored = st.none() | st.builds(ScoredPart, ROW, st.integers(1, 4096), st.integers(0, 20))
    reported = st.none() | st.builds(LogitsPart, ROW, st.integers(1, 4096))
    chunk = st.builds(PrefillChunk, ROW, ROW, st.integers(1, 4096), st.booleans(), st.booleans(), scored, reported)
    return RoundPlan(
        round_index=draw(st.integers(0, 2**62)),
        dropped_rows=tuple(draw(st.lists(ROW, max_size=5))),
        admissions=tuple(draw(st.lists(admissions(lists), max_size=4))),
        block_updates=np.array(updates, dtype=np.int32).reshape(-1, 3),
        prefill=tuple(draw(st.lists(chunk, max_size=4))),
        decode_rows=np.array([row for row, _, _ in decode], dtype=np.int32),
        draft_lens=np.array([length for _, length, _ in decode], dtype=np.int32),
        catch_up=np.array([count for _, _, count in decode], dtype=np.int32),
        max_context=draw(st.integers(0, 10**6)),
        predicted_output_rows=tuple(draw(st.lists(ROW, max_size=4))),
        timed_rows=tuple(draw(st.lists(ROW, max_size=4))),
        snapshot_starts=tuple(draw(st.lists(st.tuples(ROW, TOKEN), max_size=3))),
        snapshot_saves=tuple(draw(st.lists(st.tuples(ROW, TOKEN, TOKEN), max_size=3))),
        window_places=np.array(draw(st.lists(st.tuples(TOKEN, TOKEN), max_size=5)), dtype=np.int32).reshape(-1, 2),
    )


def assert_same(first: object, second: object) -> None:
    """Equality that looks into dataclasses and arrays, and at array dtypes."""
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        assert first.dtype == second.dtype
        assert np.array_equal(first, second)
    elif dataclasses.is_dataclass(first):
        assert type(first) is type(second)
        for item in dataclasses.fields(first):
            assert_same(getattr(first, item.name), getattr(second, item.name))
    elif isinstance(first, tuple):
        assert isinstance(second, tuple) and len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_plan_comes_back_as_it_was(plan: RoundPlan) -> None:
    assert_same(decode_plan(encode_plan(plan)), plan)


def test_what_is_asked_of_adapters_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "ä b"
    for order in (AdapterOrder(3, "ä", path), AdapterOrder(3, slot=7), AdapterOrder(3)):
        assert decode_adapter_order(encode_adapter_order(order)) == order
    assert decode_adapter_order(encode_request(Request.START, 3)) is None
    assert decode_read(encode_read(3, "ä")) == (3, "ä")


def come_back(report: ReportArrays) -> RoundReport:
    """The report of another process, which is also that of the own one."""
    found = decode_report(report.encode())
    assert report.unpack() == found
    return found


def test_a_report_comes_back_as_it_was() -> None:
    tokens = np.array([[5, 6, 7], [8, -1, -1]])
    ids = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    values = -np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4) / 8
    times = RoundTimes(0.25, 0.5, 0.75, 0.875, 0.0625, WarmupMisses(captures=3, compilations=70_000))
    arrays = ReportArrays(41, times, np.array([3, 1]), np.array([2, 0]), tokens, ids, values)
    report = come_back(dataclasses.replace(arrays, num_suffix_tokens=np.array([2, 0])))
    assert report.num_suffix_tokens == [2, 0]
    assert come_back(arrays).num_suffix_tokens == [0, 0]
    assert (report.round_index, report.is_verdict) == (41, True)
    assert report.times == times
    assert (report.times.warmup_misses.captures, report.times.warmup_misses.compilations) == (3, 70_000)
    assert (report.num_tokens, report.draft_lens) == ([3, 1], [2, 0])
    assert report.tokens == [[5, 6, 7], [8]]
    entry = report.logprobs[1][2]
    assert (entry.token_id, entry.logprob) == (20, -2.5)
    assert list(entry.alternatives) == [(21, -2.625), (22, -2.75), (23, -2.875)]
    waiting = come_back(dataclasses.replace(arrays, num_tokens=np.array([WAITS, 1])))
    assert waiting.num_tokens == [WAITS, 1] and waiting.tokens == [[], [8]]


@pytest.mark.parametrize("has_verdict", [True, False])
def test_log_probabilities_of_prompts_come_back_beside_those_of_rows(has_verdict: bool) -> None:
    ids, values = np.arange(12).reshape(4, 3), -np.arange(12, dtype=np.float32).reshape(4, 3) / 8
    report = ReportArrays(7, RoundTimes(), prompt_ids=ids, prompt_values=values)
    if has_verdict:
        ones, entries = np.ones((1, 1), dtype=np.int64), np.ones((1, 1, 2), dtype=np.int64)
        report = dataclasses.replace(
            report, num_tokens=ones[0], draft_lens=ones[0], tokens=ones, logprob_ids=entries, logprob_values=entries / 4
        )
    found = come_back(report)
    assert_same((found.prompt_ids, found.prompt_values), (ids, values))
    assert [(entry.token_id, entry.logprob) for row in found.logprobs for entry in row] == [(1, 0.25)] * has_verdict


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("num_positions", [0, 2])
def test_logits_of_rows_and_prompts_come_back_beside_all_else(num_rows: int, num_positions: int) -> None:
    ids, values = np.arange(6).reshape(2, 3), np.arange(6, dtype=np.float32).reshape(2, 3)
    context = np.arange(num_positions * 5, dtype=np.float32).reshape(-1, 5) / 8
    report = ReportArrays(7, RoundTimes(), prompt_ids=ids, prompt_values=values, prompt_logits=context)
    logits = {0: np.ones((2, 5), np.float32), 2: np.full((3, 5), 2.0, np.float32)} if num_rows else {}
    if num_rows:
        counts, tokens = np.array([2, 1, 3]), np.ones((num_rows, 3), dtype=np.int64)
        report = dataclasses.replace(report, num_tokens=counts, draft_lens=counts, tokens=tokens, logits=logits)
    report = dataclasses.replace(report, hit_chances=np.array([0.5], np.float32))
    found = come_back(report)
    assert_same((found.prompt_ids, found.prompt_values), (ids, values))
    assert found.logits.keys() == logits.keys() and found.hit_chances == [0.5]
    assert all(np.array_equal(found.logits[place], one) for place, one in logits.items())
    assert np.array_equal(found.prompt_logits.ravel(), context.ravel()) and len(found.prompt_logits) == num_positions


def test_a_report_without_a_verdict_says_so() -> None:
    report = come_back(ReportArrays(7, RoundTimes(drafting=1.0, warmup_misses=WarmupMisses(compilations=2))))
    assert not report.is_verdict and report.times.warmup_misses == WarmupMisses(0, 2)
    assert (report.num_tokens, report.draft_lens, report.tokens, report.logprobs) == ([], [], [], [])


@pytest.mark.parametrize("has_verdict", [True, False])
def test_chances_of_hits_come_back_behind_whatever_else_there_is(has_verdict: bool) -> None:
    chances = np.array([0.5, 0.75, 0.875], dtype=np.float32)
    report = ReportArrays(7, RoundTimes(), hit_chances=chances)
    if has_verdict:
        ones = np.ones((1, 1), dtype=np.int64)
        values = np.full((1, 1, 2), -1.5, dtype=np.float32)
        report = ReportArrays(
            7, RoundTimes(), ones[0], ones[0], ones, np.ones((1, 1, 2), dtype=np.int64), values, hit_chances=chances
        )
    found = come_back(report)
    assert found.hit_chances == [0.5, 0.75, 0.875]
    assert [entry.logprob for row in found.logprobs for entry in row] == ([-1.5] if has_verdict else [])


def test_an_empty_verdict_is_a_verdict() -> None:
    empty = np.zeros((0, 3), dtype=np.int64)
    report = come_back(ReportArrays(7, RoundTimes(), empty[:, 0], empty[:, 0], empty))
    assert report.is_verdict
    assert report.tokens == []
