"""Answers to /v1/chat/completions: messages, with what was thought and which tools are called, whole or as deltas.

It knows pieces and the API's names. It does not know how answers travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.serve.api.openai.answers import NOTHING, Answer
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.output.parsing import ChatText
from launch.serve.frontend.front import Usage
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.tokens.detokenizer import TokenText


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    scores_beside = True

    def prepare(self, answering: Answering) -> None:
        """See `Answer`."""
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
        """A piece's tokens are thoughts' where these go on behind it: that is right to a round."""
        if self._texts[piece.index].is_thinking:
            self._num_thought += len(piece.token_ids)

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
