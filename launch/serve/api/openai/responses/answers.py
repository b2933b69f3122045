"""Answers to /v1/responses: pieces of a completion become a response, whole or as its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from typing_extensions import override

from launch.serve.api.openai.answer_parts import tell_usage
from launch.serve.api.openai.answers import ChatAnswer
from launch.serve.api.openai.calls import Answering
from launch.serve.api.openai.output.formats import TOOL_FORMATS, new_id
from launch.serve.api.openai.output.machine import Text
from launch.serve.api.openai.output.parsing import ChoiceParser, share_of_thoughts
from launch.serve.api.openai.responses.output import OutputItems, Told
from launch.serve.frontend.frontend import Usage
from launch.serve.http.answers import event
from trtrun.core.outputs import CompletionDelta

_ENCODER = msgspec.json.Encoder()


class ResponseAnswer(ChatAnswer):
    """The answer to /v1/responses. Its tokens' log probabilities stand with text; those of thoughts and calls are not
    told."""

    prefix = "resp_"
    last_words = ()

    @override
    def prepare(self, answering: Answering) -> None:
        super().prepare(answering)
        parsing = answering.parsing
        self._parser = ChoiceParser(parsing)
        make_id = TOOL_FORMATS[parsing.tools].new_id if parsing.tools else new_id
        self._output = OutputItems(make_id, answering.call_items)
        self._echoed = {name: msgspec.Raw(value.encode()) for name, value in answering.echoed.items()}
        self._waiting: list[Told] = []  # log probabilities whose text is held back
        self._reason: str | None = None
        self._num_events = 0

    @override
    def keep(self, delta: CompletionDelta) -> None:
        self._take(delta)

    @override
    def whole(self, usage: Usage, draft_len: int) -> Iterator[bytes]:
        yield _ENCODER.encode(self._response(self._status(), usage, draft_len))

    @override
    def beginning(self) -> list[Told]:
        return [self._tell(name, "in_progress") for name in ("response.created", "response.in_progress")]

    @override
    def chunks(self, delta: CompletionDelta) -> list[Told]:
        return list(map(self._numbered, self._take(delta)))

    @override
    def ending(self, usage: Usage, draft_len: int) -> list[Told]:
        status = self._status()
        return [self._tell(f"response.{status}", status, usage, draft_len)]

    @override
    def failure(self, error: Told) -> Told:
        code = error["error"]["code"] or "server_error"
        told = self._tell("response.failed", "failed")
        told["response"]["error"] = {"code": code, "message": error["error"]["message"]}
        return told

    @override
    def event(self, told: Told) -> bytes:
        return f"event: {told['type']}\n".encode() + event(_ENCODER.encode(told))

    def _take(self, delta: CompletionDelta) -> list[Told]:
        """What a piece adds to the output."""
        is_end = delta.finish_reason is not None
        if delta.logprobs is not None:
            self._waiting += self._logprobs(delta.logprobs, ())["content"]
        events = self._parser.feed(delta.text, is_end)
        thoughts = share_of_thoughts(events, delta.text, is_thinking=self._parser.is_thinking)
        self._num_thought += round(len(delta.token_ids) * thoughts)
        told: list[Told] = []
        for found in events:
            told += self._output.take(found, self._waiting if isinstance(found, Text) else ())
            self._waiting = []
        if is_end:
            self._reason = delta.finish_reason
            told += self._output.close("incomplete" if self._is_cut else "completed")
        return told

    @property
    def _is_cut(self) -> bool:
        return self._reason == "length"

    def _status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def _tell(self, name: str, status: str, usage: Usage | None = None, draft_len: int = 0) -> Told:
        return self._numbered({"type": name, "response": self._response(status, usage, draft_len)})

    def _numbered(self, told: Told) -> Told:
        number, self._num_events = self._num_events, self._num_events + 1
        numbered = {**told, "sequence_number": number}
        if self._answering.obfuscates and "delta" in told:
            numbered["obfuscation"] = self._obfuscation(told)
        return numbered

    def _response(self, status: str, usage: Usage | None, draft_len: int) -> Told:
        told: Told = {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model_name,
            "output": [] if status == "in_progress" else self._output.items,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **self._echoed,
            "usage": None,
        }
        return told if usage is None else told | self._tell_usage(usage, draft_len)

    def _tell_usage(self, usage: Usage, draft_len: int) -> dict[str, Any]:
        told = tell_usage(usage, draft_len)
        tokens = told.pop("usage")
        return {
            "usage": {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": usage.num_cached_prompt_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_thought},
                "total_tokens": tokens["total_tokens"],
            },
            **told,
        }
