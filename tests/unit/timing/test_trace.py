"""A trace of rounds: logs are bounded, a GPU's spans are by the host's clock, clocks of ranks are compared honestly."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from gpus import needs_gpu
from hypothesis import given
from hypothesis import strategies as st
from pipelines import make_llm, prompt_of, useless_draft
from traces import assert_rounds_follow, assert_whole

from parallel.control import Report
from parallel.watchdog.activity import Activity
from trtrun import SamplingParams
from trtrun.rounds.engine_ranks import MpiRanks
from trtrun.timing.phase_clock import DeviceSpans, HostPhases, HostSpans
from trtrun.timing.spans import ENGINES, ORCHESTRATOR, ClockOffset, IdleTime, Span, SpanLog, read_spans
from trtrun.timing.tracing import Answer, PhaseTracer, RankTracer, Request, clock_offset, encode_request
from trtrun.wire.reports import ReportArrays, RoundTimes

BOOTED = 5000.0
"""Seconds of the host's clock when that of the fake GPU is at 0."""


def test_a_log_keeps_the_first_rounds_and_counts_the_others() -> None:
    log = SpanLog(most_rounds=2)
    for round_index in (7, 8, 9, 10):
        log.add("planning", round_index, round_index, round_index + 0.25)
        log.add("later", round_index, round_index + 0.5, round_index + 0.75)
    assert [(span.name, span.round_index) for span in log.spans] == [
        ("planning", 7), ("later", 7), ("planning", 8), ("later", 8)
    ]  # fmt: skip
    assert log.num_dropped_rounds == 2
    there = read_spans(log.encode(), 3, ClockOffset(-0.1, 0.001))
    assert (there.rank, there.part, there.num_dropped_rounds) == (3, ENGINES, 2)
    assert there.spans[0] == Span("planning", 7, 7 - 0.1, 7.25 - 0.1)


def test_every_phase_that_ends_is_a_span_of_its_round() -> None:
    ticks: Iterator[float] = iter([1.0, 1.5, 3.5, 10.0, 10.25])
    log = SpanLog(10)
    clock = HostSpans(log, lambda: next(ticks))
    clock.start(4)
    clock.end("drafting")
    clock.end("a phase that nobody has thought of yet")
    clock.start(5)
    clock.end("drafting")
    clock.finish()
    assert log.spans == [
        Span("drafting", 4, 1.0, 1.5),
        Span("a phase that nobody has thought of yet", 4, 1.5, 3.5),
        Span("drafting", 5, 10.0, 10.25),
    ]
    assert clock.take() == {"drafting": 0.75, "a phase that nobody has thought of yet": 2.0}, "statistics go on"


class Gpu:
    """A stream that works only while it is waited for, or told to: marks are passed in the order of recording."""

    def __init__(self) -> None:
        self.milliseconds = 100.0
        self.queue: list[tuple[float, Mark]] = []
        self.made = 0
        self.work = 0.0

    def mark(self) -> Mark:
        self.made += 1
        return Mark(self)

    def launch(self, milliseconds: float) -> None:
        """Work that comes before the next mark."""
        self.work += milliseconds

    def run(self, until: Mark | None = None) -> None:
        """Do what was launched, up to a mark or all of it."""
        while self.queue:
            work, mark = self.queue.pop(0)
            self.milliseconds += work
            mark.passed = self.milliseconds
            if mark is until:
                return

    def host_clock(self) -> float:
        return BOOTED + self.milliseconds / 1000


class Mark:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.passed: float | None = None

    def record(self, stream: object = None) -> None:
        self.passed = None
        self.gpu.queue.append((self.gpu.work, self))
        self.gpu.work = 0.0

    def query(self) -> bool:
        return self.passed is not None

    def elapsed_time(self, end: Mark) -> float:
        assert self.passed is not None and end.passed is not None, "an event was read before it was passed"
        return end.passed - self.passed

    def synchronize(self) -> None:
        if self.passed is None:
            self.gpu.run(self)


def traced_round(gpu: Gpu, clock: DeviceSpans, round_index: int) -> None:
    clock.start(round_index)
    gpu.launch(7.0)
    clock.end("drafting")
    gpu.launch(5.0)
    clock.end("verifying")


