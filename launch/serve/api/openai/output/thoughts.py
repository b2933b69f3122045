"""What a model thinks before it answers, between marks such as `<think>` and `</think>`; or up to a call, which some
models write without ending their thoughts."""

from __future__ import annotations

from collections.abc import Callable

from launch.serve.api.openai.output.events import CallBegin, Event, Reasoning, Text
from launch.serve.api.openai.output.machine import LONG, MOST_LONG, CallMachine, Machine, find_mark, may_become

_FIRST_TRIED = 32
"""Characters of what may be a call that are looked at first; then twice as many, until it is certain. Most that are
none show it at once."""


class ThoughtParser(Machine):
    """Parts thoughts and answer. Blanks at the beginning and end of thoughts, and in front of the answer, go with the
    marks. A mark of a call that thoughts merely hold, without a call behind it, is one of their words."""

    def __init__(
        self,
        open_mark: str,
        close_mark: str,
        has_begun: bool,
        call_marks: tuple[str, ...] = (),
        make_calls: Callable[[], Machine] = CallMachine,
    ) -> None:
        """Begin.

        Args:
            open_mark, close_mark: of thoughts.
            has_begun: they have begun in the prompt; else an answer may begin with the mark.
            call_marks: that a call begins with, which ends thoughts, too; none where there are no tools.
            make_calls: makes a parser that says whether one does.
        """
        super().__init__()
        self._open, self._close = open_mark, close_mark
        self._call_marks, self._make_calls = call_marks, make_calls
        self._num_long = 0
        self._has_begun = has_begun
        self._blanks = ""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts go on behind what was fed."""
        return self._state in (self._read_thoughts, self._try_call)

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
        """In front of a mark behind which a call may be: another parser looks, up to where it is certain."""
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
