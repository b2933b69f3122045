"""Tokens and what drafting did for them, under vLLM's names and trtrun's own; plain totals until they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.serve.metrics.totals import FrontTotals


class SpeculationMetrics(Collector):
    """Of all requests of a server."""

    def __init__(self, labels: dict[str, str], totals: FrontTotals, draft_len: int) -> None:
        """Begin.

        Args:
            labels: of every sample.
            totals: that are told.
            draft_len: tokens drafted in a round, at most.
        """
        self._names, self._values = list(labels), list(labels.values())
        self._totals = totals
        self._draft_len = draft_len

    def collect(self) -> Iterator[Metric]:
        """All families, as the registry asks for them."""
        totals = self._totals
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of requests that were let in.", totals.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", totals.num_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV cache.", totals.num_looked_up_tokens),
            ("vllm:prefix_cache_hits", "Of these, those that were there.", totals.num_cached_tokens),
            ("vllm:num_preemptions", "Rows that gave their blocks to others.", totals.num_preemptions),
            ("vllm:spec_decode_num_drafts", "Drafts verified: one a row and round that has one.", totals.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", totals.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, accepted.", totals.num_accepted_draft_tokens),
        ):
            family = CounterMetricFamily(name, text, labels=self._names)
            family.add_metric(self._values, value)
            yield family
        yield self._by_position()
        yield self._acceptance_length()

    def _counts(self) -> list[int]:
        """Row rounds that kept 0, 1, … draft tokens, up to draft_len."""
        counts = self._totals.acceptance_histogram
        return [*counts, *[0] * (self._draft_len + 1 - len(counts))]

    def _by_position(self) -> Metric:
        """The draft token of a place was accepted in all rounds that kept more tokens than lie before it."""
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            labels=[*self._names, "position"],
        )
        counts = self._counts()
        for position in range(len(counts) - 1):
            family.add_metric([*self._values, str(position)], sum(counts[position + 1 :]))
        return family

    def _acceptance_length(self) -> Metric:
        family = HistogramMetricFamily(
            "trtrun:acceptance_length",
            "Tokens that a round yields a row, with a draft or without: accepted + 1.",
            labels=self._names,
        )
        counts = self._counts()
        buckets = [(str(float(length)), number) for length, number in enumerate(accumulate(counts), start=1)]
        total = sum(length * number for length, number in enumerate(counts, start=1))
        family.add_metric(self._values, [*buckets, ("+Inf", sum(counts))], total)
        return family
