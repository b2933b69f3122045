"""What is counted, under the names that dashboards of vLLM read, and some of trtrun's own.

The front counts what it sees of requests; how full the engine is, and where its rounds' time goes, the engine is asked
when somebody reads the metrics. Totals go on over restarts. It knows numbers and the Prometheus format, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.serve.messages import Status
from launch.serve.metrics.models import ModelRecorder, name_counters
from trtrun.core import RequestStatistics
from trtrun.outputs import CompletionDelta

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_NOTHING = RequestStatistics()

PHASES = ("drafting", "transferring", "verifying", "committing", "orchestrating", "waiting", "anticipating")


@dataclass
class FrontTotals:
    """What has come of all requests since the server's start.

    Attributes:
        num_tokens: generated.
        num_row_rounds: rounds summed over the rows that verified in them.
        num_draft_tokens, num_accepted_draft_tokens: verified in these, and kept.
        num_restarts: of the engine.
    """

    num_tokens: int = 0
    num_row_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_restarts: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round yields a row; None before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else None


class FrontMetrics:
    """All metrics of one server.

    Attributes:
        totals: of all requests.
        models: requests by the model that they name.
    """

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._engine = _EngineMetrics(self._labels)
        self._registry.register(self._engine)
        self.totals = FrontTotals()
        self.models = ModelRecorder()
        self._registry.register(self.models)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that were let in.")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Row rounds: rounds times the rows in them.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            (*self._labels, "position"),
            registry=self._registry,
        )
        self._by_position: list[Counter] = []
        self._ended = Counter(
            "vllm:request_success",
            "Completions that ended, by the reason.",
            (*self._labels, "finished_reason"),
            registry=self._registry,
        )
        self._aborted = self._counter("trtrun:requests_aborted", "Requests that ended before all completions had.")
        self._restarts = self._counter("trtrun:engine_restarts", "How often the engine was started again.")
        self._refused = Counter(
            "trtrun:requests_refused",
            "Requests that were not answered, or not to their end, by HTTP status.",
            (*self._labels, "status"),
            registry=self._registry,
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival.", _FIRST_TOKEN)
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Between pieces, shared out to their tokens.", _BETWEEN_TOKENS
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._sizes = self._histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)

    def begin(self, num_prompt_tokens: int, now: float) -> ObservedRequest:
        """A request was let in."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_sizes.observe(num_prompt_tokens)
        return ObservedRequest(self, now)

    def count_loss(self) -> None:
        """The engine is gone: the totals of the next one begin at zero."""
        self._engine.forget()

    def count_restart(self) -> None:
        """The engine is started again."""
        self._restarts.inc()
        self.totals.num_restarts += 1

    def count_refusal(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(**self._labels, status=status).inc()

    def render(self, status: Status | None) -> bytes:
        """Everything, as Prometheus reads it.

        Args:
            status: of the engine just now; None where there is none.
        """
        self._engine.take(status)
        return name_counters(generate_latest(self._registry))

    def observe_tokens(self, delta: CompletionDelta, before: RequestStatistics | None) -> None:
        """Count what a piece brought, whose statistics go on from those `before`."""
        before, now = before or _NOTHING, delta.statistics
        totals = self.totals
        totals.num_tokens += len(delta.token_ids)
        totals.num_row_rounds += now.num_rounds - before.num_rounds
        totals.num_draft_tokens += now.num_draft_tokens - before.num_draft_tokens
        totals.num_accepted_draft_tokens += now.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        self._tokens.inc(len(delta.token_ids))
        self._drafts.inc(now.num_rounds - before.num_rounds)
        self._drafted.inc(now.num_draft_tokens - before.num_draft_tokens)
        self._accepted.inc(now.num_accepted_draft_tokens - before.num_accepted_draft_tokens)
        earlier = before.acceptance_histogram
        for accepted, number in enumerate(now.acceptance_histogram):
            gained = number - (earlier[accepted] if accepted < len(earlier) else 0)
            if gained:
                for counter in self._accepted_below(accepted):
                    counter.inc(gained)
        if delta.finish_reason is not None:
            self._ended.labels(**self._labels, finished_reason=delta.finish_reason).inc()

    def _accepted_below(self, count: int) -> Sequence[Counter]:
        """The counters of the positions that a round of so many accepted tokens has accepted."""
        for position in range(len(self._by_position), count):
            self._by_position.append(self._accepted_at.labels(**self._labels, position=position))
        return self._by_position[:count]

    def observe_times(
        self, first: float | None = None, between: float | None = None, whole: tuple[float, int] | None = None
    ) -> None:
        """Count seconds: to the first token, between two tokens, and of a whole request with its tokens."""
        if first is not None:
            self._first.observe(first)
        if between is not None:
            self._between.observe(between)
        if whole is not None:
            self._whole.observe(whole[0])
            self._sizes.observe(whole[1])

    def count_abort(self) -> None:
        """A request ended before its completions had."""
        self._aborted.inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, tuple(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)


class ObservedRequest:
    """What one request adds to the metrics. Times are of `time.perf_counter`."""

    def __init__(self, metrics: FrontMetrics, now: float) -> None:
        self._metrics = metrics
        self._began = now
        self._last: dict[int, float] = {}
        self._num_tokens = 0

    def observe(self, choice: int, delta: CompletionDelta, before: RequestStatistics | None, now: float) -> None:
        """A piece of a choice came."""
        self._metrics.observe_tokens(delta, before)
        count = len(delta.token_ids)
        if not count:
            return
        if not self._num_tokens:
            self._metrics.observe_times(first=now - self._began)
        if choice in self._last:
            self._metrics.observe_times(between=(now - self._last[choice]) / count)
        self._last[choice] = now
        self._num_tokens += count

    def end(self, is_whole: bool, now: float) -> None:
        """The request is over; whether all its completions had ended."""
        if is_whole:
            self._metrics.observe_times(whole=(now - self._began, self._num_tokens))
        else:
            self._metrics.count_abort()


class _EngineMetrics(Collector):
    """What the engine says of itself, with what engines before it have counted."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._status: Status | None = None
        self._is_up = False
        self._before: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def take(self, status: Status | None) -> None:
        """How the engine stands; None where there is none, or it did not say."""
        self._is_up = status is not None
        if status is not None:
            self._status = status
            self._totals = _numbers(status.totals)

    def forget(self) -> None:
        """The next engine counts from zero."""
        for name, value in self._totals.items():
            self._before[name] = self._before.get(name, 0.0) + value
        self._totals = {}

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        names, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, total: str) -> CounterMetricFamily:
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, self._total(total))
            return family

        status = self._status if self._is_up else None
        blocks = status.num_blocks if status is not None else 0
        used = 1 - status.num_free_blocks / blocks if status is not None and blocks else 0.0
        yield gauge("trtrun:engine_up", "1 while the engine is there.", float(self._is_up))
        yield gauge("vllm:num_requests_running", "Completions that have a row.", status.num_running if status else 0)
        yield gauge("vllm:num_requests_waiting", "Completions that wait for one.", status.num_waiting if status else 0)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that rows hold; 1 is all.", used)
        yield counter("trtrun:rounds", "Rounds.", "num_rounds")
        yield counter("trtrun:draft_losses", "How often the draft engine was lost.", "draft_losses")
        yield counter("trtrun:drafts_due", "Drafts due where draft ranks draft ahead.", "drafts_due")
        yield counter("trtrun:drafts_foreseen", "Of these, those that were ready before their verdict.", "foreseen")
        phases = CounterMetricFamily("trtrun:round_seconds", "Time of rounds by phase.", labels=[*names, "phase"])
        for phase in PHASES:
            phases.add_metric([*values, phase], self._total(f"{phase}_s"))
        yield phases

    def _total(self, name: str) -> float:
        return self._before.get(name, 0.0) + self._totals.get(name, 0.0)


def _numbers(totals: dict[str, Any]) -> dict[str, float]:
    """The engine's totals that are single numbers, and the sums of what was foreseen."""
    found = {name: float(value) for name, value in totals.items() if isinstance(value, int | float)}
    foresight = totals.get("foresight", {})
    return found | {
        "drafts_due": float(sum(foresight.get("due_by_place", ()))),
        "foreseen": float(sum(foresight.get("foreseen_by_place", ()))),
    }
