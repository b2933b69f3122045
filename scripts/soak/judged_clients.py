"""Clients of the OpenAI API that read exactly what they get, and judge it against the one right answer.

They know HTTP and the API. They do not know what is done to the server meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from scripts.soak.questions import Question


class Verdict(StrEnum):
    """What became of a request."""

    EXACT = "exact"
    """The right answer, to the token."""

    CUT = "cut"
    """The client went away, and what it had read until then was right."""

    REFUSED = "refused"
    """Not let in, with an error in one line that tells to come again: 429 or 503."""

    ERROR = "error"
    """Begun, and ended with one clear error."""

    BROKEN = "broken"
    """The connection broke."""

    WRONG = "wrong"
    """Anything else; there is no excuse for it."""


@dataclass
class Reply:
    """What came of a request.

    Attributes:
        status: of HTTP; None where none came.
        texts, tokens, reasons: of each choice; a reason is None while it goes on.
        errors: error bodies and error events.
        is_whole: whether the answer came to its end.
        is_cut: whether the client has ended it.
        broke: how the connection ended, where it did before the answer.
        arrivals: when tokens came, by `time.perf_counter`.
    """

    status: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = False
    is_cut: bool = False
    broke: str | None = None
    arrivals: list[float] = field(default_factory=list)

    def take(self, answer: dict[str, Any]) -> None:
        """An answer, or an event of a stream."""
        if "error" in answer:
            self.errors.append(answer["error"])
            return
        for choice in answer["choices"]:
            number = choice["index"]
            self.texts[number] = self.texts.get(number, "") + choice["text"]
            self.tokens.setdefault(number, []).extend(choice["token_ids"])
            self.reasons[number] = choice["finish_reason"] or self.reasons.get(number)
            if choice["token_ids"]:
                self.arrivals.append(time.perf_counter())

    def longest_pause_after(self, moment: float) -> float | None:
        """Seconds of the longest wait for a token that ended after a moment; None where no token came after it."""
        ends = [place for place in range(1, len(self.arrivals)) if self.arrivals[place] > moment]
        return max((self.arrivals[end] - max(self.arrivals[end - 1], moment) for end in ends), default=None)

    def judge(self, question: Question) -> tuple[Verdict, str]:
        """The verdict, and what there is to know about it."""
        if reason := self._find_difference(question, is_part=not self.is_whole or bool(self.errors)):
            return Verdict.WRONG, reason
        if self.errors:
            error = self.errors[0]
            if len(self.errors) > 1 or not error.get("message") or "\n" in error["message"]:
                return Verdict.WRONG, f"no error of one line: {self.errors}"
            is_early = self.status in (429, 503)
            return (Verdict.REFUSED if is_early else Verdict.ERROR), str(error["message"])
        if self.is_cut:
            return Verdict.CUT, ""
        if self.broke is not None:
            return Verdict.BROKEN, self.broke
        if not self.is_whole:
            return Verdict.WRONG, f"HTTP {self.status}, and the answer ended without its end"
        return Verdict.EXACT, ""

    def _find_difference(self, question: Question, is_part: bool) -> str | None:
        """Where the choices differ from the right answer; of a part only what is there counts."""
        for number, expected in enumerate(question.completions):
            text, tokens = self.texts.get(number, ""), tuple(self.tokens.get(number, ()))
            if self.reasons.get(number) is None and is_part:
                if expected.token_ids[: len(tokens)] != tokens or not expected.text.startswith(text):
                    return f"choice {number} has other tokens or text than the reference, after {len(tokens)} tokens"
            elif (text, tokens, self.reasons.get(number)) != (
                expected.text,
                expected.token_ids,
                expected.finish_reason,
            ):
                return (
                    f"choice {number}: {len(tokens)} of {len(expected.token_ids)} tokens, "
                    f"{self.reasons.get(number)} for {expected.finish_reason}, text {text[-40:]!r} "
                    f"for {expected.text[-40:]!r}"
                )
        if self.texts.keys() - set(range(len(question.completions))):
            return f"choices {sorted(self.texts)} of {len(question.completions)}"
        return None


async def ask(
    client: httpx.AsyncClient,
    model: str,
    question: Question,
    is_streamed: bool,
    reply: Reply | None = None,
    cut_after: int | None = None,
) -> Reply:
    """Send a question and read what comes.

    Args:
        client: of the server.
        model: its name.
        question: what to ask.
        is_streamed: piece by piece.
        reply: filled as it comes, for others to look at.
        cut_after: go away after so many tokens; 0 goes away as soon as the request is sent.
    """
    reply = Reply() if reply is None else reply
    body = {"model": model, **question.fields, "return_token_ids": True, "stream": is_streamed}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            reply.status = answer.status_code
            if not is_streamed or answer.status_code != 200:
                reply.take(json.loads(await answer.aread()))
                reply.is_whole = True
                return reply
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    reply.is_whole = True
                elif line.startswith("data: "):
                    reply.take(json.loads(line.removeprefix("data: ")))
                if cut_after is not None and sum(map(len, reply.tokens.values())) >= cut_after:
                    reply.is_cut = not reply.is_whole
                    return reply
    except httpx.TransportError as error:
        reply.broke = f"{type(error).__name__}: {error}"
    return reply


async def ask_and_leave(client: httpx.AsyncClient, model: str, question: Question, seconds: float) -> Reply:
    """Send a question that is not streamed, and go away before its answer, as an impatient client does."""
    reply = Reply()
    try:
        await asyncio.wait_for(ask(client, model, question, False, reply), seconds)
    except TimeoutError:
        reply.is_cut = True
    return reply
