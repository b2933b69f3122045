"""Answers of gpt-oss: messages, each with a head that names its channel and perhaps a tool, and a body.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

What is thought comes in `analysis`, calls are messages to a tool, and the rest is the answer.

Source: OpenAI's harmony response format, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from launch.serve.api.openai.output.machine import Arguments, CallBegin, CallMachine, Reasoning, find_mark, may_become

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ANALYSIS, FINAL = f"{CHANNEL}analysis", f"{CHANNEL}final"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTIONS = "functions."
_BEGINNINGS = (CHANNEL, START, "to=")
_MOST_HEAD = 1024
"""Characters of a head: what is longer is none."""


def _tool_of(head: str) -> str:
    """The function that a head calls; empty where it calls none."""
    to = _TO.search(head)
    return to[1].removeprefix(_FUNCTIONS) if to is not None and to[1].startswith(_FUNCTIONS) else ""


class HarmonyParser(CallMachine):
    """Finds what is in which message."""

    def __init__(self, finds_calls: bool = True, splits_reasoning: bool = True) -> None:
        """Begin behind `<|start|>assistant`.

        Args:
            finds_calls: messages to tools are calls; else they are text.
            splits_reasoning: what is thought is told as that; else as text.
        """
        super().__init__()
        self._finds_calls = finds_calls
        self._splits_reasoning = splits_reasoning
        self._head = ""
        self._kind = "final"

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what was fed."""
        return self._kind == "analysis" and self._state in (self._read_body, self._read_head_in_thoughts)

    def _begin(self) -> bool:
        """Begin a head, or a text that has none."""
        self._head += self._skip_blanks()
        if self._is_over and not self._text:
            self._say(self._head)
            return False
        if not self._text or (any(may_become(self._text, mark) for mark in _BEGINNINGS) and not self._is_over):
            return False
        if self._text.startswith(_BEGINNINGS):
            return self._go(self._read_head)
        self._say(self._head)
        self._kind = "final"
        return self._go(self._read_body)

    def _read_head(self) -> bool:
        place, mark = find_mark(self._text[: _MOST_HEAD + len(MESSAGE)], (MESSAGE, *ENDS))
        if place <= _MOST_HEAD and not mark and not self._is_over:
            return False
        if place > _MOST_HEAD or mark != MESSAGE:  # none: all of it is text
            self._say(self._head + self._take(1))  # so that it does not begin again
            self._kind = "final"
            return self._go(self._read_body)
        head = self._take(place)
        self._take(len(MESSAGE))
        channel, tool = _CHANNEL_NAME.search(head), _tool_of(head)
        self._kind = "analysis" if channel is not None and channel[1] == "analysis" else "final"
        if tool and self._finds_calls:
            self._kind, self._name, self._has_arguments = "call", tool, False
        return self._go(self._read_body)

    def _read_body(self) -> bool:
        marks: tuple[str, ...] = (START, *ENDS)
        if self._kind == "analysis" and self._finds_calls:
            marks = (CHANNEL, *marks)
        place, mark = find_mark(self._text, marks)
        body = self._take(len(self._text) if self._is_over and not mark else place)
        if self._kind == "call":
            self._tell_arguments(body, is_whole=mark != "" or self._is_over)
        elif self._kind == "analysis" and self._splits_reasoning:
            self._events.append(Reasoning(body))
        else:
            self._say(body)
        if not mark:
            return False
        if mark == CHANNEL:
            return self._go(self._read_head_in_thoughts)
        if mark != START:
            self._take(len(mark))
        self._head = ""
        return self._go(self._begin)

    def _read_head_in_thoughts(self) -> bool:
        """Thoughts that were not ended, up to the head of a call; another head is one of their words."""
        head = self._text[len(CHANNEL) : _MOST_HEAD + len(MESSAGE)]
        place, mark = find_mark(head, (MESSAGE, CHANNEL, START, *ENDS))
        if not mark and len(self._text) <= _MOST_HEAD and not self._is_over:
            return False
        if mark == MESSAGE and _tool_of(head[:place]):
            self._head = ""
            return self._go(self._begin)
        taken = self._take(len(CHANNEL))
        if self._splits_reasoning:
            self._events.append(Reasoning(taken))
        else:
            self._say(taken)
        return self._go(self._read_body)

    def _tell_arguments(self, body: str, is_whole: bool) -> None:
        if not self._has_arguments:
            body = body.lstrip()
            if not body and not is_whole:
                return
            self._has_arguments = True
            self._tell([CallBegin(self._name), Arguments(body or "{}")])
        elif body:
            self._tell([Arguments(body)])
