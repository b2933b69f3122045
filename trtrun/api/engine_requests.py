"""Requests of the engine core: queued with all their completions or none, told as deltas, and forgotten at their end.

It knows the scheduler, texts and adapters. It does not know rounds, ranks or failures (`llm_engine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from trtrun.api.adapters import AdapterTable
from trtrun.api.deltas import make_delta, make_lost_delta, new_text
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.core.nouns import FinishReason
from trtrun.core.outputs import CompletionDelta, RequestId
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, LibraryPanicError
from trtrun.rounds.commit import RowUpdate
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.scheduler import Scheduler
from trtrun.tokens.detokenizer import AhoCorasick, CompletionText, IncrementalDetokenizer
from trtrun.tokens.text import Tokenizer


@dataclass(frozen=True, slots=True)
class _Request:
    """A request: its id, and its completions that go on, by their ids in the scheduler."""

    request_id: RequestId
    num_completions: int
    going_on: dict[int, Completion]


class EngineRequests:
    """The requests that wait or run.

    Args:
        scheduler: of their completions.
        prompts: makes completions of a prompt.
        tokenizer: None where there is no text.
        adapters: that requests may name.
        vocab_size: of the target.
        on_end: is given the statistics of each completion that ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prompts: PromptReader,
        tokenizer: Tokenizer | None,
        adapters: AdapterTable,
        vocab_size: int,
        on_end: Callable[[RequestStatistics], None],
    ) -> None:
        self._scheduler = scheduler
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._on_end = on_end
        self._request_ids, self._completion_ids = count(), count()
        self._requests: dict[RequestId, _Request] = {}
        self._owners: dict[int, tuple[_Request, int]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: RequestId | None,
        generated: Mapping[int, Sequence[int]] | None,
        group: Hashable,
        owner: Hashable,
    ) -> RequestId:
        """Queue the completions of a request; see `LLMEngine.add_checked`."""
        if request_id in self._requests:
            raise InvalidRequestError(f"the request id {request_id!r} is in use")
        assert not isinstance(prompt, str)
        tokens = tuple(prompt)
        adapter = self._adapters.find(sampling.lora_name)
        requests = self._prompts.requests(
            tokens, sampling, lambda: next(self._completion_ids), self._scheduler.limits.max_length, adapter
        )
        parts = dict(enumerate(requests))
        behind = dict.fromkeys(parts, ()) if generated is None else generated
        if not behind or not parts.keys() >= behind.keys():
            raise InvalidRequestError(f"generated must name completions between 0 and {len(parts) - 1}, one at least")
        parts = {index: parts[index] for index in behind}
        self._scheduler.check_room(len(parts), owner)
        while request_id is None or request_id in self._requests:
            request_id = next(self._request_ids)
        request = _Request(request_id, len(parts), {})
        text = self._begin_text(tokens, sampling)  # of each completion, which share what this takes
        stops = AhoCorasick(sampling.stop_sequences) if sampling.stop_sequences else None
        try:
            for index, part in parts.items():
                self._owners[part.request_id] = (request, index)
                completion = self._scheduler.add(
                    part,
                    text if text is None or len(parts) == 1 else text.copied(),
                    behind[index],
                    ("request", request_id) if group is None else group,
                    stops,
                    owner,
                )
                new_text(completion, behind[index])  # it has been told
                request.going_on[part.request_id] = completion
            self._requests[request_id] = request
        except BaseException:
            for part in parts.values():
                self._scheduler.cancel(part.request_id)
                self._owners.pop(part.request_id, None)
            self._requests.pop(request_id, None)
            raise
        return request_id

    def _begin_text(self, tokens: Sequence[int], sampling: SamplingParams) -> CompletionText | None:
        """The text of a completion behind its prompt's tokens, without any so far; None where there is no text."""
        if self._tokenizer is None:
            return None
        stop, keeps_stop = AhoCorasick(sampling.stop), sampling.include_stop_str_in_output
        ends = self._prompts.end_token_ids
        try:
            detokenizer = IncrementalDetokenizer(self._tokenizer, tokens, sampling.skip_special_tokens, ends)
        except LibraryPanicError as panic:
            raise InvalidRequestError(f"the prompt's tokens cannot be made text: {panic}") from None
        return CompletionText(detokenizer, stop, keeps_stop, self._prompts.thoughts_without_stops(sampling, tokens))

    def abort(self, request_id: RequestId) -> bool:
        """End a request now, without a further delta; False when it is not known (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for completion_id, completion in request.going_on.items():
            del self._owners[completion_id]
            # What rounds still out produce for it is ignored at their commit.
            self._scheduler.cancel(completion_id)
            self._on_end(completion.statistics)
        return True

    def abort_all(self) -> None:
        """End every request now."""
        for request_id in list(self._requests):
            self.abort(request_id)

    def has_begun(self, request_id: RequestId) -> bool:
        """Whether a completion of the request has, or had, a row; False when the request is not known (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        some_have_ended = len(request.going_on) < request.num_completions
        return some_have_ended or any(map(self._scheduler.has_begun, request.going_on))

    def prompt_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """The prompt's tokens of a request that goes on."""
        completion = next(iter(self._requests[request_id].going_on.values()))
        return completion.request.prompt_token_ids

    def tell(self, gain: RowUpdate) -> CompletionDelta:
        """What a round gave a completion, as a delta; one that has ended is forgotten."""
        completion = gain.result.completion
        completion_id = completion.request.request_id
        request, index = self._owners[completion_id]
        text = new_text(completion, gain.result.new_token_ids)
        if completion.text is not None and completion.text.failure is not None:
            self._scheduler.cancel(completion_id)  # unless it has just ended
            completion.finish(FinishReason.ERROR, time.perf_counter())
        if completion.finish_reason is not None:
            del self._owners[completion_id], request.going_on[completion_id]
            if not request.going_on:
                del self._requests[request.request_id]
            self._on_end(completion.statistics)
        return make_delta(request.request_id, index, gain.result, gain.logprobs, self._vocab_size, gain.logits, text)

    def lose_all(self) -> list[CompletionDelta]:
        """Forget all requests; returns the last delta of each completion, which says that it was lost."""
        lost = [
            make_lost_delta(request.request_id, index, request.going_on[completion_id])
            for completion_id, (request, index) in self._owners.items()
        ]
        self._owners.clear()
        self._requests.clear()
        return lost
