"""What a model thinks before it answers, between marks such as `<think>` and `</think>`."""

from __future__ import annotations

from launch.serve.openai.output.events import Reasoning, Text
from launch.serve.openai.output.machine import Machine, find_mark, may_become


class ThoughtParser(Machine):
    """Parts thoughts and answer. Blanks at the beginning and end of thoughts, and in front of the answer, go with the
    marks."""

    def __init__(self, open_mark: str, close_mark: str, has_begun: bool) -> None:
        """Begin.

        Args:
            open_mark, close_mark: of thoughts.
            has_begun: they have begun in the prompt; else an answer may begin with the mark.
        """
        super().__init__()
        self._open, self._close = open_mark, close_mark
        self._has_begun = has_begun
        self._blanks = ""

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
        place, mark = find_mark(self._text, (self._close,))
        text = self._take(len(self._text) if self._is_over and not mark else place)
        if self._is_first:
            text = text.lstrip()
            self._is_first = not text
        kept = text.rstrip()
        if kept:
            self._events.append(Reasoning(self._blanks + kept))
            self._blanks = ""
        self._blanks += text[len(kept) :]
        if not mark:
            return False
        self._take(len(mark))
        return self._go(self._skip_to_answer)

    def _skip_to_answer(self) -> bool:
        self._text = self._text.lstrip()
        return self._go(self._read_answer) if self._text else False

    def _read_answer(self) -> bool:
        self._events.append(Text(self._take(len(self._text))))
        return False
