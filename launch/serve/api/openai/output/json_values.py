"""JSON as it comes: where a value ends, and calls of tools that are objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(r"[^\s,}\]]*")
_BLANKS = re.compile(r"\s*")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:', re.DOTALL)
_NO_KEY = re.compile(r'"(?:[^"\\]|\\.)*"\s*[^:\s]', re.DOTALL)
_KEYS = ("name", "arguments", "parameters", "type", "id")
_MOST_NAME = 512
"""Characters of a key, or of a tool's name."""


class ValueEnd:
    """Finds where a value ends: brackets and quotes are counted, and nothing else of it is looked at."""

    def __init__(self, mark: str = "") -> None:
        """Begin in front of it.

        Args:
            mark: that ends it as well, where it stands in no string: what is open there is never closed. It begins with
                `<`, which JSON has in strings alone. Empty for none.
        """
        self._mark = mark
        self._depth = 0
        self._is_string = self._is_scalar = self._is_escaped = self._has_begun = False

    def find(self, text: str, begin: int) -> tuple[int, bool]:
        """Go on with the value.

        Args:
            text: whose characters from `begin` on are next; they stay there when it is asked again.
            begin: where to go on.

        Returns:
            How far it was looked at, and whether the value ends there.
        """
        place, size = begin, len(text)
        while place < size:
            if self._is_escaped:
                self._is_escaped, place = False, place + 1
            elif self._is_string:
                place = _IN_STRING.match(text, place).end()  # type: ignore[union-attr]
                if place < size:
                    self._is_escaped, self._is_string = text[place] == "\\", text[place] == "\\"
                    place += 1
                    if not self._is_string and self._depth == 0:
                        return place, True
            elif self._is_scalar:
                place = _SCALAR.match(text, place).end()  # type: ignore[union-attr]
                if place < size:
                    return place, True
            elif self._begin(text[place]):
                place += 1
            elif not self._is_scalar:
                place = _OUTSIDE.match(text, place).end()  # type: ignore[union-attr]
                if place < size and text[place] == "<":
                    if self._mark and text.startswith(self._mark, place):
                        return place, True
                    if self._mark.startswith(text[place:]):  # perhaps, once more of it has come
                        return place, False
                    place += 1
                elif place < size and text[place] in "}]":
                    self._depth, place = self._depth - 1, place + 1
                    if self._depth == 0:
                        return place, True
        return place, False

    def _begin(self, character: str) -> bool:
        """Whether a character begins something that is not a scalar."""
        if character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif self._depth == 0:
            self._is_scalar = True
            return False
        else:
            return False
        return True


class JsonObject:
    """An object that comes, told as it is written, and where it ends.

    Attributes:
        is_begun: whether it is certain that it is an object; nothing is told before.
        is_failed: it is none.
        is_over: it has ended.
    """

    def __init__(self, mark: str = "") -> None:
        """Begin in front of it; see `ValueEnd` for the mark."""
        self._end = ValueEnd(mark)
        self._held = ""
        self.is_begun = self.is_failed = self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """What may be told with its next part, and what of the part is behind its end."""
        if not self.is_begun:
            begin = _BLANKS.match(text, 0 if self._held else 1).end()  # type: ignore[union-attr]
            begun = text[begin : begin + 1]
            self.is_failed = not (self._held or text).startswith("{") or (begun != "" and begun not in '"}')
            self.is_begun = begun != "" and not self.is_failed
            if self.is_failed:  # what follows is not looked at
                return "", text
        place, self.is_over = self._end.find(text, 0)
        told, self._held = self._held + text[:place], ""
        if not self.is_begun:
            told, self._held = "", told
        return told, text[place:]


