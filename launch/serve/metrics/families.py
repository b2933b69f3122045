"""The server's own metrics, one table: names, help and where each number is read when somebody asks for it.

Names that begin with `vllm:` are vLLM's, for dashboards that know them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.serve.engine.messages import Ready, Standing, Status
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.timing.telemetry import REQUEST_WORK

PHASES = ("drafting", "transferring", "verifying", "committing", "orchestrating", "waiting", "anticipating")

_NOBODY = Status(num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0, totals={})
"""What is told where there is no engine."""


_NOTHING = RequestStatistics()


BUCKETS = (10, 50, 100, 500, 1000)
"""Bounds of buckets for numbers of tokens, as Triton has them."""


class Sizes:
    """A histogram of numbers of tokens."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0

    def observe(self, size: int) -> None:
        """Count one."""
        self.counts[sum(size > most for most in BUCKETS)] += 1
        self.total += size


@dataclass
class FrontendTotals:
    """Since the server's start.

    Attributes:
        num_prompt_tokens: of requests that were let in, each prompt once.
        num_looked_up_tokens: of these, once for each completion: what was looked up in the KV store.
        num_cached_tokens: of these, those whose keys and values were there.
        num_tokens: generated.
        num_row_rounds: rounds summed over the rows that verified in them.
        num_drafts: row rounds that verified a draft.
        num_draft_tokens, num_accepted_draft_tokens: verified in these, and kept.
        num_suffix_draft_tokens, num_accepted_suffix_draft_tokens: of both, those found in texts in place of a model's.
        acceptance_histogram: how many row rounds kept 0, 1, … draft tokens.
        num_preemptions: rows that gave their blocks to others, and were computed again.
        num_restarts: of the engine.
        num_ended: completions that ended, by the reason.
        num_aborted: requests that ended before their completions had.
        num_calls_cut: calls over gRPC that failed for a client that was gone.
        prompt_sizes, output_sizes: tokens of requests that were answered.
        num_refused: requests that were answered with an error, by HTTP status.
    """

    num_prompt_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_row_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_suffix_draft_tokens: int = 0
    num_accepted_suffix_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_restarts: int = 0
    num_ended: Counter[str] = field(default_factory=Counter)
    num_aborted: int = 0
    num_calls_cut: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)
    prompt_sizes: Sizes = field(default_factory=Sizes)
    output_sizes: Sizes = field(default_factory=Sizes)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round yields a row; None before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else None

    def add(self, delta: CompletionDelta, before: RequestStatistics | None) -> None:
        """Add what a piece brought, whose statistics go on from those `before`."""
        before, now = before or _NOTHING, delta.statistics
        if delta.finish_reason is not None:
            self.num_ended[delta.finish_reason] += 1
        self.num_tokens += len(delta.token_ids)
        self.num_cached_tokens += now.num_cached_prompt_tokens - before.num_cached_prompt_tokens
        self.num_row_rounds += now.num_rounds - before.num_rounds
        self.num_drafts += now.num_drafts - before.num_drafts
        self.num_draft_tokens += now.num_draft_tokens - before.num_draft_tokens
        self.num_accepted_draft_tokens += now.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        self.num_suffix_draft_tokens += now.num_suffix_draft_tokens - before.num_suffix_draft_tokens
        accepted = now.num_accepted_suffix_draft_tokens - before.num_accepted_suffix_draft_tokens
        self.num_accepted_suffix_draft_tokens += accepted
        self.num_preemptions += now.num_preemptions - before.num_preemptions
        counts, earlier = self.acceptance_histogram, before.acceptance_histogram
        counts += [0] * (len(now.acceptance_histogram) - len(counts))
        for accepted, number in enumerate(now.acceptance_histogram):
            counts[accepted] += number - (earlier[accepted] if accepted < len(earlier) else 0)


