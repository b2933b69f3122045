"""What parsers share of forms that write a call as its name, and behind that the object of its arguments."""

from __future__ import annotations

from abc import abstractmethod

from launch.serve.api.openai.output.events import Arguments, CallBegin
from launch.serve.api.openai.output.json_values import JsonObject
from launch.serve.api.openai.output.machine import CallMachine


class NamedCallMachine(CallMachine):
    """Reads arguments, once `_name` is known and `_opening` has what was taken since the call's mark."""

    def __init__(self) -> None:
        super().__init__()
        self._opening = self._name = ""

    @abstractmethod
    def _read_text(self) -> bool:
        """Outside of calls."""

    def _read_behind(self) -> bool:
        """Behind arguments that have ended."""
        return self._go(self._read_text)

    def _lacks_opening(self) -> bool:
        """Go on behind blanks; whether more has to come before it is known what follows."""
        self._opening += self._skip_blanks()
        return not self._text and not self._is_over

    def _begin_arguments(self, mark: str = "") -> bool:
        """In front of them. Where they go wrong they are over with a mark."""
        self._object, self._held = JsonObject(mark), ""
        return self._go(self._read_object)

    def _read_object(self) -> bool:
        taken = self._take(len(self._text))
        was_begun = self._object.is_begun
        told, rest = self._object.feed(taken)
        if not was_begun:
            self._held += taken
        if self._object.is_begun and not was_begun:
            self._tell([CallBegin(self._name)])
        if self._object.is_begun:
            is_cut = self._is_over and not self._object.is_over
            self._tell([Arguments(told + rest if is_cut else told)])  # what might have become the mark
            self._text = "" if is_cut else rest
            return self._go(self._read_behind) if self._object.is_over else False
        if self._object.is_failed or self._is_over:
            self._text = self._held
            return self._give_up()
        return False

    def _give_up(self) -> bool:
        """No call: what was taken is text."""
        self._say(self._opening)
        return self._go(self._read_text)