class CallObject:
    """A call as an object that comes, with the keys `name` and `arguments`, or `parameters`, in any order, and others,
    which are passed over.

    Its arguments are told as they are written, from where it is certain that they are an object; arguments in quotes
    once they are whole.

    Attributes:
        text: all of it while nothing of it was told, and what came behind it.
        is_begun: it is a call, of which something was told.
        is_failed: it is no call, and nothing was told.
        is_over: it has ended; see `rest`.
    """

    def __init__(self, known: Container[str] | None = None, mark: str = "") -> None:
        """Begin in front of `{`.

        Args:
            known: names that it may have, where it may be another object as well, which it is with the first key that
                calls do not have; None for any.
            mark: that ends arguments that have gone wrong; see `ValueEnd`.
        """
        self.text = ""
        self.is_begun = self.is_failed = self.is_over = False
        self._known = known
        self._mark = mark
        self._name: str | None = None
        self._whole_arguments: str | None = None
        self._object: JsonObject | None = None
        self._waiting = ""
        self._place = 0
        self._begin_of_value = 0  # in the text
        self._end = ValueEnd()
        self._key = ""
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._read_brace

    def feed(self, text: str) -> list[Event]:
        """What is certain with its next part."""
        self.text += text
        while not (self.is_failed or self.is_over) and self._state():
            pass
        if self.is_begun and self._state == self._read_object and not self.is_over:
            self.text, self._place = self.text[self._place :], 0  # it may be long
        found, self._events = self._events, []
        return found

    @property
    def num_read(self) -> int:
        """Characters of it that were looked at while nothing of it was told, wherever its text was cut."""
        return self._place

    @property
    def rest(self) -> str:
        """What came behind it."""
        return self.text[self._place :]

    def _fail(self) -> bool:
        """What follows is no member of the object. Behind arguments that have been told, the call is over."""
        self.is_over, self.is_failed = self.is_begun, not self.is_begun
        return False

    def _next(self) -> str:
        """The next character that is no blank; nothing where it has not come."""
        self._place = _BLANKS.match(self.text, self._place).end()  # type: ignore[union-attr]
        return self.text[self._place : self._place + 1]

    def _read_brace(self) -> bool:
        return self._pass("{", self._read_key)

    def _pass(self, expected: str, state: Callable[[], bool]) -> bool:
        character = self._next()
        if not character:
            return False
        if character != expected:
            return self._fail()
        self._place += 1
        self._state = state
        return True

    def _read_key(self) -> bool:
        character = self._next()
        if character == "}":
            return self._read_end()
        if character not in ('"', ""):
            return self._fail()
        rest = self.text[self._place : self._place + _MOST_NAME]
        found = _KEY.match(rest)
        if found is None:
            return self._fail() if len(rest) == _MOST_NAME or _NO_KEY.match(rest) else False
        if self._known is not None and found[1] not in _KEYS and not self.is_begun:
            return self._fail()
        self._key, self._place = found[1], self._place + found.end()
        self._state = self._begin_value
        return True

    def _begin_value(self) -> bool:
        if not self._next():
            return False
        self._begin_of_value, self._end = self._place, ValueEnd()
        self._state = self._read_value
        is_arguments = self._key in ("arguments", "parameters") and self._whole_arguments is None and not self.is_begun
        if is_arguments and self.text[self._place] == "{":
            self._object = JsonObject(self._mark)
            self._state = self._read_object
        elif is_arguments:
            self._key = "arguments"
        return True

    def _read_object(self) -> bool:
        assert self._object is not None
        told, rest = self._object.feed(self.text[self._place :])
        self._place = len(self.text) - len(rest)
        if self._object.is_failed:
            return self._fail()
        if self._name is None:  # it waits for that
            self._waiting += told
        elif told:
            if not self.is_begun:
                self._begin(self._name)
            self._events.append(Arguments(told))
        if not self._object.is_over:
            return False
        if self._name is None:
            self._whole_arguments = self._waiting
        self._state = self._read_comma
        return True

    def _read_value(self) -> bool:
        self._place, is_over = self._end.find(self.text, self._place)
        is_name = self._key == "name" and self._name is None
        if is_name and self._place - self._begin_of_value > _MOST_NAME:
            self._place = self._begin_of_value
            return self._fail()
        if not is_over:
            return False
        value = self.text[self._begin_of_value : self._place]
        if is_name:
            return self._take_name(value)
        if self._key == "arguments" and self._whole_arguments is None and not self.is_begun:
            arguments = _object_of(value)
            if arguments is None:
                return self._fail()
            self._whole_arguments = arguments
            if self._name is not None:
                self._tell_whole()
        self._state = self._read_comma
        return True

    def _take_name(self, value: str) -> bool:
        name = _loads(value)
        if not isinstance(name, str) or not name.strip() or (self._known is not None and name not in self._known):
            return self._fail()
        self._name = name
        if self._whole_arguments is not None:
            self._tell_whole()
        self._state = self._read_comma
        return True

    def _read_comma(self) -> bool:
        character = self._next()
        if character == "}":
            return self._read_end()
        return self._pass(",", self._read_key)

    def _read_end(self) -> bool:
        if self._name is None:
            return self._fail()
        if not self.is_begun:
            self._whole_arguments = "{}"
            self._tell_whole()
        self.is_over, self._place = True, self._place + 1
        return False

    def _begin(self, name: str) -> None:
        self.is_begun = True
        self._events.append(CallBegin(name))

    def _tell_whole(self) -> None:
        assert self._name is not None and self._whole_arguments is not None
        self._begin(self._name)
        self._events.append(Arguments(self._whole_arguments))


def _object_of(value: str) -> str | None:
    """An object as JSON, of one in quotes, or of null; None of anything else."""
    found = _loads(value)
    if found is None and value == "null":
        return "{}"
    if isinstance(found, str) and isinstance(_loads(found), dict):
        return found.strip()
    return None


def _loads(value: str) -> object:
    try:
        found: object = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found
