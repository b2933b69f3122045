"""A request whose output is being put together from deltas.

Plain state of one caller. It knows deltas and outputs, and nothing of engines or threads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, CompletionOutput, RequestOutput
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams


@dataclass(slots=True)
class _Parts:
    """What came of one completion so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    finish_reason: str | None = None


class PendingRequest:
    """One prompt of a call, from the time that it is queued until its output is whole."""

    def __init__(
        self, index: int, prompt: str | None, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        """Begin without any output.

        Args:
            index: place of the prompt in the call.
            prompt: its text, None where it came as token ids.
            prompt_token_ids: its tokens.
            sampling: says how many completions it has, and whether they have log probabilities.
        """
        self._index = index
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._has_logprobs = sampling.logprobs is not None
        self._completions = [_Parts() for _ in range(sampling.n)]
        self._num_finished = 0
        self._error: str | None = None

    def take(self, inbox: deque[CompletionDelta]) -> RequestOutput | None:
        """Add all deltas of `inbox`, which is empty then; returns the output once it is whole."""
        while inbox:
            delta = inbox.popleft()
            parts = self._completions[delta.index]
            parts.text.append(delta.text)
            parts.token_ids += delta.token_ids
            parts.token_origins.append(delta.token_origins)
            if delta.logprobs is not None:
                parts.logprobs += delta.logprobs
            parts.statistics = delta.statistics
            if delta.error is not None and self._error is None:
                self._error = delta.error
            if delta.finish_reason is not None:
                parts.finish_reason = delta.finish_reason
                self._num_finished += 1
        return self._output() if self._num_finished == len(self._completions) else None

    def _output(self) -> RequestOutput:
        if self._error is not None:
            return RequestOutput(self._index, self._prompt, self._prompt_token_ids, (), self._error)
        completions = tuple(
            CompletionOutput(
                index,
                "".join(parts.text),
                tuple(parts.token_ids),
                str(parts.finish_reason),
                parts.statistics,
                parts.logprobs if self._has_logprobs else None,
                "".join(parts.token_origins),
            )
            for index, parts in enumerate(self._completions)
        )
        return RequestOutput(self._index, self._prompt, self._prompt_token_ids, completions)
