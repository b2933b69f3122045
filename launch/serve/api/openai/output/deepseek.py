"""Calls as DeepSeek's models write them between two marks: each with its name, a mark and its arguments, which V3 and
R1 put between fences, behind the word `function`."""

from __future__ import annotations

import re
from collections.abc import Callable

from launch.serve.api.openai.output.machine import may_become
from launch.serve.api.openai.output.named_calls import NamedCallMachine

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (CALLS, CALL, SEPARATOR, END, END_CALLS)
KIND, FENCE, END_FENCE = "function", "```json", "```"
_NAME = re.compile(r"[^\s<>{}\"`]{1,256}")


class DeepSeekParser(NamedCallMachine):
    """Finds them in both forms, the mark around all calls left out, too. What begins as a call and is none is text,
    with its marks."""

    def _begin(self) -> bool:
        return self._go(self._read_text)

    def _read_text(self) -> bool:
        mark = self._say_until(CALLS, CALL)
        if not mark:
            return False
        self._opening, self._is_fenced = self._take(len(mark)), False
        return self._go(self._read_name if mark == CALL else self._read_call)

    def _read_call(self) -> bool:
        """Behind the mark in front of all calls."""
        return self._pass(CALL, self._read_name)

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
        return self._take_name(SEPARATOR, self._read_form)

    def _take_name(self, mark: str, state: Callable[[], bool]) -> bool:
        """Go on behind a name, and the mark that ends it."""
        if self._lacks_opening():
            return False
        found = _NAME.match(self._text)
        rest = self._text[found.end() :].lstrip() if found else ""
        if found and (not rest or may_become(rest, mark)) and not self._is_over:
            return False
        if not found or not rest.startswith(mark):
            return self._give_up()
        self._name = found[0]
        self._opening += self._take(found.end())
        return self._pass(mark, state)

    def _read_form(self) -> bool:
        if self._lacks_opening():
            return False
        if self._text.startswith("{") or self._name != KIND:
            return self._begin_arguments(END)
        self._is_fenced = True
        return self._take_name(FENCE, self._read_fenced)

    def _read_fenced(self) -> bool:
        return False if self._lacks_opening() else self._begin_arguments(END)

    def _read_behind(self) -> bool:
        """Behind arguments: the marks that end a call and all of them, or the next call. They may be missing."""
        self._skip_blanks()
        ends = (*([END_FENCE] if self._is_fenced else []), END, END_CALLS)
        if any(may_become(self._text, mark) for mark in (*ends, CALL)):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        for mark in ends:
            if self._text.startswith(mark):
                self._take(len(mark))
                self._is_fenced = False
                return mark != END_CALLS or self._go(self._read_text)
        return self._go(self._read_text)
