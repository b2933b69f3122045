"""What becomes of a prompt: its tokens, checked, the requests that complete it, and the output that they make.

It knows the tokenizer and the model's vocabulary. It does not run anything: the LLM hands the requests to the
orchestrator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trtrun.core import FinishReason, Request, SamplingParams
from trtrun.errors import InvalidRequestError
from trtrun.models.config import ModelConfig
from trtrun.outputs import CompletionOutput, RequestOutput
from trtrun.roles.orchestrator import Stream
from trtrun.text import Tokenizer

Prompt = str | Sequence[int]


class PromptReader:
    """Turns prompts and sampling parameters into requests of one model."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._next_request_id = 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens.

        Raises:
            InvalidRequestError: it is empty, holds an id outside the vocabulary, or is a text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("the target has no tokenizer: give prompt_token_ids instead of text")
            tokens = tuple(self._tokenizer.encode(prompt))
        else:
            tokens = tuple(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty: it needs at least one token")
        size = self._model.vocab_size
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequestError(f"prompt token {token!r} is not a token id between 0 and {size - 1}")
        return tokens

    def requests(self, tokens: tuple[int, ...], sampling: SamplingParams) -> Iterator[Request]:
        """The `n` requests of a prompt; each has a seed of its own, derived from the prompt's.

        Raises:
            InvalidRequestError: a parameter that this model cannot follow.
        """
        size = self._model.vocab_size
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", tuple(sampling.logit_bias))):
            for token in ids:
                if not 0 <= token < size:
                    raise InvalidRequestError(f"{name}: {token} is not a token id between 0 and {size - 1}")
        if (sampling.stop or sampling.bad_words) and self._tokenizer is None:
            raise InvalidRequestError("stop and bad_words need a tokenizer, which this checkpoint does not have")
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else self._model.eos_token_ids)
        words = self._tokenizer.bad_word_ids(sampling.bad_words) if self._tokenizer is not None else ()
        first_seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(7), "little")
        for index in range(sampling.n):
            request_id = self._next_request_id
            self._next_request_id += 1
            seeded = replace(sampling, seed=(first_seed + index) % 2**63, n=1)
            yield Request(request_id, tokens, seeded, tuple(dict.fromkeys(stops)), words)


class PromptJob:
    """One prompt of a call and the streams of its completions.

    Attributes:
        index: place of the prompt in the call.
        prompt_token_ids: its tokens, once they are known.
        streams: one a completion.
        error: why it was refused, else None.
    """

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index = index
        self.prompt = prompt
        self.prompt_token_ids: tuple[int, ...] = ()
        self.streams: list[Stream] = []
        self.error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(stream.finish_reason is not None for stream in self.streams)

    def output(self) -> RequestOutput:
        """The finished prompt's output."""
        text = self.prompt if isinstance(self.prompt, str) else None
        if self.error is not None:
            return RequestOutput(self.index, text, self.prompt_token_ids, (), self.error)
        completions = tuple(
            CompletionOutput(
                index,
                stream.text,
                tuple(stream.token_ids),
                str(stream.finish_reason or FinishReason.CANCELLED),
                stream.statistics,
                stream.logprobs if stream.request.sampling.logprobs is not None else None,
            )
            for index, stream in enumerate(self.streams)
        )
        return RequestOutput(self.index, text, self.prompt_token_ids, completions)
