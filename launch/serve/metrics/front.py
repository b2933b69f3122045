"""All metrics of one server: what the front sees of requests, what the engine says of itself, and both under the names
that other servers' dashboards read. Totals go on when the engine is started again.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from launch.serve.engine.messages import Ready, Status
from launch.serve.metrics.families import Families, FrontTotals, Numbers
from launch.serve.metrics.models import ModelRecorder
from launch.serve.metrics.requests import RequestMetrics
from launch.serve.metrics.triton import TritonMetrics, write_exposition


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
        labels = {"model_name": model_name}
        self._numbers = Numbers(self.totals, draft_len)
        self._triton = TritonMetrics(self._numbers)
        self.requests = RequestMetrics(labels, self._registry, self.totals, self._triton)
        self._registry.register(Families(labels, self._numbers))

    def ask_longest_stretch(self, ask: Callable[[], float]) -> None:
        """Where the longest stretch of the event loop is told, in seconds; 0 without."""
        self._numbers.ask_longest_stretch = ask

    def count_loss(self) -> None:
        """The engine is gone: the totals of the next one begin at zero."""
        self._numbers.forget()

    def count_restart(self) -> None:
        """The engine is started again."""
        self.totals.num_restarts += 1

    def count_refusal(self, status: int) -> None:
        """A request was answered with an error."""
        self.totals.num_refused[str(status)] += 1

    def render(self, ready: Ready | None, status: Status | None, is_hanging: bool = False) -> bytes:
        """Everything, as Prometheus reads it.

        Args:
            ready: what the engine has said at its start; None while there is none.
            status: of the engine just now; None where there is none, or it does not say.
            is_hanging: whether the engine is there and does not get on.
        """
        self._numbers.take(ready, status, is_hanging)
        tritons = (family for collector in (self.models, self._triton) for family in collector.collect())
        return generate_latest(self._registry) + write_exposition(tritons)
