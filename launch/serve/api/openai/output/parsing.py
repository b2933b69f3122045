"""Parses the text of one choice: first thoughts are separated, then calls in what remains, which get numbers and ids.

Thoughts stand between marks such as `<think>` and `</think>`, or end where a call begins: some models write a call
without ending their thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launch.serve.api.openai.output.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, new_id
from launch.serve.api.openai.output.harmony import HarmonyParser
from launch.serve.api.openai.output.machine import (
    LONG,
    MOST_LONG,
    Arguments,
    CallBegin,
    CallMachine,
    Event,
    Machine,
    Reasoning,
    Text,
    find_mark,
    joined,
    may_become,
)

_FIRST_TRIED = 32
"""Characters of what may be a call that are looked at first; then twice as many, until it is certain. Most that are
none show it at once."""


class ThoughtParser(Machine):
    """Parts thoughts and answer. Blanks at the beginning and end of thoughts, and in front of the answer, go with the
    marks. A mark of a call that thoughts merely hold, without a call behind it, is one of their words."""

    def __init__(
        self,
        form: ReasoningFormat,
        has_begun: bool,
        call_marks: tuple[str, ...] = (),
        make_calls: Callable[[], Machine] = CallMachine,
    ) -> None:
        """Begin.

        Args:
            form: of thoughts.
            has_begun: they have begun in the prompt; else an answer may begin with the mark.
            call_marks: that a call begins with, which ends thoughts, too; none where there are no tools.
            make_calls: makes a parser that says whether one does.
        """
        super().__init__()
        self._open, self._close, self._heading = form.open_mark, form.close_mark, form.heading
        self._call_marks, self._make_calls = call_marks, make_calls
        self._num_long = 0
        self._has_begun = has_begun
        self._blanks = ""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what was fed."""
        return self._state in (self._skip_heading, self._read_thoughts, self._try_call)

    def _begin(self) -> bool:
        self._blanks += self._take(len(self._text) - len(self._text.lstrip()))
        if (not self._text or may_become(self._text, self._open)) and not self._is_over:
            return False
        if self._text.startswith(self._open):
            self._take(len(self._open))
        elif not self._has_begun:
            self._events.append(Text(self._blanks))
            return self._go(self._read_answer)
        self._blanks, self._is_first = "", True
        return self._go(self._skip_heading)

    def _skip_heading(self) -> bool:
        if may_become(self._text, self._heading) and not self._is_over:
            return False
        if self._text.startswith(self._heading):
            self._take(len(self._heading))
        return self._go(self._read_thoughts)

    def _read_thoughts(self) -> bool:
        marks = self._call_marks if self._num_long < MOST_LONG else ()
        place, mark = find_mark(self._text, (self._close, *marks))
        self._think(self._take(len(self._text) if self._is_over and not mark else place))
        if not mark:
            return False
        if mark != self._close:
            return self._begin_trial(mark)
        self._take(len(mark))
        return self._go(self._skip_to_answer)

    def _think(self, text: str) -> None:
        """Some of the thoughts; blanks at their end wait for what follows."""
        if self._is_first:
            text = text.lstrip()
            self._is_first = not text
        kept = text.rstrip()
        if kept:
            self._events.append(Reasoning(self._blanks + kept))
            self._blanks = ""
        self._blanks += text[len(kept) :]

    def _begin_trial(self, mark: str) -> bool:
        """Begin to look for a call behind a mark: another parser looks, up to where it is certain."""
        self._trial, self._mark, self._tried, self._num_tried = self._make_calls(), mark, list[str](), 0
        return self._go(self._try_call)

    def _try_call(self) -> bool:
        found: list[Event] = []
        while self._text and not found:
            self._tried.append(self._take(max(_FIRST_TRIED, self._num_tried)))
            self._num_tried += len(self._tried[-1])
            found = self._trial.feed(self._tried[-1])
        if not found and not self._is_over:
            return False
        found = found or self._trial.finish()
        self._text, self._tried = "".join([*self._tried, self._text]), []
        if found and isinstance(found[0], CallBegin):
            return self._go(self._read_answer)
        # How far it was looked at depends on where the text was cut; how far it had to be does not.
        is_long = self._num_tried > LONG and not self._make_calls().feed(self._text[:LONG])
        self._num_long += is_long
        self._think(self._take(len(self._mark)))
        return self._go(self._read_thoughts)

    def _skip_to_answer(self) -> bool:
        self._text = self._text.lstrip()
        return self._go(self._read_answer) if self._text else False

    def _read_answer(self) -> bool:
        self._events.append(Text(self._take(len(self._text))))
        return False


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
        self._ids = set[str]()

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
        return [self._with_own_id(event) for event in joined(found) if self._is_kept(event)]

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

    def _with_own_id(self, event: Event) -> Event:
        """A call without the id that the model gave it, where another one has that."""
        if not isinstance(event, CallBegin) or not event.call_id:
            return event
        if event.call_id in self._ids:
            return event._replace(call_id="")
        self._ids.add(event.call_id)
        return event

    def _is_kept(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._parsing.tells_thoughts
        self.num_calls += isinstance(event, CallBegin)
        is_of_call = isinstance(event, CallBegin | Arguments)
        return not (is_of_call and self._parsing.keeps_one and self.num_calls > 1)


def _machines(parsing: Parsing) -> tuple[Machine | None, Machine | None]:
    """The parser that separates thoughts, and the one that finds calls."""
    tools = TOOL_FORMATS[parsing.tools] if parsing.tools else None
    reasoning = REASONING_FORMATS[parsing.reasoning] if parsing.reasoning else None
    if (reasoning is not None and reasoning.is_harmony) or (tools is not None and tools.is_harmony):
        return None, HarmonyParser(tools is not None, reasoning is not None)
    schemas = {name: json.loads(schema) for name, schema in parsing.schemas.items()}
    if tools is None:
        if reasoning is None:
            return None, None
        return ThoughtParser(reasoning, parsing.is_thinking), None
    make_calls = partial(tools.make_parser, parsing.names, schemas)
    if reasoning is None:
        return None, make_calls()
    return ThoughtParser(reasoning, parsing.is_thinking, tools.call_marks, make_calls), make_calls()


@dataclass
class _Call:
    """A call, as far as it has come."""

    call_id: str
    name: str
    arguments: list[str]


def share_of_thoughts(events: Sequence[Event], text: str, *, is_thinking: bool) -> float:
    """How much of a part of an answer is thoughts: all where these go on behind it, else by its characters. A part may
    hold several rounds of tokens."""
    if is_thinking:
        return 1.0
    return min(1.0, sum(len(event.text) for event in events if isinstance(event, Reasoning)) / max(1, len(text)))


class ChatText:
    """A choice's text as the API has it: a message, or deltas of one.

    Attributes:
        thoughts: share of these in the last part that came.
    """

    def __init__(self, parsing: Parsing) -> None:
        self._parser = ChoiceParser(parsing)
        self._new_id = TOOL_FORMATS[parsing.tools].new_id if parsing.tools else new_id
        self._calls: list[_Call] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.thoughts = 0.0

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return bool(self._calls)

    def keep(self, text: str, is_end: bool) -> None:
        """Take the next part of an answer that comes whole."""
        for event in self._feed(text, is_end):
            self._keep(event)

    def _feed(self, text: str, is_end: bool) -> list[Event]:
        events = self._parser.feed(text, is_end)
        self.thoughts = share_of_thoughts(events, text, is_thinking=self._parser.is_thinking)
        return events

    def _keep(self, event: Event) -> None:
        if isinstance(event, CallBegin):
            self._calls.append(_Call(event.call_id or self._new_id(), event.name, []))
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
        return [self._delta(event) for event in self._feed(text, is_end)]

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
    """Thoughts, under the names of several servers."""
    return {"reasoning_content": text, "reasoning": text}


def _tell_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
