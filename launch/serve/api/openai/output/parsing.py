"""What becomes of one choice's text: thoughts are told apart first, then calls in what is left, which get numbers and
ids. It knows parsers and the API's names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launch.serve.api.openai.output.events import Arguments, CallBegin, Event, Reasoning, Text, joined
from launch.serve.api.openai.output.formats import REASONING_FORMATS, TOOL_FORMATS, new_id
from launch.serve.api.openai.output.harmony import HarmonyParser
from launch.serve.api.openai.output.machine import Machine
from launch.serve.api.openai.output.thoughts import ThoughtParser


@dataclass(frozen=True)
class Parsing:
    """How a chat's texts are read.

    Attributes:
        tools: the form of calls, by its name; empty where none are looked for.
        reasoning: the form of thoughts; empty where they are not told apart.
        is_thinking: thoughts have begun in the prompt.
        names: of the request's tools.
        keeps_one: the first call alone is told.
        tells_thoughts: they are told, and not left out.
        schemas: of the tools' arguments, where the form reads them, each as JSON, in which numbers may have any size.
    """

    tools: str = ""
    reasoning: str = ""
    is_thinking: bool = False
    names: tuple[str, ...] = ()
    keeps_one: bool = False
    tells_thoughts: bool = True
    schemas: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether a text is not told as it is."""
        return bool(self.tools or self.reasoning)


class ChoiceParser:
    """Reads one choice."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._thoughts, self._calls = _machines(parsing)
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what was fed, as far as they are told apart."""
        return bool(self._parsing.reasoning) and any(
            machine is not None and machine.is_thinking for machine in (self._thoughts, self._calls)
        )

    def feed(self, text: str, is_end: bool) -> list[Event]:
        """What is certain with the next part of its text, the last one or not."""
        found: list[Event] = list(self._feed(text))
        if is_end:
            found += self._finish()
        return [event for event in joined(found) if self._is_kept(event)]

    def _feed(self, text: str) -> Sequence[Event]:
        return self._pass(self._thoughts.feed(text)) if self._thoughts else self._look(text)

    def _finish(self) -> list[Event]:
        found = self._pass(self._thoughts.finish()) if self._thoughts else []
        return found + (self._calls.finish() if self._calls else [])

    def _pass(self, events: Sequence[Event]) -> list[Event]:
        """What is left when thoughts are told apart, looked through for calls."""
        found: list[Event] = []
        for event in events:
            found += self._look(event.text) if isinstance(event, Text) else [event]
        return found

    def _look(self, text: str) -> list[Event]:
        return self._calls.feed(text) if self._calls else [Text(text)]

    def _is_kept(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._parsing.tells_thoughts
        self.num_calls += isinstance(event, CallBegin)
        is_of_call = isinstance(event, CallBegin | Arguments)
        return not (is_of_call and self._parsing.keeps_one and self.num_calls > 1)


def _machines(parsing: Parsing) -> tuple[Machine | None, Machine | None]:
    """Who tells thoughts apart, and who finds calls."""
    tools = TOOL_FORMATS[parsing.tools] if parsing.tools else None
    reasoning = REASONING_FORMATS[parsing.reasoning] if parsing.reasoning else None
    if (reasoning is not None and reasoning.is_harmony) or (tools is not None and tools.is_harmony):
        return None, HarmonyParser(tools is not None, reasoning is not None)
    schemas = {name: json.loads(schema) for name, schema in parsing.schemas.items()}
    if tools is None:
        if reasoning is None:
            return None, None
        return ThoughtParser(reasoning.open_mark, reasoning.close_mark, parsing.is_thinking), None
    make_calls = partial(tools.make_parser, parsing.names, schemas)
    if reasoning is None:
        return None, make_calls()
    marks = (reasoning.open_mark, reasoning.close_mark)
    return ThoughtParser(*marks, parsing.is_thinking, tools.call_marks, make_calls), make_calls()


@dataclass
class _Call:
    """One call, as far as it has come."""

    call_id: str
    name: str
    arguments: list[str]


class ChatText:
    """A choice's text as the API has it: a message, or deltas of one."""

    def __init__(self, parsing: Parsing) -> None:
        self._parser = ChoiceParser(parsing)
        self._new_id = TOOL_FORMATS[parsing.tools].new_id if parsing.tools else new_id
        self._calls: list[_Call] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return bool(self._calls)

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what came."""
        return self._parser.is_thinking

    def keep(self, text: str, is_end: bool) -> None:
        """Take the next part of an answer that comes whole."""
        for event in self._parser.feed(text, is_end):
            self._keep(event)

    def _keep(self, event: Event) -> None:
        if isinstance(event, CallBegin):
            self._calls.append(_Call(self._new_id(), event.name, []))
        elif isinstance(event, Arguments):
            self._calls[-1].arguments.append(event.text)
        else:
            (self._text if isinstance(event, Text) else self._reasoning).append(event.text)

    def message(self) -> dict[str, Any]:
        """All of it, as a whole answer has it."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        told: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not text and (reasoning or self._calls):
            told["content"] = None
        if reasoning:
            told |= _reasoning(reasoning)
        if self._calls:
            told["tool_calls"] = [_tell_call(call.call_id, call.name, "".join(call.arguments)) for call in self._calls]
        return told

    def deltas(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """The deltas of the next part, one thing in each."""
        return [self._delta(event) for event in self._parser.feed(text, is_end)]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning(event.text)
        if isinstance(event, CallBegin):
            self._keep(event)
            call = self._calls[-1]
            return {"tool_calls": [{"index": len(self._calls) - 1, **_tell_call(call.call_id, call.name, "")}]}
        return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": event.text}}]}


def _reasoning(text: str) -> dict[str, Any]:
    """In the words of several servers."""
    return {"reasoning_content": text, "reasoning": text}


def _tell_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
