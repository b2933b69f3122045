"""The load of a benchmark: requests given to the engine as trtllm-bench gives them, and when each of them got on.

Requests are added between rounds, so many at once and so fast as asked for. It knows the engine core, and neither
datasets nor reports.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from launch.exit_codes import FailedError
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trtrun.api.llm_engine import LLMEngine

Prompts = Sequence[tuple[Sequence[int], SamplingParams]]
"""Token ids of each, and its sampling."""


@dataclass(frozen=True)
class Demand:
    """How requests come.

    Attributes:
        concurrency: requests in work at once; 0 or less is no limit.
        request_rate: requests a second; 0 or less is all at once.
    """

    concurrency: int = -1
    request_rate: float = -1.0


@dataclass
class Record:
    """One request, as it went. Times are seconds of `time.perf_counter`.

    Attributes:
        number: of the request, in the dataset's order.
        num_input_tokens: of its prompt.
        num_wanted_tokens: that it may generate.
        started: when it was given to the engine.
        tokens: that were generated.
        text: of these.
        statistics: first token, end, rounds, drafts.
    """

    number: int
    num_input_tokens: int
    num_wanted_tokens: int
    started: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    statistics: RequestStatistics = field(default_factory=RequestStatistics)

    @property
    def ended(self) -> float:
        """When its last token was committed."""
        return self.statistics.finished or self.started

    @property
    def latency(self) -> float:
        """Seconds from its start to its end."""
        return self.ended - self.started

    @property
    def first_token_latency(self) -> float:
        """Seconds from its start to its first token."""
        return (self.statistics.first_token or self.ended) - self.started

    @property
    def generating(self) -> float:
        """Seconds from its first token to its end."""
        return self.latency - self.first_token_latency

    @property
    def num_rounds(self) -> int:
        """Rounds that gave it tokens, the first behind its prompt among them."""
        return max(1, len(self.tokens) - self.statistics.num_accepted_draft_tokens)


def play_load(
    engine: LLMEngine, prompts: Prompts, demand: Demand, on_end: Callable[[int], None], log: TextIO | None = None
) -> list[Record]:
    """Complete prompts.

    Args:
        engine: without requests.
        prompts: token ids of each, and its sampling parameters.
        demand: how they come.
        on_end: called with how many have ended.
        log: gets a line of JSON a round.

    Returns:
        Records in the order of the prompts.

    Raises:
        InvalidRequestError: a request can never run.
        FailedError: one ended with an error.
    """
    records: dict[int, Record] = {}
    num_ended = iteration = 0
    begun = time.perf_counter()
    while num_ended < len(prompts):
        due = _count_due(len(prompts), demand, time.perf_counter() - begun, num_ended)
        for number in range(len(records), due):
            tokens, sampling = prompts[number]
            records[number] = Record(number, len(tokens), sampling.max_tokens, time.perf_counter())
            engine.add_request(list(tokens), sampling, number)
        active = len(records) - num_ended
        if not active:  # the next one has a time to come at
            time.sleep(max(0.0, begun + len(records) / demand.request_rate - time.perf_counter()))
            continue
        before = time.perf_counter()
        deltas = engine.step()
        for delta in deltas:
            num_ended += _take(records, delta)
        on_end(num_ended)
        if log is not None:
            _write_round(log, iteration, time.perf_counter() - before, active, deltas)
        iteration += 1
    engine.drain()
    return [records[number] for number in range(len(prompts))]


def _count_due(count: int, demand: Demand, elapsed: float, num_ended: int) -> int:
    """Requests that are to have begun by now."""
    due = count
    if demand.request_rate > 0:
        due = min(due, int(elapsed * demand.request_rate) + 1)
    if demand.concurrency > 0:
        due = min(due, num_ended + demand.concurrency)
    return due


def _take(records: dict[int, Record], delta: CompletionDelta) -> bool:
    """Keep what came of a request; returns whether that was all."""
    if delta.error is not None:
        raise FailedError(delta.error)
    assert isinstance(delta.request_id, int)
    record = records[delta.request_id]
    record.tokens += delta.token_ids
    record.text += delta.text
    if delta.finish_reason is None:
        return False
    record.statistics = delta.statistics.copy()
    return True


def _write_round(log: TextIO, iteration: int, seconds: float, active: int, deltas: Sequence[CompletionDelta]) -> None:
    row = {
        "iter": iteration,
        "iterLatencyMS": 1e3 * seconds,
        "numActiveRequests": active,
        "numCompletedRequests": sum(delta.finish_reason is not None for delta in deltas),
        "numGeneratedTokens": sum(len(delta.token_ids) for delta in deltas),
        "specDecodingStats": {
            "numAcceptedTokens": sum(delta.token_origins.count("a") for delta in deltas),
            "numRequestsWithTokens": sum(bool(delta.token_ids) for delta in deltas),
        },
    }
    log.write(json.dumps(row) + "\n")