@dataclass
class Numbers:
    """What the metrics are read from: what the frontend has counted, and what the engine has last said of itself, with
    what engines before it have counted.

    Attributes:
        totals: of all requests.
        draft_len: tokens drafted in a round, at most.
        ask_longest_stall: tells how many seconds the event loop has worked at a stretch.
        ask_batch_rows: tells how many rows of batches are being answered, and how many wait.
        ready, status: of the engine; None while there is none, or none that has told it.
        standings: in which phases its threads are.
        is_hanging: whether the engine is there and does not get on.
    """

    totals: FrontendTotals
    draft_len: int
    ask_longest_stall: Callable[[], float] = lambda: 0.0
    ask_batch_rows: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ready: Ready | None = None
    status: Status | None = None
    standings: Sequence[Standing] = ()
    is_hanging: bool = False
    _before: dict[str, float] = field(default_factory=dict)
    _now: dict[str, float] = field(default_factory=dict)

    def take(self, ready: Ready | None, status: Status | None, standings: Sequence[Standing], is_hanging: bool) -> None:
        """How the engine stands; no `ready` where there is none, no `status` where it does not say, as in a long
        round: it then stands as it did."""
        self.ready, self.standings, self.is_hanging = ready, standings, is_hanging
        if ready is None:
            self.status = None
        elif status is not None:
            self.status = status
            single = {name: float(value) for name, value in status.totals.items() if isinstance(value, int | float)}
            foreseen = {"drafts_due": float(status.drafts_due), "drafts_foreseen": float(status.drafts_foreseen)}
            self._now = single | foreseen

    def forget(self) -> None:
        """The next engine counts from zero."""
        self._before = {name: self.total(name) for name in self._before | self._now}
        self._now = {}
        self.status = None

    def total(self, name: str) -> float:
        """A total over all engines."""
        return self._before.get(name, 0.0) + self._now.get(name, 0.0)

    @property
    def engine(self) -> Status:
        """How full it is: nothing where there is none."""
        return self.status or _NOBODY

    @property
    def is_up(self) -> float:
        """1 while the engine is there and gets on, else 0."""
        return float(self.ready is not None and not self.is_hanging)

    @property
    def round_seconds(self) -> dict[str, float]:
        """Seconds of each phase of rounds."""
        return {phase: self.total(f"{phase}_s") for phase in PHASES}

    @property
    def request_work(self) -> dict[str, float]:
        """Seconds, by the work."""
        return {work: self.total(f"{work}_work_s") for work in REQUEST_WORK}

    @property
    def work_over_bound(self) -> dict[str, float]:
        """How often it took too long in a round, by the work."""
        return {work: self.total(f"num_{work}_over_bound") for work in REQUEST_WORK}

    @property
    def longest_stall(self) -> float:
        """Seconds that the event loop has worked at a stretch, at most."""
        return self.ask_longest_stall()

    @property
    def batch_rows(self) -> dict[str, float]:
        """Rows of batches, by what they do."""
        running, waiting = self.ask_batch_rows()
        return {"running": running, "waiting": waiting}

    @property
    def hit_rate(self) -> float | None:
        """Share of the drafts due that were foreseen; None without any due."""
        due = self.total("drafts_due")
        return self.total("drafts_foreseen") / due if due else None

    def row_rounds(self) -> list[int]:
        """Rounds of rows that kept 0, 1, … draft tokens, up to draft_len."""
        counts = self.totals.acceptance_histogram
        return [*counts, *[0] * (self.draft_len + 1 - len(counts))]

    @property
    def accepted_by_position(self) -> dict[str, float]:
        """The draft token of a place was accepted in all rounds that kept more tokens than lie before it."""
        counts = self.row_rounds()
        return {str(place): sum(counts[place + 1 :]) for place in range(len(counts) - 1)}


GAUGES = (
    ("trtrun:engine_up", "1 while the engine is there and gets on.", "is_up"),
    ("vllm:num_requests_running", "Completions that have a row.", "engine.num_running"),
    ("vllm:num_requests_waiting", "Completions that wait for one.", "engine.num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks that rows hold; 1 is all.", "engine.kv_usage"),
    ("vllm:gpu_cache_usage_perc", "The same, by its earlier name.", "engine.kv_usage"),
    ("trtrun:batch_rows", "Rows of batches: running, and waiting for the places that others leave.", "batch_rows"),
    (
        "trtrun:draft_hit_rate",
        "Share of the drafts due that were ready before their verdict; absent without drafting ahead.",
        "hit_rate",
    ),
    (
        "trtrun:front_longest_stretch_seconds",
        "Longest processor time that the front's event loop worked without a look at anything else.",
        "longest_stall",
    ),
)
"""Name, help, and where in `Numbers` the number is, or numbers by the values of a label; None is no sample."""

ENGINE_COUNTERS = (
    ("trtrun:rounds", "Rounds.", "num_rounds"),
    ("trtrun:draft_losses", "How often the draft engine was lost.", "draft_losses"),
    ("trtrun:captures", "CUDA graphs captured in rounds, while requests waited.", "num_captures"),
    ("trtrun:compilations", "Kernels compiled in rounds, while requests waited.", "num_compilations"),
    (
        "trtrun:guide_waits",
        "Rows whose guide had to go on beside the rounds.",
        "num_guide_waits",
    ),
    ("trtrun:drafts_due", "Drafts due where draft ranks draft ahead.", "drafts_due"),
    ("trtrun:drafts_foreseen", "Of these, those that were ready before their verdict.", "drafts_foreseen"),
)
"""Name, help, and the engine's name of it."""