def test_spans_of_a_gpu_are_by_the_hosts_clock_and_not_of_launching() -> None:
    gpu, log = Gpu(), SpanLog(100)
    clock = DeviceSpans(log, gpu.host_clock, gpu.mark, lambda: None)
    gpu.launch(50.0)  # nothing that counts
    for round_index in (0, 1):
        traced_round(gpu, clock, round_index)
    assert log.spans == [], "the device has done nothing yet"
    clock.finish()
    starts = [150.0, 157.0, 162.0, 169.0]
    assert [(span.name, span.round_index) for span in log.spans] == [
        ("drafting", 0), ("verifying", 0), ("drafting", 1), ("verifying", 1)
    ]  # fmt: skip
    assert [span.start - BOOTED for span in log.spans] == pytest.approx([start / 1000 for start in starts], abs=1e-9)
    assert log.spans[-1].end - BOOTED == pytest.approx(0.174, abs=1e-9)
    assert_whole(log.spans, [0, 1])
    assert clock.take() == pytest.approx({"drafting": 0.014, "verifying": 0.010}), "statistics go on"


def test_events_are_used_again_where_nobody_takes_the_times() -> None:
    gpu, log = Gpu(), SpanLog(3)
    clock = DeviceSpans(log, gpu.host_clock, gpu.mark, lambda: None)
    made = gpu.made
    for round_index in range(50):
        traced_round(gpu, clock, round_index)
        gpu.run()
    clock.finish()
    assert gpu.made <= made + 3
    assert_whole(log.spans, [0, 1, 2])
    assert log.num_dropped_rounds == 47


@needs_gpu
def test_spans_of_a_real_gpu_lie_between_their_launch_and_their_end_on_the_host() -> None:
    log = SpanLog(100)
    clock, seen = DeviceSpans(log), []
    matrix = torch.ones((2048, 2048), device="cuda")
    for round_index in range(20):
        launched = time.perf_counter()
        clock.start(round_index)
        for phase in ("drafting", "verifying"):
            matrix = matrix @ matrix / 2048
            clock.end(phase)
        torch.cuda.synchronize()
        seen.append((launched, time.perf_counter()))
    clock.finish()
    assert_whole(log.spans, range(20))
    assert sum(clock.take().values()) == pytest.approx(sum(span.end - span.start for span in log.spans))
    slack = 1e-3  # the reference is read to some microseconds
    for span in log.spans:
        launched, ended = seen[span.round_index]
        assert launched - slack < span.start < span.end < ended + slack


seconds = st.floats(0, 1)


@given(st.floats(-1e6, 1e6), seconds, seconds)
def test_the_offset_of_a_clock_is_within_its_error(ahead: float, there: float, back: float) -> None:
    asked = 1000.0
    offset = clock_offset(asked, asked + there + ahead, asked + there + back)
    error = 2 * offset.error if offset.seconds == 0.0 else offset.error  # two clocks that look like one
    assert abs(offset.seconds + ahead) <= error + 1e-9 * (1 + abs(ahead))
    assert offset.error == pytest.approx((there + back) / 2, abs=1e-9)


@given(seconds, seconds)
def test_one_clock_has_no_offset_however_late_its_reading_comes(there: float, back: float) -> None:
    assert clock_offset(10.0, 10.0 + there, 10.0 + there + back).seconds == 0.0


class Elsewhere:
    """Engine ranks whose clocks are ahead by as many seconds as their rank, and whose answers take a while."""

    def __init__(self) -> None:
        self.now = 50.0
        self.delays = iter([0.5, 0.001] + [0.25] * 1000)
        self.workers = {rank: Work() for rank in (2, 1)}
        self.tracers = {
            rank: PhaseTracer(worker, lambda rank=rank: self.now + rank) for rank, worker in self.workers.items()
        }

    def ask(self, request: bytes) -> Iterator[Answer]:
        delay = next(self.delays)
        self.now += delay
        for rank, tracer in self.tracers.items():
            answer = tracer.answer(request)
            assert answer is not None
            yield Answer(rank, answer)
        self.now += delay


