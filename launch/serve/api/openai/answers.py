"""Answers of the OpenAI API: pieces of completions become its objects, whole ones and chunks of a stream; those of
chats become messages, with thoughts and calls of tools.

How answers travel is decided elsewhere.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from launch.serve.api.openai.answer_parts import (
    Choice,
    EchoedPrompts,
    ScoredPrompts,
    TokenTexts,
    spelling_of,
    tell_logprobs,
    tell_prompt_logprobs,
    tell_tokens,
    tell_usage,
)
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.output.parsing import ChatText
from launch.serve.frontend.frontend import Usage
from launch.serve.http.answers import PING, event
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.tokens.detokenizer import TokenText
from trtrun.tokens.text import Tokenizer

_OBFUSCATED = 32
"""Bytes of which the length of a chunk's choice is made a multiple, where the request asks for it."""

_ENCODER = msgspec.json.Encoder()
NOTHING = CompletionDelta("", 0, (), "", RequestStatistics())


class Answer(ABC):
    """The objects of one request's answer.

    Attributes:
        answer_id: which every object of the answer carries.
    """

    prefix: str
    whole_name: str
    chunk_name: str
    last_words: tuple[bytes, ...] = (event(b"[DONE]"),)
    ping = PING
    tells_offsets = False
    scores_beside = False

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        answering: Answering,
        prompts: Sequence[Sequence[int]],
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin an answer.

        Args:
            model_name: what clients call the model.
            tokenizer: None where there is no text.
            answering: how the request wants it.
            prompts: the tokens of each prompt.
            end_token_ids: of the model; texts never have them.
        """
        self.answer_id = f"{self.prefix}{answering.request_id or secrets.token_hex(16)}"
        self._model_name = model_name
        self._created = int(time.time())
        self._answering = answering
        self._num_choices = len(prompts) * answering.sampling.n
        self._spelling = spelling_of(None if answering.tokens_as_ids else tokenizer)
        self._choices: dict[int, Choice] = {}
        self._so_far = Usage(sum(map(len, prompts)))
        needs_texts = answering.return_token_texts or (self.tells_offsets and answering.sampling.logprobs is not None)
        n, is_scored = answering.sampling.n, answering.sampling.prompt_logprobs is not None
        skips = answering.sampling.skip_special_tokens
        self._token_texts = TokenTexts(tokenizer, prompts, n, skips, end_token_ids) if needs_texts else None
        self._scores = ScoredPrompts(n, are_awaited=is_scored and answering.echo)
        self._echoes = EchoedPrompts(tokenizer, prompts, n, skips) if answering.echo else None
        self.prepare(answering)

    def prepare(self, answering: Answering) -> None:  # noqa: B027
        """Make what this kind of answer has beside, at its begin."""

    def keep(self, delta: CompletionDelta) -> None:
        """Take a piece of an answer that comes whole."""
        has_logprobs = self._answering.sampling.logprobs is not None
        for piece in self._scores.take(delta):
            choice = self._choices.setdefault(piece.index, Choice())
            if self._echoes is not None and self._echoes.begins(piece.index):
                choice.add(self._echoes.text(piece.index), self._echo(piece.index, {}))
            logprobs = piece.logprobs or () if has_logprobs else None
            choice.add(self._read(piece), self._choice(piece.index, {}, piece, logprobs))

    def whole(self, usage: Usage, draft_len: int) -> Iterator[bytes]:
        """The answer to a request that does not stream, of all pieces that were kept: its JSON, in parts."""
        head = self._object(self.whole_name, [])
        del head["choices"]
        yield _ENCODER.encode(head)[:-1] + b',"choices":['
        for number in range(self._num_choices):
            choice = self._choices.pop(number)
            text = self._whole(number, "".join(choice.text))
            beside = {} if self.scores_beside else self._prompt_logprobs(number)
            yield (b"," if number else b"") + _ENCODER.encode(choice.whole(text) | beside)
        beside = self._prompt_logprobs(0) if self.scores_beside else {}
        yield b"]," + _ENCODER.encode(beside | self._usage(usage, draft_len))[1:]

    def beginning(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""
        return []

    def chunks(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The chunks that a piece makes."""
        told: list[dict[str, Any]] = []
        for piece in self._scores.take(delta):
            if self._echoes is not None and self._echoes.begins(piece.index):
                (text,) = self._parts(piece.index, self._echoes.text(piece.index), is_end=False) or [self._nothing()]
                told.append(self._chunk(self._echo(piece.index, text)))
            told += self._chunks_of(piece)
        return told

    def _chunks_of(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """Chunks of a piece, one for each part of its text; none if it says nothing yet. What else it has is in the
        first one, and why it ended in the last."""
        self._so_far.num_completion_tokens += len(delta.token_ids)
        parts = self._parts(delta.index, delta.text, delta.finish_reason is not None)
        says_something = parts or delta.finish_reason or delta.logprobs is not None
        if not says_something and not (self._answering.shows_tokens and delta.token_ids):
            return []
        first, *others = parts or [self._nothing()]
        choices = [self._choice(delta.index, first, delta, delta.logprobs)]
        choices += [self._choice(delta.index, part, NOTHING, None) for part in others]
        if others:
            choices[0]["finish_reason"], choices[-1]["finish_reason"] = None, choices[0]["finish_reason"]
        return list(map(self._chunk, choices))

    def ending(self, usage: Usage, draft_len: int) -> list[dict[str, Any]]:
        """Chunks behind the last piece: what the request took, where it was asked for."""
        if not self._answering.include_usage:
            return []
        return [self._object(self.chunk_name, []) | self._usage(usage, draft_len)]

    def _usage(self, usage: Usage, draft_len: int) -> dict[str, Any]:
        """What the request took."""
        return tell_usage(usage, draft_len)

    def failure(self, error: dict[str, Any]) -> dict[str, Any]:
        """The chunk of an error behind which nothing follows."""
        return error

    def event(self, told: dict[str, Any]) -> bytes:
        """A chunk as an event of a stream."""
        return event(_ENCODER.encode(told))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a choice, with what the request asks for beside it."""
        chunk = self._object(self.chunk_name, [choice])
        if self._answering.continuous_usage:
            chunk["usage"] = tell_tokens(self._so_far)
        elif self._answering.include_usage:
            chunk["usage"] = None
        if self._answering.obfuscates:
            chunk["obfuscation"] = self._obfuscation(choice)
        return chunk

    def _obfuscation(self, choice: Mapping[str, Any]) -> str:
        """Random letters, which make the lengths of a choice's text and log probabilities multiples of a block."""
        length = len(_ENCODER.encode(choice))
        return secrets.token_hex(_OBFUSCATED)[: _OBFUSCATED - length % _OBFUSCATED]

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": name,
            "created": self._created,
            "model": self._model_name,
            "choices": choices,
        }

    def _choice(
        self, number: int, text: dict[str, Any], delta: CompletionDelta, logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any]:
        """A choice with its text and what a delta brought it; its log probabilities, or None where it has none."""
        token_ids, finish_reason = list(delta.token_ids), self._why_over(number, delta.finish_reason)
        told = {"index": number, **text, "logprobs": None, "finish_reason": finish_reason}
        texts: Sequence[TokenText] = ()
        if self._token_texts is not None:
            texts = self._token_texts.take(number, token_ids, finish_reason is not None)
        if self._echoes is not None and texts:
            behind = len(self._echoes.text(number))
            texts = [TokenText(behind + part.begin, part.text) for part in texts]
        if logprobs is not None:
            told["logprobs"] = self._logprobs(logprobs, texts)
        if self._answering.return_token_ids:
            told["token_ids"] = token_ids
        if self._answering.return_token_origins:
            told["token_origins"] = delta.token_origins
        if self._answering.return_token_texts:
            told["token_texts"] = [part.text for part in texts]
        return told

    def _echo(self, number: int, text: dict[str, Any]) -> dict[str, Any]:
        """A choice with what its prompt is, in front of all else."""
        assert self._echoes is not None
        told = self._choice(number, text, NOTHING, None)
        alternatives = self._answering.sampling.logprobs
        if alternatives is not None:
            entries = self._scores.of_choice(number, alternatives)
            begins = [part.begin for part in self._echoes.parts(number)]
            told["logprobs"] = tell_logprobs(self._echoes.tokens(number), entries, begins, self._spelling.spell)
        return told

    def _prompt_logprobs(self, number: int) -> dict[str, Any]:
        """The log probabilities of a choice's prompt, where the request asks for them by this name."""
        alternatives = self._answering.prompt_logprobs
        if alternatives is None:
            return {}
        entries = self._scores.of_choice(number, alternatives)
        return {"prompt_logprobs": tell_prompt_logprobs(entries, self._spelling.spell)}

    def _read(self, piece: CompletionDelta) -> str:
        """The text of a piece of an answer that comes whole, as far as it is to be kept here."""
        return piece.text

    def _why_over(self, number: int, finish_reason: str | None) -> str | None:
        """The reason why a choice ended, in the API's words."""
        return finish_reason

    @abstractmethod
    def _whole(self, number: int, text: str) -> dict[str, Any]:
        """The fields of a choice that hold its text, all of it."""

    @abstractmethod
    def _parts(self, number: int, text: str, is_end: bool) -> list[dict[str, Any]]:
        """Parts of the next text, one for each chunk; none if nothing is certain yet."""

    def _nothing(self) -> dict[str, Any]:
        """The part of a chunk without text."""
        return {}

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenLogprobs], texts: Sequence[TokenText]) -> dict[str, Any]:
        """Log probabilities of a choice's next tokens, and these tokens' parts in the text, where they are needed."""


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    tells_offsets = True

    def _whole(self, number: int, text: str) -> dict[str, Any]:
        return {"text": text}

    def _parts(self, number: int, text: str, is_end: bool) -> list[dict[str, Any]]:
        return [{"text": text}] if text else []

    def _nothing(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, entries: Sequence[TokenLogprobs], texts: Sequence[TokenText]) -> dict[str, Any]:
        tokens, begins = [entry.token_id for entry in entries], [part.begin for part in texts]
        return tell_logprobs(tokens, entries, begins, self._spelling.spell)


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    scores_beside = True

    @override
    def prepare(self, answering: Answering) -> None:
        is_parsed = answering.parsing.is_needed
        self._texts = [ChatText(answering.parsing) for _ in range(self._num_choices)] if is_parsed else []
        self._num_thought = 0

    def beginning(self) -> list[dict[str, Any]]:
        """Whose words follow, for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk(self._choice(number, {"delta": delta}, NOTHING, None)) for number in range(self._num_choices)
        ]

    def _read(self, piece: CompletionDelta) -> str:
        if not self._texts:
            return piece.text
        self._texts[piece.index].keep(piece.text, piece.finish_reason is not None)
        self._count_thoughts(piece)
        return ""

    def chunks(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The chunks of a stream that a delta makes; thoughts in it are counted."""
        told = super().chunks(delta)
        if self._texts:
            self._count_thoughts(delta)
        return told

    def _count_thoughts(self, piece: CompletionDelta) -> None:
        """Count as many of a piece's tokens as of its text: that is right to a round or so."""
        self._num_thought += round(len(piece.token_ids) * self._texts[piece.index].thoughts)

    def _usage(self, usage: Usage, draft_len: int) -> dict[str, Any]:
        told = super()._usage(usage, draft_len)
        if self._answering.parsing.reasoning:
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": self._num_thought}
        return told

    def _whole(self, number: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": self._texts[number].message() if self._texts else message}

    def _parts(self, number: int, text: str, is_end: bool) -> list[dict[str, Any]]:
        if self._texts:
            return [{"delta": delta} for delta in self._texts[number].deltas(text, is_end)]
        return [{"delta": {"content": text}}] if text else []

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}}

    def _why_over(self, number: int, finish_reason: str | None) -> str | None:
        is_calling = bool(self._texts) and self._texts[number].has_calls
        return "tool_calls" if finish_reason == "stop" and is_calling else finish_reason

    def _logprobs(self, entries: Sequence[TokenLogprobs], texts: Sequence[TokenText]) -> dict[str, Any]:
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in entry.alternatives],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._spelling.spell(token), "logprob": logprob, "bytes": self._spelling.bytes_of(token)}
