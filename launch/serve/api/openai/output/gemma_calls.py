"""Parses calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,days:[1,2]}<tool_call|>`.

Their arguments are nearly JSON: keys are bare, and texts stand between marks of their own, so that they hold quotes and
line breaks as they are. They become JSON as they come; JSON itself, which a model is made to write where it is guided,
stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from launch.serve.api.openai.output.machine import find_mark, may_become
from launch.serve.api.openai.output.named_calls import NamedCallMachine

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
WORD = "call:"
_NAME = re.compile(rf'{WORD}([^\s{{}}"<>]{{1,256}})')
_KEY = re.compile(r'[^\s:,"<>{}\[\]][^:,"<>{}\[\]]{0,255}')
_SCALAR = re.compile(r'[^,"<>{}\[\]]{1,256}')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_QUOTES = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", **{word: word for word in ("true", "false", "null")}}


class GemmaObject:
    """An object in Gemma's form that comes, told as JSON, and where it ends. What goes wrong in it is told as it is
    written, up to the mark behind the call.

    Attributes:
        is_begun: whether it is certain that it is an object: from its bracket on.
        is_failed: it is none.
        is_over: it has ended.
    """

    def __init__(self) -> None:
        self.is_begun = self.is_failed = self.is_over = False
        self._open = ""  # brackets
        self._is_key = False
        self._comma = ""  # in front of what follows, unless that is an end
        self._told: list[str] = []
        self._text = ""
        self._state: Callable[[], bool] = self._read_value

    def feed(self, text: str) -> tuple[str, str]:
        """What may be told with its next part, which begins with what was handed back of the one before; and what of
        the part is behind its end, or is not certain yet."""
        self._text, self._told = text, []
        while not self.is_over and self._text and self._state():
            pass
        self.is_begun = bool(self._open) or self.is_over
        return "".join(self._told), self._text

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _tell(self, json_text: str, count: int, state: Callable[[], bool]) -> bool:
        """Tell what some characters are as JSON, and go on."""
        self._told.append(json_text)
        self._take(count)
        self._state = state
        return True

    def _next(self) -> str:
        """The next character that is no blank; nothing where it has not come, or may yet become a mark."""
        self._text = self._text.lstrip()
        is_open = any(may_become(self._text, mark) for mark in (QUOTE, CLOSE))
        return "" if is_open else self._text[:1]

    def _read_value(self) -> bool:
        """Read a key or a value, or the end of what holds it."""
        character = self._next()
        if not character:
            return False
        if character in "}]":
            return self._close(character)
        self._told.append(self._comma)
        self._comma = ""
        if self._text.startswith(QUOTE):
            return self._tell('"', len(QUOTE), self._read_text)
        if character == '"':
            return self._tell('"', 1, self._read_quoted)
        if not self._is_key and character in "{[":
            self._open += character
            self._is_key = character == "{"
            return self._tell(character, 1, self._read_value)
        found = (_KEY if self._is_key else _SCALAR).match(self._text)
        if found is None:
            return self._go_wrong()
        if found.end() == len(self._text):
            return False
        written = found[0].strip()
        return self._tell(_quoted(written) if self._is_key else _scalar(written), found.end(), self._read_behind)

    def _read_text(self) -> bool:
        place, mark = find_mark(self._text, (QUOTE,))
        self._told.append(_quoted(self._take(place))[1:-1])
        return self._tell('"', len(mark), self._read_behind) if mark else False

    def _read_quoted(self) -> bool:
        found = _IN_QUOTES.match(self._text)
        assert found is not None
        self._told.append(self._take(found.end()))
        return self._tell('"', 1, self._read_behind) if self._text.startswith('"') else False

    def _read_behind(self) -> bool:
        """Read what stands behind a key or a value."""
        character = self._next()
        if not character:
            return False
        if self._is_key:
            self._is_key = False
            return self._tell(": ", 1, self._read_value) if character == ":" else self._go_wrong()
        if character == ",":
            self._is_key, self._comma = self._open[-1] == "{", ", "
            return self._tell("", 1, self._read_value)
        return self._close(character)

    def _close(self, character: str) -> bool:
        if f"{self._open[-1]}{character}" not in ("{}", "[]"):
            return self._go_wrong()
        self._open, self._is_key, self._comma = self._open[:-1], False, ""
        self.is_over = not self._open
        return self._tell(character, 1, self._read_behind)

    def _go_wrong(self) -> bool:
        self._state = self._read_wrong
        return True

    def _read_wrong(self) -> bool:
        place, mark = find_mark(self._text, (CLOSE,))
        self._told.append(self._take(place))
        self.is_over = bool(mark)
        return False


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalar(text: str) -> str:
    """A number or a word as JSON; what is neither is a text."""
    return text if _NUMBER.fullmatch(text) else _WORDS.get(text) or _quoted(text)


class GemmaParser(NamedCallMachine):
    """Finds them. What begins as a call and is none is text, with its marks."""

    def _begin(self) -> bool:
        return self._go(self._read_text)

    def _read_text(self) -> bool:
        if not self._say_until(OPEN):
            return False
        self._opening = self._take(len(OPEN))
        return self._go(self._read_name)

    def _read_name(self) -> bool:
        if self._lacks_opening():
            return False
        found = _NAME.match(self._text)
        rest = self._text[found.end() :].lstrip() if found else ""
        if not rest and (found or may_become(self._text, WORD) or self._text == WORD) and not self._is_over:
            return False
        if found is None or not rest.startswith("{"):
            return self._give_up()
        self._name = found[1]
        self._opening += self._take(found.end()) + self._skip_blanks()
        return self._begin_arguments(GemmaObject())

    def _read_behind(self) -> bool:
        self._skip_blanks()
        if may_become(self._text, CLOSE):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        if self._text.startswith(CLOSE):
            self._take(len(CLOSE))
        return self._go(self._read_text)
