"""Parsers of calls that stand between marks of their own, within marks around all: DeepSeek's and Kimi's.

Each call is its name, a mark and its arguments. DeepSeek V3 and R1 put these between fences behind the word `function`;
Kimi's name is an id: `functions.name:0`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from launch.serve.api.openai.output.json_values import JsonObject
from launch.serve.api.openai.output.machine import may_become
from launch.serve.api.openai.output.named_calls import NamedCallMachine


class Marks(NamedTuple):
    """The marks of a form, in the order of a call."""

    calls: str
    call: str
    separator: str
    end: str
    end_calls: str


DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
KIND, FENCE, END_FENCE = "function", "```json", "```"
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
FUNCTIONS = "functions."
_KIMI_ID = re.compile(rf"(?:{re.escape(FUNCTIONS)})?(.+?):\d+")
_NAME_MARK = re.compile(r"[^\s<>{}\"`]{1,256}")


class MarkedCallParser(NamedCallMachine):
    """Finds them, the mark around all calls left out, too. What begins as a call and is none is text, with its
    marks."""

    def __init__(self, marks: Marks) -> None:
        """Begin, with the marks of the form."""
        super().__init__()
        self._marks = marks
        self._fence = ""  # that ends the arguments, too

    def _begin(self) -> bool:
        return self._go(self._read_text)

    @abstractmethod
    def _read_form(self) -> bool:
        """Read what stands behind the mark that follows the name."""

    def _read_text(self) -> bool:
        mark = self._say_until(self._marks.calls, self._marks.call)
        if not mark:
            return False
        self._opening, self._fence = self._take(len(mark)), ""
        return self._go(self._read_name if mark == self._marks.call else self._read_call)

    def _read_call(self) -> bool:
        """Read a call, behind the mark that precedes all calls."""
        return self._pass(self._marks.call, self._read_name)

    def _pass(self, mark: str, state: Callable[[], bool]) -> bool:
        """Go on behind blanks and a mark."""
        if self._lacks_opening() or (may_become(self._text, mark) and not self._is_over):
            return False
        if not self._text.startswith(mark):
            return self._give_up()
        self._opening += self._take(len(mark))
        return self._go(state)

    def _read_name(self) -> bool:
        """The name, or in V3's form the call's kind."""
        return self._take_name(self._marks.separator, self._read_form)

    def _take_name(self, mark: str, state: Callable[[], bool]) -> bool:
        """Go on behind a name, and the mark that ends it."""
        if self._lacks_opening():
            return False
        found = _NAME_MARK.match(self._text)
        rest = self._text[found.end() :].lstrip() if found else ""
        if found and (not rest or may_become(rest, mark)) and not self._is_over:
            return False
        if not found or not rest.startswith(mark):
            return self._give_up()
        self._name = found[0]
        self._opening += self._take(found.end())
        return self._pass(mark, state)

    def _read_behind(self) -> bool:
        """Read what follows arguments: the marks that end a call and all calls, or the next call. Marks may be
        missing."""
        self._skip_blanks()
        ends = (*([self._fence] if self._fence else []), self._marks.end, self._marks.end_calls)
        if any(may_become(self._text, mark) for mark in (*ends, self._marks.call)):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        for mark in ends:
            if self._text.startswith(mark):
                self._take(len(mark))
                self._fence = ""
                return mark != self._marks.end_calls or self._go(self._read_text)
        return self._go(self._read_text)


class DeepSeekParser(MarkedCallParser):
    """Finds them in the forms of V3 and V3.1."""

    def __init__(self) -> None:
        super().__init__(DEEPSEEK)

    def _read_form(self) -> bool:
        if self._lacks_opening():
            return False
        if self._text.startswith("{") or self._name != KIND:
            return self._begin_arguments(JsonObject(self._marks.end))
        self._fence = END_FENCE
        return self._take_name(FENCE, self._read_fenced)

    def _read_fenced(self) -> bool:
        return False if self._lacks_opening() else self._begin_arguments(JsonObject(self._marks.end))


class KimiParser(MarkedCallParser):
    """Finds Kimi's, and tells their ids, in which the template shows a call's name."""

    def __init__(self) -> None:
        super().__init__(KIMI)

    def _read_form(self) -> bool:
        if self._lacks_opening():
            return False
        found = _KIMI_ID.fullmatch(self._name)
        self._call_id = "" if found is None else self._name
        if found is not None:
            self._name = found[1]
        elif self._name.isdecimal():  # the number of a call without a name
            return self._give_up()
        return self._begin_arguments(JsonObject(self._marks.end))
