"""Requests by the model that they name, under Triton's metric names; its statistics are made of the same totals.

    with recorder.begin("ensemble") as request:
        …                                   # reading the request, tokens of its prompt
        request.enter(Stage.INFER)
        …                                   # the engine works; `move_to_queue` takes out the wait for a row
        request.enter(Stage.OUTPUT)
        …                                   # the answer

A request counts for the model that the client has named, and for the parts of that model: what reads has the time of
reading, what generates the time with the engine, what writes the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from launch.serve.admission.refusals import Kind, Refusal

VERSION = "1"
"""The version of every model: there is one."""

PREFIX = "nv_inference_"


class Stage(StrEnum):
    """Stages in which a request spends its time; values are parts of Triton's metric names."""

    INPUT = "compute_input"
    QUEUE = "queue"
    INFER = "compute_infer"
    OUTPUT = "compute_output"


class Failure(StrEnum):
    """Triton's reasons why a request failed."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


_FAILURES = {
    Kind.BUSY: Failure.REJECTED,
    Kind.UNAVAILABLE: Failure.REJECTED,
    Kind.TIMEOUT: Failure.BACKEND,
    Kind.FAILED: Failure.BACKEND,
}


@dataclass
class ModelTotals:
    """What one model has answered since the server's start.

    Attributes:
        num_successes: requests that were answered to their end.
        num_inferences: completions, or other results, in these.
        num_failures: the other requests, by reason.
        num_pending: requests that have arrived and have no answer yet, not even its first token.
        success_seconds, failure_seconds: from arrival to end, of both kinds.
        seconds: of the answered requests, by stage.
        last_end: seconds since the epoch; 0 before the first.
    """

    num_successes: int = 0
    num_inferences: int = 0
    num_failures: Counter[Failure] = field(default_factory=Counter)
    num_pending: int = 0
    success_seconds: float = 0.0
    failure_seconds: float = 0.0
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    last_end: float = 0.0

    def add_success(self, num_inferences: int, seconds: Mapping[Stage, float]) -> None:
        """A request was answered to its end, which took so long in each stage."""
        self.num_successes += 1
        self.num_inferences += num_inferences
        self.success_seconds += sum(seconds.values())
        for stage, spent in seconds.items():
            self.seconds[stage] += max(0.0, spent)
        self.last_end = time.time()

    def add_failure(self, reason: Failure, seconds: float) -> None:
        """A request failed after so long."""
        self.num_failures[reason] += 1
        self.failure_seconds += seconds
        self.last_end = time.time()


_PART_STAGES = ((Stage.INPUT,), (Stage.QUEUE, Stage.INFER), (Stage.OUTPUT,))
"""Whose time the parts of a model have, in the order of a request."""


class ModelRequest:
    """A request for a model, from its arrival to its end. It is a context: an exception is its failure, anything else
    is success.

    Attributes:
        num_inferences: completions, or other results, that it stands for; set once it is known.
    """

    def __init__(self, totals: ModelTotals, parts: Sequence[ModelTotals], clock: Callable[[], float]) -> None:
        self.num_inferences = 1
        self._totals = totals
        self._parts = parts
        self._pending = [totals, *parts[1:2]]  # nothing waits for what reads, or for what writes
        for waiting in self._pending:
            waiting.num_pending += 1
        self._clock = clock
        self._began = self._entered = clock()
        self._stage = Stage.INPUT
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._is_over = False

    def enter(self, stage: Stage) -> None:
        """Enter a stage, into which the request's time goes from now on."""
        now = self._clock()
        self._seconds[self._stage] += now - self._entered
        self._stage, self._entered = stage, now

    def move_to_queue(self, seconds: float) -> None:
        """Count so much of the time in the engine as waiting for a row."""
        self._seconds[Stage.QUEUE] += seconds
        self._seconds[Stage.INFER] -= seconds

    def begin_answer(self) -> None:
        """There is something of its answer: it is pending no more. More than once is as good."""
        for waiting in self._pending:
            waiting.num_pending -= 1
        self._pending = []

    def succeed(self) -> None:
        """Count it as answered. The first end counts."""
        if self._end():
            self._totals.add_success(self.num_inferences, self._seconds)
            self._add_parts(len(self._parts))

    def fail(self, reason: Failure) -> None:
        """Count it as failed. The first end counts: as a failure of the part that had it, too."""
        if self._end():
            self._totals.add_failure(reason, self._entered - self._began)
            place = next(place for place, stages in enumerate(_PART_STAGES) if self._stage in stages)
            self._add_parts(place)
            for part in self._parts[place : place + 1]:
                part.add_failure(reason, sum(self._seconds[stage] for stage in _PART_STAGES[place]))

    def _add_parts(self, number: int) -> None:
        """So many parts have done theirs."""
        for part, stages in zip(self._parts[:number], _PART_STAGES, strict=False):
            part.add_success(self.num_inferences, {stage: self._seconds[stage] for stage in stages})

    def fail_with(self, error: BaseException) -> None:
        """Count it as failed by what ended it. A request for an unknown model counts for none."""
        if isinstance(error, Refusal) and error.kind is Kind.UNKNOWN_MODEL:
            self._end()
            return
        if isinstance(error, Refusal):
            self.fail(_FAILURES.get(error.kind, Failure.OTHER))
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.fail(Failure.CANCELED)
        else:
            self.fail(Failure.BACKEND)

    def __enter__(self) -> ModelRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.succeed()
        else:
            self.fail_with(error)

    def _end(self) -> bool:
        """Whether this is the first end."""
        if self._is_over:
            return False
        self._is_over = True
        self.begin_answer()
        self.enter(self._stage)
        return True


