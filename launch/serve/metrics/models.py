"""Requests by the model that they name, under Triton's metric names; its statistics are made of the same totals.

    with recorder.begin("ensemble") as request:
        …                                   # reading the request, tokens of its prompt
        request.enter(Stage.INFER)
        …                                   # the engine works; `move_to_queue` takes out the wait for a row
        request.enter(Stage.OUTPUT)
        …                                   # the answer

A request counts for the one model that the client has named: an ensemble is not its parts here, as none of them is
asked. It knows names and times, and no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import TracebackType

from prometheus_client.core import Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from launch.serve.refusals import Kind, Refusal

VERSION = "1"
"""Of every model: there is one."""


class Stage(StrEnum):
    """Where a request's time goes; values are parts of Triton's metric names."""

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
        success_seconds, failure_seconds: from arrival to end, of both kinds.
        seconds: of the answered requests, by stage.
        last_end: seconds since the epoch; 0 before the first.
    """

    num_successes: int = 0
    num_inferences: int = 0
    num_failures: Counter[Failure] = field(default_factory=Counter)
    success_seconds: float = 0.0
    failure_seconds: float = 0.0
    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    last_end: float = 0.0


class ModelRequest:
    """One request for one model, from its arrival to its end. A context: an exception is its failure, anything else is
    success.

    Attributes:
        num_inferences: completions, or other results, that it stands for; set once it is known.
    """

    def __init__(self, totals: ModelTotals, clock: Callable[[], float]) -> None:
        self.num_inferences = 1
        self._totals = totals
        self._clock = clock
        self._began = self._entered = clock()
        self._stage = Stage.INPUT
        self._seconds = dict.fromkeys(Stage, 0.0)
        self._is_over = False

    def enter(self, stage: Stage) -> None:
        """Its time goes into `stage` from now on."""
        now = self._clock()
        self._seconds[self._stage] += now - self._entered
        self._stage, self._entered = stage, now

    def move_to_queue(self, seconds: float) -> None:
        """Of the time in the engine, so much was waiting for a row."""
        self._seconds[Stage.QUEUE] += seconds
        self._seconds[Stage.INFER] -= seconds

    def succeed(self) -> None:
        """It was answered. The first end counts."""
        if self._end():
            self._totals.num_successes += 1
            self._totals.num_inferences += self.num_inferences
            self._totals.success_seconds += self._entered - self._began
            for stage, seconds in self._seconds.items():
                self._totals.seconds[stage] += max(0.0, seconds)

    def fail(self, reason: Failure) -> None:
        """It was not, or not to its end. The first end counts."""
        if self._end():
            self._totals.num_failures[reason] += 1
            self._totals.failure_seconds += self._entered - self._began

    def fail_with(self, error: BaseException) -> None:
        """The same, by what ended it. One for a model that there is not counts for none."""
        if isinstance(error, Refusal) and error.kind is Kind.UNKNOWN_MODEL:
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
        self.enter(self._stage)
        self._totals.last_end = time.time()
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

    def begin(self, model: str) -> ModelRequest:
        """A request has arrived for a model that there is."""
        return ModelRequest(self.totals(model), self._clock)

    def totals(self, model: str) -> ModelTotals:
        """What a model has answered so far; it counts from now on where it had not been asked for."""
        if model not in self._models:
            self._models[model] = ModelTotals()
        return self._models[model]

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        failures = _family("request_failure", "Requests that failed, by the reason.", "reason")
        for model, totals in self._models.items():
            for reason in Failure:
                failures.add_metric([model, VERSION, reason], totals.num_failures[reason])
        yield failures
        yield self._counter("request_success", "Requests answered to their end.", lambda totals: totals.num_successes)
        yield self._counter("count", "Completions, or other results, of these.", lambda totals: totals.num_inferences)
        yield self._counter(
            "exec_count",
            "Executions: a request is one, whatever shares its rounds.",
            lambda totals: totals.num_successes,
        )
        yield self._counter(
            "request_duration_us",
            "Microseconds from arrival to end, failed requests among them.",
            lambda totals: _microseconds(totals.success_seconds + totals.failure_seconds),
        )
        for stage, text in (
            (Stage.QUEUE, "waiting for a row of the running batch"),
            (Stage.INPUT, "reading the request, and making tokens of it"),
            (Stage.INFER, "with the engine, beyond waiting"),
            (Stage.OUTPUT, "making the answer"),
        ):
            yield self._counter(
                f"{stage}_duration_us",
                f"Microseconds of answered requests {text}.",
                partial(_stage_microseconds, stage),
            )

    def _counter(self, name: str, text: str, value: Callable[[ModelTotals], float]) -> Metric:
        family = _family(name, text)
        for model, totals in self._models.items():
            family.add_metric([model, VERSION], value(totals))
        return family


PREFIX = "nv_inference_"


def _family(name: str, text: str, *labels: str) -> UnknownMetricFamily:
    # The library would write a counter's name with _total behind it, which Triton's have not.
    return UnknownMetricFamily(PREFIX + name, text, labels=["model", "version", *labels])


def name_counters(exposition: bytes) -> bytes:
    """Say of Triton's counters that they are counters, in what the library has written."""
    lines = exposition.split(b"\n")
    mark, untyped = f"# TYPE {PREFIX}".encode(), b" untyped"
    return b"\n".join(
        line.removesuffix(untyped) + b" counter" if line.startswith(mark) and line.endswith(untyped) else line
        for line in lines
    )


def _stage_microseconds(stage: Stage, totals: ModelTotals) -> int:
    return _microseconds(totals.seconds[stage])


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
