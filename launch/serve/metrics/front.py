"""All metrics of one server: what the front sees of requests, how long they take and how large they are, under vLLM's
names; what the engine says of itself; and both under the names that other servers' dashboards read. Totals go on
when the engine is started again.

A request is observed from its arrival at the front until it is over. Its times are given, of no clock here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from launch.serve.engine.messages import Ready, Standing, Status
from launch.serve.metrics.families import Families, FrontTotals, Numbers
from launch.serve.metrics.models import ModelRecorder
from launch.serve.metrics.triton import TritonMetrics, write_exposition
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import LARGEST_COUNT

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PART = (0.001, 0.005, 0.01, 0.05, *_WHOLE[1:])
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between pieces, shared out to their tokens.", _BETWEEN_TOKENS),
    "request_time_per_output_token_seconds": ("The mean of a request, behind its first token.", _BETWEEN_TOKENS),
    "e2e_request_latency_seconds": ("From arrival to the end.", _WHOLE),
    "request_queue_time_seconds": ("Without a row of the running batch.", _PART),
    "request_prefill_time_seconds": ("From the row to the first token.", _PART),
    "request_decode_time_seconds": ("From the first token to the last.", _PART),
    "request_inference_time_seconds": ("From the row to the last token.", _PART),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest completion.", _TOKENS),
    "request_params_n": ("n of a request.", _CHOICES),
    "request_params_max_tokens": ("max_tokens of a request.", _TOKENS),
}
"""Help and buckets of each, by its name behind `vllm:`."""


class ObservedRequest:
    """What one request adds to the metrics. Times are of `time.perf_counter`.

    Attributes:
        queue_seconds: how long it was without a row.
    """

    def __init__(self, metrics: FrontMetrics, num_prompt_tokens: int, now: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._began = now
        self._first = 0.0
        self._last: dict[int, float] = {}
        self._lengths: dict[int, int] = {}
        self.queue_seconds = 0.0

    def observe(self, choice: int, delta: CompletionDelta, before: RequestStatistics | None, now: float) -> None:
        """A piece of a choice came, whose statistics go on from those `before`."""
        self._metrics.totals.add(delta, before)
        self.queue_seconds = max(self.queue_seconds, delta.statistics.queue_seconds)
        count = len(delta.token_ids)
        if not count:
            return
        if not self._last:
            self._first = now - self._began
            self._metrics.observe(time_to_first_token_seconds=self._first)
        if choice in self._last:
            self._metrics.observe(inter_token_latency_seconds=(now - self._last[choice]) / count)
        self._last[choice] = now
        self._lengths[choice] = self._lengths.get(choice, 0) + count

    def end(self, is_whole: bool, now: float) -> None:
        """The request is over; whether all its completions had ended."""
        if not is_whole:
            self._metrics.totals.num_aborted += 1
            return
        last = max(self._last.values(), default=self._began) - self._began
        total, longest = sum(self._lengths.values()), max(self._lengths.values(), default=0)
        self._metrics.observe(
            e2e_request_latency_seconds=now - self._began,
            request_queue_time_seconds=self.queue_seconds,
            request_prefill_time_seconds=max(0.0, self._first - self.queue_seconds),
            request_decode_time_seconds=last - self._first,
            request_inference_time_seconds=max(0.0, last - self.queue_seconds),
            request_generation_tokens=total,
            request_max_num_generation_tokens=longest,
        )
        if longest > 1:
            self._metrics.observe(request_time_per_output_token_seconds=(last - self._first) / (longest - 1))
        self._metrics.totals.prompt_sizes.observe(self._num_prompt_tokens)
        self._metrics.totals.output_sizes.observe(total)


class FrontMetrics:
    """All metrics of one server.

    Attributes:
        totals: of all requests.
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
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, tuple(labels), buckets=buckets, registry=self._registry).labels(
                **labels
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._registry.register(Families(labels, self._numbers))

    def begin(self, num_prompt_tokens: int, n: int, max_tokens: int, now: float) -> ObservedRequest:
        """A request was let in.

        Args:
            num_prompt_tokens: over all its prompts, each once.
            n: completions of each prompt.
            max_tokens: of each completion.
            now: seconds of `time.perf_counter`.
        """
        self.totals.num_prompt_tokens += num_prompt_tokens
        self.totals.num_looked_up_tokens += num_prompt_tokens * n
        self.observe(request_prompt_tokens=num_prompt_tokens, request_params_n=n)
        if max_tokens < LARGEST_COUNT:  # else: to the end of the context
            self.observe(request_params_max_tokens=max_tokens)
        return ObservedRequest(self, num_prompt_tokens, now)

    def observe(self, **found: float) -> None:
        """Add to histograms, by their names."""
        for name, value in found.items():
            self._histograms[name].observe(value)

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

    def render(
        self,
        ready: Ready | None,
        status: Status | None,
        standings: Sequence[Standing] = (),
        is_hanging: bool = False,
    ) -> bytes:
        """Everything, as Prometheus reads it.

        Args:
            ready: what the engine has said at its start; None while there is none.
            status: of the engine just now; None where there is none, or it does not say.
            standings: in which phases its threads are.
            is_hanging: whether the engine is there and does not get on.
        """
        self._numbers.take(ready, status, standings, is_hanging)
        tritons = (family for collector in (self.models, self._triton) for family in collector.collect())
        return generate_latest(self._registry) + write_exposition(tritons)