COUNTERS = (
    ("trtrun:round_seconds", "Time of rounds by phase.", "round_seconds"),
    ("trtrun:request_work_seconds", "What requests decide the time of, and rounds waited for.", "request_work"),
    ("trtrun:request_work_over_bound", "Rounds in which that took longer than 5 ms.", "work_over_bound"),
    ("vllm:prompt_tokens", "Prompt tokens of requests that were let in.", "totals.num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "totals.num_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV cache.", "totals.num_looked_up_tokens"),
    ("vllm:prefix_cache_hits", "Of these, those that were there.", "totals.num_cached_tokens"),
    ("vllm:num_preemptions", "Rows that gave their blocks to others.", "totals.num_preemptions"),
    ("vllm:spec_decode_num_drafts", "Drafts verified: one a row and round that has one.", "totals.num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", "totals.num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.", "totals.num_accepted_draft_tokens"),
    (
        "trtrun:suffix_draft_tokens",
        "Draft tokens verified that were found in texts in place of a model's.",
        "totals.num_suffix_draft_tokens",
    ),
    ("trtrun:suffix_accepted_tokens", "Of these, accepted.", "totals.num_accepted_suffix_draft_tokens"),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their place in the draft.",
        "accepted_by_position",
    ),
    ("vllm:request_success", "Completions that ended, by the reason.", "totals.num_ended"),
    ("trtrun:requests_aborted", "Requests that ended before all completions had.", "totals.num_aborted"),
    (
        "trtrun:grpc_calls_cut",
        "Calls over gRPC whose client went away before it was told how they ended.",
        "totals.num_calls_cut",
    ),
    (
        "trtrun:requests_refused",
        "Requests that were not answered, or not to their end, by HTTP status.",
        "totals.num_refused",
    ),
    ("trtrun:engine_restarts", "How often the engine was started again.", "totals.num_restarts"),
)
"""Names, help and sources, as of the gauges."""

LABELS = {
    "batch_rows": "state",
    "round_seconds": "phase",
    "request_work": "work",
    "work_over_bound": "work",
    "accepted_by_position": "position",
    "totals.num_ended": "finished_reason",
    "totals.num_refused": "status",
}
"""Metrics that are several numbers."""


class Families(Collector):
    """The table, read for one server."""

    def __init__(self, labels: dict[str, str], numbers: Numbers) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        for name, text, where in GAUGES:
            yield self._fill(GaugeMetricFamily, name, text, attrgetter(where)(self._numbers), LABELS.get(where))
        for name, text, total in ENGINE_COUNTERS:
            yield self._fill(CounterMetricFamily, name, text, self._numbers.total(total))
        for name, text, where in COUNTERS:
            yield self._fill(CounterMetricFamily, name, text, attrgetter(where)(self._numbers), LABELS.get(where))
        yield self._phases()
        yield self._cache_config()
        yield self._acceptance_length()

    def _fill(self, kind: Any, name: str, text: str, found: Any, label: str | None = None) -> Metric:
        family: Metric = kind(name, text, labels=[*self._names, *([label] if label else ())])
        for value, number in found.items() if isinstance(found, Mapping) else [((), found)]:
            if number is not None:
                family.add_metric([*self._values, *([value] if label else ())], number)  # type: ignore[attr-defined]
        return family

    def _phases(self) -> Metric:
        """Seconds that each rank has been in a phase: where several threads do the same, those of the longest."""
        longest: dict[tuple[str, str], float] = {}
        for one in self._numbers.standings:
            key = (str(one.rank), one.phase)
            longest[key] = max(one.seconds, longest.get(key, 0.0))
        family = GaugeMetricFamily(
            "trtrun:engine_phase_seconds",
            "For how long each rank has been in the phase that it is in, and other threads of it beside that.",
            labels=[*self._names, "rank", "phase"],
        )
        for (rank, phase), seconds in longest.items():
            family.add_metric([*self._values, rank, phase], seconds)
        return family

    def _cache_config(self) -> Metric:
        limits = self._numbers.ready.limits if self._numbers.ready is not None else {}
        blocks = limits.get("num_blocks")
        told = {
            "block_size": limits.get("block_size"),
            "num_gpu_blocks": blocks - 1 if isinstance(blocks, int) else None,  # one of them pads
            "enable_prefix_caching": limits.get("enable_block_reuse"),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV store is cut, on whatever device.", labels=[*self._names, *told]
        )
        if limits:
            family.add_metric([*self._values, *map(str, told.values())], 1)
        return family

    def _acceptance_length(self) -> Metric:
        family = HistogramMetricFamily(
            "trtrun:acceptance_length",
            "Tokens that a round yields a row, with a draft or without: accepted + 1.",
            labels=self._names,
        )
        counts = self._numbers.row_rounds()
        buckets = [(str(float(length)), number) for length, number in enumerate(accumulate(counts), start=1)]
        total = sum(length * number for length, number in enumerate(counts, start=1))
        family.add_metric(self._values, [*buckets, ("+Inf", sum(counts))], total)
        return family
