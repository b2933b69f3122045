"""All metrics of one server: what the front sees of requests, what the engine says of itself, and both under the names
that other servers' dashboards read. Totals go on when the engine is started again.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from launch.serve.engine.messages import Ready, Status
from launch.serve.metrics.engine import EngineMetrics
from launch.serve.metrics.exposition import write_exposition
from launch.serve.metrics.models import ModelRecorder
from launch.serve.metrics.requests import RequestMetrics
from launch.serve.metrics.speculation import SpeculationMetrics
from launch.serve.metrics.totals import FrontTotals
from launch.serve.metrics.triton import TritonMetrics


class FrontMetrics:
    """All metrics of one server.

    Attributes:
        totals: of all requests.
        requests: that are observed.
        models: requests by the model that they name.
    """

    def __init__(self, model_name: str, draft_len: int) -> None:
        """Begin at zero.

        Args:
            model_name: the label of most.
            draft_len: tokens drafted in a round, at most; 0 where none are.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.totals = FrontTotals()
        self.models = ModelRecorder()
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._engine = EngineMetrics(self._labels)
        self._triton = TritonMetrics(self.totals)
        self.requests = RequestMetrics(self._labels, self._registry, self.totals, self._triton)
        speculation = SpeculationMetrics(self._labels, self.totals, draft_len)
        for collector in (self._engine, speculation):
            self._registry.register(collector)
        self._refused = self._counter(
            "trtrun:requests_refused", "Requests that were not answered, or not to their end, by HTTP status.", "status"
        )
        self._restarts = self._counter("trtrun:engine_restarts", "How often the engine was started again.")
        self._restarts.labels(**self._labels)  # 0 is told, too
        self._longest_stretch = Gauge(
            "trtrun:front_longest_stretch_seconds",
            "Longest processor time that the front's event loop worked without a look at anything else.",
            tuple(self._labels),
            registry=self._registry,
        ).labels(**self._labels)

    def ask_longest_stretch(self, ask: Callable[[], float]) -> None:
        """Where the longest stretch of the event loop is told, in seconds; 0 without."""
        self._longest_stretch.set_function(ask)

    def count_loss(self) -> None:
        """The engine is gone: the totals of the next one begin at zero."""
        self._engine.forget()

    def count_restart(self) -> None:
        """The engine is started again."""
        self._restarts.labels(**self._labels).inc()
        self.totals.num_restarts += 1

    def count_refusal(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(**self._labels, status=status).inc()

    def render(self, ready: Ready | None, status: Status | None, is_hanging: bool = False) -> bytes:
        """Everything, as Prometheus reads it.

        Args:
            ready: what the engine has said at its start; None while there is none.
            status: of the engine just now; None where there is none, or it does not say.
            is_hanging: whether the engine is there and does not get on.
        """
        self._engine.take(ready, status, is_hanging)
        self._triton.take(ready, self._engine.status, self._engine.num_rounds)
        tritons = (family for collector in (self.models, self._triton) for family in collector.collect())
        return generate_latest(self._registry) + write_exposition(tritons)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self._registry)
