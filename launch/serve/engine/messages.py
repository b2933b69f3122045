"""What front and engine say to each other: a few kinds of messages.

The front sends Generate, Abort, AskStatus and Close; the engine sends Ready, Deltas, Ended, Status and Beat. They are
plain values. What comes with every round, a Delta for each row, is a list without names of fields (`array_like`). It
does not know who sends what when, or how messages go over the socket (`message_stream.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A message says its kind."""


class Generate(_Message, frozen=True, tag="generate"):
    """Complete a prompt, from its start or behind the tokens `generated`, in turns with those of other groups (see
    `LLMEngine.add_request`). With `more_follow` another one is sent right behind it.

    Attributes:
        prompt: its tokens, 32 bits each: there may be a hundred thousand.
    """

    request_id: str
    prompt: bytes
    sampling: dict[str, Any]
    generated: dict[int, tuple[int, ...]] | None = None
    group: str | None = None
    more_follow: bool = False

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        generated: dict[int, tuple[int, ...]] | None,
        group: str | None = None,
        more_follow: bool = False,
    ) -> Generate:
        """The message for one request."""
        return cls(
            request_id=request_id,
            prompt=array("i", prompt_token_ids).tobytes(),
            sampling=sampling.as_mapping(),
            generated=generated,
            group=group,
            more_follow=more_follow,
        )

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(array("i", self.prompt))

    def sampling_params(self) -> SamplingParams:
        """The parameters, checked once more."""
        return SamplingParams.from_mapping(self.sampling)


class Abort(_Message, frozen=True, tag="abort"):
    """End a request; nothing more is said of it."""

    request_id: str


class AskStatus(_Message, frozen=True, tag="ask_status"):
    """Asks for a Status."""


class Close(_Message, frozen=True, tag="close"):
    """End the engine, and all its ranks."""


class Ready(_Message, frozen=True, tag="ready"):
    """The engine is loaded; its first message.

    Attributes:
        version: of trtrun, the same on both sides.
        config_hash: of the configuration that the engine has read.
        limits: fields of SchedulerLimits.
        memory: bytes that its ranks hold, by "gpu" and "cpu": weights, KV store and the largest round.
        files: tell the files that it was read from, by what they are, from others (`hash_files`).
    """

    version: str
    config_hash: str
    limits: dict[str, int | bool | None]
    memory: dict[str, int] = {}
    files: dict[str, str] = {}

    def scheduler_limits(self) -> SchedulerLimits:
        """The engine's limits, by which prompts are refused before they are sent."""
        return SchedulerLimits(**self.limits)  # type: ignore[arg-type]


class Counters(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What speculation did for a completion, since the engine got it, and how long it waited for a row."""

    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_cached_prompt_tokens: int
    acceptance_histogram: tuple[int, ...]
    num_preemptions: int = 0
    queue_seconds: float | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What a round, or several, added to a completion; see CompletionDelta.

    Attributes:
        logprobs: for each token its id, its log probability, and (id, log probability) of the likeliest ones.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    counters: Counters
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    token_origins: str = ""

    @classmethod
    def of(cls, delta: CompletionDelta) -> Delta:
        """The message for a delta of the engine."""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = tuple(
                (entry.token_id, entry.logprob, tuple((token, value) for token, value in entry.alternatives))
                for entry in delta.logprobs
            )
        statistics = delta.statistics
        return cls(
            request_id=str(delta.request_id),
            index=delta.index,
            token_ids=delta.token_ids,
            text=delta.text,
            # By their places: each row of each round has them, and names would take as long as making them.
            counters=Counters(
                statistics.num_rounds,
                statistics.num_drafts,
                statistics.num_draft_tokens,
                statistics.num_accepted_draft_tokens,
                statistics.num_cached_prompt_tokens,
                tuple(statistics.acceptance_histogram),
                statistics.num_preemptions,
                None if statistics.admitted is None else statistics.queue_seconds,
            ),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            error=delta.error,
            token_origins=delta.token_origins,
        )

    def completion_delta(self) -> CompletionDelta:
        """The delta, with statistics that hold the counters, and times from its arrival at the engine."""
        counters = self.counters
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(TokenLogprobs(token, value, others) for token, value, others in self.logprobs)
        return CompletionDelta(
            request_id=self.request_id,
            index=self.index,
            token_ids=self.token_ids,
            text=self.text,
            statistics=RequestStatistics(
                num_rounds=counters.num_rounds,
                num_drafts=counters.num_drafts,
                num_draft_tokens=counters.num_draft_tokens,
                num_accepted_draft_tokens=counters.num_accepted_draft_tokens,
                num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
                acceptance_histogram=list(counters.acceptance_histogram),
                num_preemptions=counters.num_preemptions,
                admitted=counters.queue_seconds,
            ),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            error=self.error,
            token_origins=self.token_origins,
        )


class Deltas(_Message, frozen=True, tag="deltas"):
    """What a round added, to all its completions: one message, however many rows there are."""

    deltas: tuple[Delta, ...]


class Ended(_Message, frozen=True, tag="ended"):
    """The engine has not taken a request, and says why."""

    request_id: str
    error: str


class Status(_Message, frozen=True, tag="status"):
    """How full the engine is, and its totals since its start.

    Attributes:
        num_running, num_waiting: completions with and without a row.
        num_free_blocks, num_blocks: of the KV store.
        totals: of `LLMEngine.statistics`.
        num_prefilling: of the completions with a row, those whose prompt is still computed.
        num_prefill_tokens: what they have to compute, reused tokens among them.
        num_preempted: of the completions without a row, those that had one.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    totals: dict[str, Any]
    num_prefilling: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that rows hold."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def drafts_due(self) -> int:
        """Drafts that were due where draft ranks draft ahead."""
        return sum(self.totals.get("foresight", {}).get("due_by_place", ()))

    @property
    def drafts_foreseen(self) -> int:
        """Of these, those that were there before their verdict."""
        return sum(self.totals.get("foresight", {}).get("foreseen_by_place", ()))

    @property
    def draft_hit_rate(self) -> float | None:
        """The share of these; None before the first, and where nothing is drafted ahead."""
        return self.drafts_foreseen / self.drafts_due if self.drafts_due else None


class Beat(_Message, frozen=True, tag="beat"):
    """A sign of life of an engine of one process, again and again.

    Attributes:
        doing: what its rounds are doing, for people.
        still_seconds: for how long a round has not got on; None between rounds.
    """

    doing: str
    still_seconds: float | None


Message = Generate | Abort | AskStatus | Close | Ready | Deltas | Ended | Status | Beat
