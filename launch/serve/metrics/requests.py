"""How requests end, how long they take and how large they are, under vLLM's names.

A request is observed from its arrival at the front until it is over. It knows times that it is given, and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from launch.serve.metrics.totals import FrontTotals
from launch.serve.metrics.triton import TritonMetrics
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import LARGEST_COUNT

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PART = (0.001, 0.005, 0.01, 0.05, *_WHOLE[1:])
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class RequestMetrics:
    """Of all requests of one server."""

    def __init__(
        self, labels: dict[str, str], registry: CollectorRegistry, totals: FrontTotals, triton: TritonMetrics
    ) -> None:
        """Begin without observations.

        Args:
            labels: of every sample.
            registry: that tells them.
            totals: that go on with what comes.
            triton: has some sizes under Triton's names.
        """

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, tuple(labels), buckets=buckets, registry=registry).labels(**labels)

        self._labels = labels
        self._totals = totals
        self._triton = triton
        self._ended = Counter(
            "vllm:request_success",
            "Completions that ended, by the reason.",
            (*labels, "finished_reason"),
            registry=registry,
        )
        self._aborted = Counter(
            "trtrun:requests_aborted",
            "Requests that ended before all completions had.",
            tuple(labels),
            registry=registry,
        ).labels(**labels)
        self.first = histogram("vllm:time_to_first_token_seconds", "From arrival.", _FIRST_TOKEN)
        self.between = histogram(
            "vllm:inter_token_latency_seconds", "Between pieces, shared out to their tokens.", _BETWEEN_TOKENS
        )
        self._mean_between = histogram(
            "vllm:request_time_per_output_token_seconds", "The mean of a request, behind its first token.",
            _BETWEEN_TOKENS,
        )  # fmt: skip
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self._queue = histogram("vllm:request_queue_time_seconds", "Without a row of the running batch.", _PART)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From the row to the first token.", _PART)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", _PART)
        self._inference = histogram("vllm:request_inference_time_seconds", "From the row to the last token.", _PART)
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._sizes = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest completion.", _TOKENS
        )
        self._asked_n = histogram("vllm:request_params_n", "n of a request.", _CHOICES)
        self._asked_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS)

    def begin(self, num_prompt_tokens: int, n: int, max_tokens: int, now: float) -> ObservedRequest:
        """A request was let in.

        Args:
            num_prompt_tokens: over all its prompts, each once.
            n: completions of each prompt.
            max_tokens: of each completion.
            now: seconds of `time.perf_counter`.
        """
        self._totals.num_prompt_tokens += num_prompt_tokens
        self._totals.num_looked_up_tokens += num_prompt_tokens * n
        self._prompt_sizes.observe(num_prompt_tokens)
        self._asked_n.observe(n)
        if max_tokens < LARGEST_COUNT:  # else: to the end of the context
            self._asked_tokens.observe(max_tokens)
        return ObservedRequest(self, num_prompt_tokens, now)

    def observe_piece(self, delta: CompletionDelta, before: RequestStatistics | None) -> None:
        """A piece came of a completion, whose statistics go on from those `before`."""
        self._totals.add(delta, before)
        if delta.finish_reason is not None:
            self._ended.labels(**self._labels, finished_reason=delta.finish_reason).inc()

    def observe_abort(self) -> None:
        """A request ended before its completions had."""
        self._aborted.inc()

    def observe_whole(
        self, seconds: float, first: float, last: float, queued: float, num_prompt_tokens: int, lengths: Sequence[int]
    ) -> None:
        """A request was answered to its end.

        Args:
            seconds: from its arrival to its end.
            first, last: seconds from its arrival to its first and its last tokens.
            queued: seconds that it was without a row.
            num_prompt_tokens: over all its prompts.
            lengths: tokens of each completion.
        """
        total, longest = sum(lengths), max(lengths, default=0)
        self._whole.observe(seconds)
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, first - queued))
        self._decode.observe(last - first)
        self._inference.observe(max(0.0, last - queued))
        if longest > 1:
            self._mean_between.observe((last - first) / (longest - 1))
        self._sizes.observe(total)
        self._longest.observe(longest)
        self._triton.observe_sizes(num_prompt_tokens, total)


class ObservedRequest:
    """What one request adds to the metrics. Times are of `time.perf_counter`."""

    def __init__(self, metrics: RequestMetrics, num_prompt_tokens: int, now: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._began = now
        self._first = 0.0
        self._last: dict[int, float] = {}
        self._lengths: dict[int, int] = {}
        self._queued = 0.0

    def observe(self, choice: int, delta: CompletionDelta, before: RequestStatistics | None, now: float) -> None:
        """A piece of a choice came."""
        self._metrics.observe_piece(delta, before)
        self._queued = max(self._queued, delta.statistics.queue_seconds)
        count = len(delta.token_ids)
        if not count:
            return
        if not self._last:
            self._first = now - self._began
            self._metrics.first.observe(self._first)
        if choice in self._last:
            self._metrics.between.observe((now - self._last[choice]) / count)
        self._last[choice] = now
        self._lengths[choice] = self._lengths.get(choice, 0) + count

    @property
    def queue_seconds(self) -> float:
        """How long it was without a row."""
        return self._queued

    def end(self, is_whole: bool, now: float) -> None:
        """The request is over; whether all its completions had ended."""
        if not is_whole:
            self._metrics.observe_abort()
            return
        last = max(self._last.values(), default=self._began) - self._began
        self._metrics.observe_whole(
            now - self._began, self._first, last, self._queued, self._num_prompt_tokens, list(self._lengths.values())
        )