class ModelRecorder(Collector):
    """All models of a server."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin with none.

        Args:
            clock: seconds; for tests.
        """
        self._clock = clock
        self._models: dict[str, ModelTotals] = {}
        self._parts: dict[str, tuple[str, ...]] = {}

    def compose(self, model: str, parts: Sequence[str]) -> None:
        """Let requests for a model count for its parts, too: what reads, what generates, what writes."""
        self._parts[model] = tuple(parts)

    def begin(self, model: str) -> ModelRequest:
        """A request has arrived for a model that there is."""
        parts = [self._totals(part) for part in self._parts.get(model, ())]
        return ModelRequest(self._totals(model), parts, self._clock)

    def read(self, model: str) -> ModelTotals:
        """What a model has answered so far."""
        return self._models.get(model, ModelTotals())

    def _totals(self, model: str) -> ModelTotals:
        return self._models.setdefault(model, ModelTotals())

    def collect(self) -> Iterator[Metric]:
        """All families; a model is there from its first request on."""
        failures = Metric(PREFIX + "request_failure", "Requests that failed, by the reason.", "counter")
        for model, totals in self._models.items():
            for reason in Failure:
                labels = {"model": model, "version": VERSION, "reason": reason}
                failures.add_sample(failures.name, labels, totals.num_failures[reason])
        yield failures
        for name, text, kind, value in _FAMILIES:
            family = Metric(PREFIX + name, text, kind)
            for model, totals in self._models.items():
                family.add_sample(family.name, {"model": model, "version": VERSION}, value(totals))
            yield family


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _duration(stage: Stage, text: str) -> tuple[str, str, str, Callable[[ModelTotals], int]]:
    help_text = f"Microseconds of answered requests {text}."
    return f"{stage}_duration_us", help_text, "counter", lambda totals: _microseconds(totals.seconds[stage])


_FAMILIES: Sequence[tuple[str, str, str, Callable[[ModelTotals], int]]] = (
    ("request_success", "Requests answered to their end.", "counter", lambda totals: totals.num_successes),
    ("count", "Completions, or other results, of these.", "counter", lambda totals: totals.num_inferences),
    (
        "exec_count",
        "Executions: a request is one, whatever shares its rounds.",
        "counter",
        lambda totals: totals.num_successes,
    ),
    (
        "pending_request_count",
        "Requests that have arrived and have no answer yet, not even its first token.",
        "gauge",
        lambda totals: totals.num_pending,
    ),
    (
        "request_duration_us",
        "Microseconds from arrival to end, failed requests among them.",
        "counter",
        lambda totals: _microseconds(totals.success_seconds + totals.failure_seconds),
    ),
    _duration(Stage.QUEUE, "waiting for a row of the running batch"),
    _duration(Stage.INPUT, "reading the request, and making tokens of it"),
    _duration(Stage.INFER, "with the engine, beyond waiting"),
    _duration(Stage.OUTPUT, "making the answer"),
)
