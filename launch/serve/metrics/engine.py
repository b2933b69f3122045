"""What the engine says of itself when somebody reads the metrics, with what engines before it have counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.serve.engine.messages import Ready, Status

PHASES = ("drafting", "transferring", "verifying", "committing", "orchestrating", "waiting", "anticipating")


class EngineMetrics(Collector):
    """How full the engine is, and where its rounds' time goes.

    Attributes:
        status: as the engine has last told it; None while there is none.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self._ready: Ready | None = None
        self._is_hanging = False
        self.status: Status | None = None
        self._before: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def take(self, ready: Ready | None, status: Status | None, is_hanging: bool) -> None:
        """How the engine stands; no `ready` where there is none, no `status` where it does not say, as in a long
        round: it then stands as it did."""
        self._ready, self._is_hanging = ready, is_hanging
        if ready is None:
            self.status = None
        elif status is not None:
            self.status = status
            self._totals = _numbers(status)

    def forget(self) -> None:
        """The next engine counts from zero."""
        for name, value in self._totals.items():
            self._before[name] = self._before.get(name, 0.0) + value
        self._totals = {}
        self.status = None

    @property
    def num_rounds(self) -> float:
        """Of all engines."""
        return self._total("num_rounds")

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        status = self.status
        usage = status.kv_usage if status is not None else 0.0
        is_up = self._ready is not None and not self._is_hanging
        yield self._gauge("trtrun:engine_up", "1 while the engine is there and gets on.", float(is_up))
        yield self._gauge(
            "vllm:num_requests_running", "Completions that have a row.", status.num_running if status else 0
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Completions that wait for one.", status.num_waiting if status else 0
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that rows hold; 1 is all.", usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", "The same, by its earlier name.", usage)
        yield self._cache_config()
        yield self._counter("trtrun:rounds", "Rounds.", "num_rounds")
        yield self._counter("trtrun:draft_losses", "How often the draft engine was lost.", "draft_losses")
        yield self._counter("trtrun:drafts_due", "Drafts due where draft ranks draft ahead.", "drafts_due")
        yield self._counter(
            "trtrun:drafts_foreseen", "Of these, those that were ready before their verdict.", "drafts_foreseen"
        )
        yield self._hit_rate()
        phases = CounterMetricFamily("trtrun:round_seconds", "Time of rounds by phase.", labels=[*self._names, "phase"])
        for phase in PHASES:
            phases.add_metric([*self._values, phase], self._total(f"{phase}_s"))
        yield phases

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, total: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, self._total(total))
        return family

    def _hit_rate(self) -> Metric:
        family = GaugeMetricFamily(
            "trtrun:draft_hit_rate",
            "Share of the drafts due that were ready before their verdict; absent without drafting ahead.",
            labels=self._names,
        )
        due = self._total("drafts_due")
        if due:
            family.add_metric(self._values, self._total("drafts_foreseen") / due)
        return family

    def _cache_config(self) -> Metric:
        limits = self._ready.limits if self._ready is not None else {}
        blocks = limits.get("num_blocks")
        told = {
            "block_size": limits.get("block_size"),
            "num_gpu_blocks": blocks - 1 if blocks else None,  # one of them pads
            "enable_prefix_caching": limits.get("enable_block_reuse"),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV store is cut, on whatever device.", labels=[*self._names, *told]
        )
        if limits:
            family.add_metric([*self._values, *map(str, told.values())], 1)
        return family

    def _total(self, name: str) -> float:
        return self._before.get(name, 0.0) + self._totals.get(name, 0.0)


def _numbers(status: Status) -> dict[str, float]:
    """The engine's totals that are single numbers, and the sums of what was foreseen."""
    totals: dict[str, Any] = status.totals
    found = {name: float(value) for name, value in totals.items() if isinstance(value, int | float)}
    return found | {"drafts_due": float(status.drafts_due), "drafts_foreseen": float(status.drafts_foreseen)}
