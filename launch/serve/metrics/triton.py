"""The engine under the metric names of Triton's TensorRT-LLM backend: nv_trt_llm_* and nv_llm_*.

Their model is always `tensorrt_llm`: whatever a client asks for, that is what generates. Left out is what there is
nothing of here: pinned memory by its bytes, and disaggregated serving. So are nv_gpu_*: the front sees the GPUs of one
host, and not only those that the job has.

Triton's metrics are written as Triton writes them: programs made for it read whole numbers, counters without `_total`
behind their names, and a bucket's bound as the last label; the library writes floats, adds the suffix, and sorts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from launch.serve.engine.messages import Ready, Status
from launch.serve.metrics.families import BUCKETS, Numbers, Sizes
from launch.serve.metrics.models import VERSION

MODEL = "tensorrt_llm"
_BOUND = "le"


class TritonMetrics(Collector):
    """Of one server."""

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
