"""Answers of the OpenAI API: pieces of completions become its objects, whole ones and chunks of a stream.

It knows pieces and the API's names. It does not know how answers travel.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.serve.front import Piece, Usage
from launch.serve.openai_types import Answering
from launch.serve.token_texts import TokenTexts
from trtrun.core import TokenLogprobs
from trtrun.request_statistics import RequestStatistics
from trtrun.text import Tokenizer

_REPLACEMENT = "\ufffd"


@dataclass
class _Choice:
    """What came of one choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class Answer(ABC):
    """The objects of one request's answer.

    Attributes:
        answer_id: which every object of the answer carries.
    """

    prefix: str
    whole_name: str
    chunk_name: str

    def __init__(
        self, model_name: str, tokenizer: Tokenizer | None, answering: Answering, prompts: Sequence[Sequence[int]]
    ) -> None:
        """Begin an answer.

        Args:
            model_name: what clients call the model.
            tokenizer: None where there is no text.
            answering: how the request wants it.
            prompts: the tokens of each prompt.
        """
        self.answer_id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._model_name = model_name
        self._created = int(time.time())
        self._answering = answering
        self._num_choices = len(prompts) * answering.sampling.n
        self._spelling = _Spelling(tokenizer)
        asks_texts = answering.return_token_texts
        self._token_texts = TokenTexts(tokenizer, prompts, answering.sampling.n) if asks_texts else None

    def whole(self, pieces: Sequence[Piece], usage: Usage, draft_len: int) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [_Choice() for _ in range(self._num_choices)]
        for piece in pieces:
            choice, delta = choices[piece.choice], piece.delta
            choice.text.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.token_origins.append(delta.token_origins)
            choice.logprobs += delta.logprobs or ()
            choice.finish_reason = delta.finish_reason or choice.finish_reason
        told = [
            self._choice(
                number,
                self._text("".join(choice.text), is_chunk=False),
                choice.token_ids,
                "".join(choice.token_origins),
                choice.logprobs if self._answering.sampling.logprobs is not None else None,
                choice.finish_reason,
            )
            for number, choice in enumerate(choices)
        ]
        return self._object(self.whole_name, told) | _usage(usage, draft_len)

    def beginning(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""
        return []

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None where it says nothing yet."""
        delta = piece.delta
        says_something = delta.text or delta.finish_reason or delta.logprobs is not None
        if not says_something and not (self._answering.shows_tokens and delta.token_ids):
            return None
        told = self._choice(
            piece.choice,
            self._text(delta.text, is_chunk=True),
            list(delta.token_ids),
            delta.token_origins,
            delta.logprobs,
            delta.finish_reason,
        )
        return self._object(self.chunk_name, [told]) | ({"usage": None} if self._answering.include_usage else {})

    def usage_chunk(self, usage: Usage, draft_len: int) -> dict[str, Any] | None:
        """The last chunk, where it was asked for."""
        if not self._answering.include_usage:
            return None
        return self._object(self.chunk_name, []) | _usage(usage, draft_len)

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _choice(
        self,
        number: int,
        text: dict[str, Any],
        token_ids: list[int],
        token_origins: str,
        logprobs: Sequence[TokenLogprobs] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        told = {"index": number, **text, "logprobs": None, "finish_reason": finish_reason}
        if logprobs is not None:
            told["logprobs"] = self._logprobs(number, logprobs)
        if self._answering.return_token_ids:
            told["token_ids"] = token_ids
        if self._answering.return_token_origins:
            told["token_origins"] = token_origins
        if self._token_texts is not None:
            told["token_texts"] = self._token_texts.take(number, token_ids, finish_reason is not None)
        return told

    @abstractmethod
    def _text(self, text: str, is_chunk: bool) -> dict[str, Any]:
        """The field of a choice that holds text."""

    @abstractmethod
    def _logprobs(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log probabilities of a choice's next tokens."""


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    prefix, whole_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model_name: str, tokenizer: Tokenizer | None, answering: Answering, prompts: Sequence[Sequence[int]]
    ) -> None:
        """As every Answer."""
        super().__init__(model_name, tokenizer, answering, prompts)
        self._offsets = [0] * self._num_choices

    def _text(self, text: str, is_chunk: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets, tokens = [], []
        for entry in entries:
            token = self._spelling.spell(entry.token_id)
            offsets.append(self._offsets[number])
            tokens.append(token)
            self._offsets[number] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._spelling.spell(token): value for token, value in reversed(entry.alternatives)}
                for entry in entries
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    prefix, whole_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def beginning(self) -> list[dict[str, Any]]:
        """Whose words follow, for each choice."""
        usage = {"usage": None} if self._answering.include_usage else {}
        delta = {"role": "assistant", "content": ""}
        return [
            self._object(self.chunk_name, [self._choice(number, {"delta": delta}, [], "", None, None)]) | usage
            for number in range(self._num_choices)
        ]

    def _text(self, text: str, is_chunk: bool) -> dict[str, Any]:
        if is_chunk:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, number: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in entry.alternatives],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spelling.spell(token)
        spelled = None if _REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelled}


class _Spelling:
    """Tokens as texts of their own, for log probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def spell(self, token: int) -> str:
        """A token's text; where there is none, such as without a tokenizer, its id."""
        text = self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer is not None else ""
        return text or f"token_id:{token}"


def _usage(usage: Usage, draft_len: int) -> dict[str, Any]:
    """What a request took, and what speculation did for it, as aiperf reads that."""
    told: dict[str, Any] = {
        "usage": {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_completion_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens},
        }
    }
    if draft_len:
        told["metrics"] = {"speculative_decoding": _speculation(list(usage.statistics.values()), draft_len)}
    return told


def _speculation(statistics: Sequence[RequestStatistics], draft_len: int) -> dict[str, Any]:
    """Sums over all choices.

    Args:
        statistics: of each choice.
        draft_len: tokens drafted in a round, at most.
    """
    histogram = [0] * (draft_len + 1)
    for of_choice in statistics:
        for accepted, number in enumerate(of_choice.acceptance_histogram):
            histogram[accepted] += number
    rounds = sum(of_choice.num_rounds for of_choice in statistics)
    drafted = sum(of_choice.num_draft_tokens for of_choice in statistics)
    accepted = sum(of_choice.num_accepted_draft_tokens for of_choice in statistics)
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": draft_len,
        "mean_acceptance_length": round(1 + accepted / rounds, 4) if rounds else 0.0,
        "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
    }