class Work:
    """A worker, as far as a trace knows it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.phases = HostPhases()


def test_spans_of_other_clocks_come_by_rank_0s() -> None:
    others = Elsewhere()
    usual = {rank: worker.phases for rank, worker in others.workers.items()}
    tracer = RankTracer(others.ask, lambda: others.now)
    tracer.start(most_rounds=5)
    began = others.now
    for worker in others.workers.values():
        worker.phases.start(3)
        others.now += 0.5
        worker.phases.end("verifying")
    trace = tracer.take()
    assert [spans.rank for spans in trace] == [1, 2]
    for spans, start in zip(trace, (0.5, 0.0), strict=True):
        assert spans.clock.seconds == pytest.approx(-spans.rank, abs=0.001), "the shortest round trip counts"
        assert spans.clock.error <= 0.001
        (span,) = spans.spans
        assert (span.name, span.round_index) == ("verifying", 3)
        assert span.start == pytest.approx(began + start, abs=0.001)
        assert span.end - span.start == pytest.approx(0.5)
    assert {rank: worker.phases for rank, worker in others.workers.items()} == usual, "the usual clocks are back"
    assert [spans.spans for spans in tracer.take()] == [[], []], "a second time there is nothing"


def test_a_plan_is_no_request() -> None:
    tracer = PhaseTracer(Work())
    assert tracer.answer(struct.pack("=q", 0) + bytes(64)) is None
    assert tracer.answer(struct.pack("=q", 2**40) + bytes(64)) is None
    assert tracer.answer(encode_request(Request.START, 3)) == b""


def test_time_is_idle_between_spans_and_in_those_that_wait() -> None:
    spans = [
        Span("transferring", 0, 10.0, 11.0), Span("verifying", 0, 11.0, 14.0),
        Span("transferring", 1, 16.0, 16.5), Span("verifying", 1, 16.5, 20.0),
    ]  # fmt: skip
    idle = IdleTime()
    assert idle.share == 0.0
    idle.add_run(spans, {"waiting", "transferring"})
    assert (idle.elapsed, idle.idle, idle.num_rounds) == pytest.approx((10.0, 3.5, 2))
    idle.add_run([], {"waiting"})
    idle.add_run(spans, {"waiting"})
    assert (idle.elapsed, idle.idle, idle.num_rounds) == pytest.approx((20.0, 5.5, 4))
    assert idle.share == pytest.approx(0.275)


class Messages:
    """The control plane and the failures of ranks in one: what arrives is `coming`, in order."""

    num_workers = 2

    def __init__(self) -> None:
        self.coming: list[Report] = []
        self.published: list[bytes] = []

    def publish(self, payload: bytes) -> None:
        self.published.append(payload)

    def collect(self, control: Messages) -> Report:
        return self.coming.pop(0)

    def check(self) -> None:
        pass


def test_a_report_that_comes_late_is_no_answer_and_is_not_lost() -> None:
    messages = Messages()
    ranks = MpiRanks(messages, Activity(), messages)
    late = ReportArrays(6, RoundTimes(drafting=0.5))
    log = SpanLog(9)
    log.add("drafting", 6, 1.0, 2.0)
    messages.coming = [
        Report(2, SpanLog(9).encode(), 1), Report(1, late.encode(), 0), Report(1, log.encode(), 1),
    ]  # fmt: skip
    assert [(spans.rank, len(spans.spans)) for spans in ranks.take_trace()] == [(1, 1), (2, 0)]
    report = ranks.collect()
    assert (report.round_index, report.times.drafting, report.is_verdict) == (6, 0.5, False)
    assert messages.published == [encode_request(Request.TAKE)] and messages.coming == []


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_a_job_of_one_process_is_traced_on_two_rows(tmp_path: Path, plans_ahead: int) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = useless_draft(tmp_path / "draft")
    with make_llm(target, draft, scheduler={"plans_ahead": plans_ahead}) as llm:
        orchestrator, sampling = llm.engine.orchestrator, SamplingParams(max_tokens=12)
        texts = []
        for most_rounds in (1000, 3):
            llm.reset_statistics()
            orchestrator.start_trace(most_rounds)
            texts.append(llm.generate([prompt_of(9), prompt_of(20)], sampling))
            own, engines = orchestrator.take_trace()
            total = llm.statistics()["num_rounds"]
            assert (own.part, engines.part) == (ORCHESTRATOR, ENGINES)
            first = engines.spans[0].round_index
            kept = range(first, first + min(most_rounds, engines.num_dropped_rounds + total))
            if most_rounds == 3:
                assert own.num_dropped_rounds == engines.num_dropped_rounds == total - 3 > 0
            else:
                assert len(kept) == total and own.num_dropped_rounds == engines.num_dropped_rounds == 0
            for spans in (own.spans, engines.spans):
                assert_whole(spans, kept, slack=1e-9)
            assert_rounds_follow(engines.spans)
            assert {span.name for span in own.spans} == {"planning", "waiting", "committing"}
            assert {span.name for span in engines.spans} == {"drafting", "transferring", "verifying"}
            waiting = {span.round_index: span for span in own.spans if span.name == "waiting"}
            for span in engines.spans:
                assert waiting[span.round_index].start <= span.start
                assert span.end <= waiting[span.round_index].end
        llm.generate([prompt_of(5)], sampling)
        assert [part.spans for part in orchestrator.take_trace()] == [[], []], "nothing is kept that was not asked for"
