"""All metrics of one server: what the frontend sees of requests, how long they take and how large they are, under
vLLM's names; what the engine says of itself; and both under the names that other servers' dashboards read. Totals go on
when the engine is started again.

A request is observed from its arrival at the frontend until it is over. Its times are given, of no clock here.

The engine's numbers also have the names of Triton's TensorRT-LLM backend, nv_trt_llm_* and nv_llm_*. Their model is
always `tensorrt_llm`: whatever a client asks for, that is what generates. Left out is what does not exist here: pinned
memory by its bytes, and disaggregated serving; and nv_gpu_*, because the frontend sees the GPUs of one host, and not
only the job's.

Triton's metrics are written as Triton writes them: programs made for it read whole numbers, counters without `_total`
behind their names, and a bucket's bound as the last label; the library writes floats, adds the suffix, and sorts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from launch.serve.engine.messages import Ready, Standing, Status
from launch.serve.metrics.families import BUCKETS, Families, FrontendTotals, Numbers, Sizes
from launch.serve.metrics.models import VERSION, ModelRecorder
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import LARGEST_COUNT

MODEL = "tensorrt_llm"
_BOUND = "le"


class TritonMetrics(Collector):
    """Triton's metrics of one server."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        ready, status = self._numbers.ready, self._numbers.status
        if ready is not None and status is not None:
            yield from self._of_engine(ready, status)
        yield _gauges(
            "general",
            "Seconds since the epoch times 10**6, and rounds since the server's start",
            "general_type",
            {"timestamp": round(time.time() * 1e6), "iteration_counter": self._numbers.total("num_rounds")},
        )
        sizes = self._numbers.totals.prompt_sizes, self._numbers.totals.output_sizes
        yield _histogram("nv_llm_input_token_len", "Prompt tokens of a request", "total_input_tokens", sizes[0])
        yield _histogram("nv_llm_output_token_len", "Tokens generated", "total_output_tokens", sizes[1])

    def _of_engine(self, ready: Ready, status: Status) -> Iterator[Metric]:
        limits = ready.scheduler_limits()
        yield _gauges(
            "request",
            "Completions: in work, most at once, with a row, of these in their prompt, and without a row",
            "request_type",
            {
                "active": status.num_running + status.num_waiting,
                "max": limits.max_batch_size,
                "scheduled": status.num_running,
                "context": status.num_prefilling,
                "waiting": status.num_waiting,
            },
        )
        yield _gauges(
            "runtime_memory",
            "Bytes of weights, KV and working memory over all ranks, as they told at their start",
            "memory_type",
            ready.memory,
        )
        used = status.num_blocks - status.num_free_blocks
        yield _gauges(
            "kv_cache_block",
            "Blocks of the KV store: all, free, held by rows, reused since the start; tokens of one; share held",
            "kv_cache_block_type",
            {
                "max": status.num_blocks,
                "free": status.num_free_blocks,
                "used": used,
                "tokens_per": limits.block_size,
                "reused": self._numbers.totals.num_cached_tokens // limits.block_size,
                "fraction": status.kv_usage,
            },
        )
        yield _gauges(
            "inflight_batcher",
            "Tokens of prompts that are computed, completions that decode, the one batch, and preempted completions",
            "inflight_batcher_specific_metric",
            {
                "total_context_tokens": status.num_prefill_tokens,
                "generation_requests": status.num_running - status.num_prefilling,
                "micro_batch_id": 0,
                "paused_requests": status.num_preempted,
            },
        )


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"nv_trt_llm_{name}_metrics", f"{text}.", labels=["model", label, "version"])
    for kind, value in values.items():
        family.add_metric([MODEL, kind, VERSION], value)
    return family


def _histogram(name: str, text: str, kind: str, sizes: Sizes) -> Metric:
    family = HistogramMetricFamily(name, f"{text}.", labels=["model", "response_metric_type", "version"])
    bounds = [*(str(most) for most in BUCKETS), "+Inf"]
    buckets = list(zip(bounds, accumulate(sizes.counts), strict=True))
    family.add_metric([MODEL, kind, VERSION], buckets, sizes.total)
    return family


def write_exposition(families: Iterable[Metric]) -> bytes:
    """Families with their samples, a line each."""
    lines = []
    for family in families:
        text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.type}"]
        lines += map(_write_sample, family.samples)
    return "".join(f"{line}\n" for line in lines).encode()


def _write_sample(sample: Sample) -> str:
    names = sorted(sample.labels, key=lambda name: (name == _BOUND, name))
    labels = ",".join(f'{name}="{_escape(sample.labels[name])}"' for name in names)
    value = float(sample.value)
    number = str(int(value)) if value.is_integer() else repr(value)
    return f"{sample.name}{{{labels}}} {number}" if labels else f"{sample.name} {number}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


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

    def __init__(self, metrics: FrontendMetrics, num_prompt_tokens: int, now: float) -> None:
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


class FrontendMetrics:
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
        self.totals = FrontendTotals()
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

    def ask_longest_stall(self, ask: Callable[[], float]) -> None:
        """Say what tells the longest stall of the event loop, in seconds; it is 0 otherwise."""
        self._numbers.ask_longest_stall = ask

    def ask_batch_rows(self, ask: Callable[[], tuple[int, int]]) -> None:
        """Say what tells rows of batches: those that are being answered, and those that wait. There are none
        otherwise."""
        self._numbers.ask_batch_rows = ask

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
