"""Parsers of calls that are a name and the object of its arguments, and of lists of calls.

Mistral's models write behind `[TOOL_CALLS]` a list of objects or, in newer ones, a name, `[ARGS]` and the arguments,
once for each call. Lists between other marks (Nemotron) and bare lists, which a model without a form of its own is made
to write, are read here, too. Calls between two marks are in `marked_calls`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Container
from typing import Protocol

from launch.serve.api.openai.output.json_values import CallObject, JsonObject
from launch.serve.api.openai.output.machine import Arguments, CallBegin, CallMachine, find_mark, may_become


class ArgumentsObject(Protocol):
    """An object that comes; see JsonObject."""

    is_begun: bool
    is_failed: bool
    is_over: bool

    def feed(self, text: str) -> tuple[str, str]:
        """What may be told with its next part as JSON, and what of the part is behind its end, or is not certain."""
        ...


class NamedCallMachine(CallMachine):
    """Reads arguments, once `_name` is known and `_opening` has what was taken since the call's mark."""

    def __init__(self) -> None:
        super().__init__()
        self._opening = self._name = self._call_id = ""

    @abstractmethod
    def _read_text(self) -> bool:
        """Outside of calls."""

    def _read_behind(self) -> bool:
        """Read what follows arguments that have ended."""
        return self._go(self._read_text)

    def _lacks_opening(self) -> bool:
        """Go on behind blanks; whether more has to come before it is known what follows."""
        self._opening += self._skip_blanks()
        return not self._text and not self._is_over

    def _begin_arguments(self, written: ArgumentsObject) -> bool:
        """Begin to read arguments as they are written."""
        self._object, self._held = written, ""
        return self._go(self._read_object)

    def _read_object(self) -> bool:
        taken = self._take(len(self._text))
        was_begun = self._object.is_begun
        told, rest = self._object.feed(taken)
        if not was_begun:
            self._held += taken
        if self._object.is_begun and not was_begun:
            self._tell([CallBegin(self._name, self._call_id)])
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
        """Give up a call: what was taken is text."""
        self._say(self._opening)
        return self._go(self._read_text)


MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NEMOTRON, END_NEMOTRON = "<TOOLCALL>", "</TOOLCALL>"
_NAME = re.compile(r"[^\s\[\]{}\"]{1,256}")
_MOST_ID = 64


class ListParser(NamedCallMachine):
    """Finds calls in an answer that is a list of objects. One that is none, and what follows it, is text."""

    def __init__(self, known: Container[str] | None = None) -> None:
        """Begin.

        Args:
            known: names of the request's tools, where a list may also be what was asked for; None for any.
        """
        super().__init__()
        self._known, self._end = known, ""

    def _begin(self) -> bool:
        if self._lacks_opening():
            return False
        if self._text.startswith("["):
            self._opening += self._take(1)
            return self._go(self._read_item)
        self._say(self._opening)
        return self._go(self._read_text)

    def _read_text(self) -> bool:
        return self._say_rest()

    def _read_item(self) -> bool:
        """Read an item of a list: an object, what separates two, or the end."""
        if self._lacks_opening():
            return False
        if self._text.startswith(","):
            self._opening += self._take(1)
            return True
        if self._text.startswith("{"):
            return self._go(self._begin_call)
        if self._text.startswith("]") and self._is_behind_call:
            self._take(1)
            return self._go(self._read_behind)
        if self._is_behind_call and not self._opening.strip():  # an object without a list
            return self._go(self._read_behind)
        if self._text or not self._is_behind_call:
            self._say(self._opening)
        return self._go(self._read_text)

    def _begin_call(self) -> bool:
        self._call = CallObject(self._known, self._end)
        return self._go(self._read_call)

    def _read_call(self) -> bool:
        self._tell(self._call.feed(self._take(len(self._text))))
        if self._call.is_over:
            self._text, self._opening = self._call.rest, ""
            return self._go(self._read_item)
        if self._is_over and self._call.is_begun:
            self._tell([Arguments(self._call.rest)])  # what might have become the mark
        if self._call.is_failed or (self._is_over and not self._call.is_begun):
            self._say(self._opening)
            self._text = self._call.text
            return self._go_behind_failure(self._call.num_read, self._read_text)
        return False


class MarkedListParser(ListParser):
    """Finds lists of calls behind a mark, and objects without a list."""

    def __init__(self, mark: str, end: str = "") -> None:
        """Begin.

        Args:
            mark: in front of a list.
            end: behind it, which may be missing.
        """
        super().__init__()
        self._mark, self._end = mark, end

    def _begin(self) -> bool:
        return self._go(self._read_text)

    def _read_text(self) -> bool:
        if not self._say_until(self._mark):
            return False
        self._opening, self._name = self._take(len(self._mark)), ""
        return self._go(self._read_form)

    def _read_form(self) -> bool:
        if self._lacks_opening():
            return False
        if self._text.startswith("["):
            self._opening += self._take(1)
            return self._go(self._read_item)
        return self._go(self._begin_call if self._text.startswith("{") else self._read_other)

    def _read_other(self) -> bool:
        """What is neither a list nor an object."""
        return self._give_up()

    def _read_behind(self) -> bool:
        self._skip_blanks()
        if may_become(self._text, self._end):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        self._take(len(self._end) if self._text.startswith(self._end) else 0)
        return self._go(self._read_text)


class MistralParser(MarkedListParser):
    """Finds them behind the mark, in both forms."""

    def __init__(self) -> None:
        super().__init__(MARK)

    def _read_other(self) -> bool:
        return self._go(self._read_name)

    def _read_name(self) -> bool:
        found = _NAME.match(self._text)
        if found is None:
            return self._give_up()
        rest = self._text[found.end() :]
        if not rest and not self._is_over:
            return False
        if any(may_become(rest, mark) for mark in (ARGS, CALL_ID)) and not self._is_over:
            return False
        if not rest.startswith((ARGS, CALL_ID, "{")):
            return self._give_up()
        self._name = found[0]
        self._opening += self._take(found.end())
        return self._go(self._read_id if rest.startswith(CALL_ID) else self._read_arguments)

    def _read_id(self) -> bool:
        """The model's own id of the call, which nobody has a use for."""
        place, mark = find_mark(self._text, (ARGS,))
        if not mark and place <= _MOST_ID and not self._is_over:
            return False
        if not mark or place > _MOST_ID:
            return self._give_up()
        self._opening += self._take(place)
        return self._go(self._read_arguments)

    def _read_arguments(self) -> bool:
        if self._text.startswith(ARGS):
            self._opening += self._take(len(ARGS))
        if self._lacks_opening():
            return False
        return self._begin_arguments(JsonObject())
