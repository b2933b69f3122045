"""Parses calls whose arguments are text between marks: Qwen3-Coder's, GLM's, MiniMax's and DeepSeek V3.2's. Texts
become JSON by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from launch.serve.api.openai.output.machine import Arguments, CallBegin, CallMachine, find_mark, may_become
from launch.serve.api.openai.output.tags import Tags
from launch.serve.api.openai.output.text_values import as_json, schema_of, types_of

_MOST_BEHIND = 8192
"""Characters behind the marks that end a call in which a value's own mark may come yet."""
_MOST_BLANKS = 64
"""Blanks between the two marks that end a call."""


class TaggedParser(CallMachine):
    """Finds them. Texts come piece by piece, other values whole. A value whose own mark is missing ends with the call,
    or in front of a parameter that the tool has and the call had not yet. What stands behind a mark and is no call is
    text, with its marks. Models leave out the outer marks at times: without them it is a call of a tool of the
    request's."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin.

        Args:
            tags: the marks of the form.
            schemas: of the arguments of the request's tools, by the tools' names.
        """
        super().__init__()
        self._tags = tags
        self._schemas = schemas
        self._opening = ""

    def _begin(self) -> bool:
        mark = self._say_until(*self._tags.call_marks)
        if not mark:
            return False
        self._is_marked, self._is_begun, self._opening = mark == self._tags.open, False, ""
        if self._is_marked:
            self._opening = self._take(len(mark))
        return self._go(self._read_function)

    def _read_function(self) -> bool:
        self._opening += self._skip_blanks()
        tags = self._tags
        return self._read_named(tags.call, tags.name, tags.may_be_name, self._begin_function)

    def _read_named(
        self, mark: str, pattern: re.Pattern[str], begun: re.Pattern[str], state: Callable[[re.Match[str]], bool]
    ) -> bool:
        """A name behind a mark, and what to do with that; else it is no call."""
        if (not self._text or may_become(self._text, mark)) and not self._is_over:
            return False
        found = pattern.match(self._text)
        if found is not None:
            self._opening += self._take(found.end())
            return state(found)
        if begun.fullmatch(self._text) and (self._is_begun or not self._is_over):
            self._take(len(self._text) if self._is_over else 0)  # a mark that was cut
            return False
        if mark and mark == self._tags.call and self._text.startswith(mark):
            self._opening += self._take(len(mark))  # which is not looked at again
        return self._give_up()

    def _begin_function(self, found: re.Match[str]) -> bool:
        name, tags = found[1], self._tags
        # Without a mark of its own a name alone may be a word of a text that talks of the marks.
        is_bare = not tags.call and self._text.startswith(tags.close)
        if not name.strip() or ((is_bare or not self._is_marked) and name not in self._schemas):
            return self._give_up()
        self._name, self._given = name, set[str]()
        properties = self._schemas.get(name, {}).get("properties")
        self._names = properties.keys() if isinstance(properties, Mapping) else ()
        return self._go(self._read_member)

    def _read_member(self) -> bool:
        """Read a parameter of a call, or its end."""
        self._opening += self._skip_blanks()
        tags = self._tags
        if not self._text and not self._is_over:
            return False
        if self._text.startswith(tags.ends):
            self._tell_begin("}" if self._is_begun else "{}")
            self._is_begun = False
            if tags.end and self._text.startswith(tags.end):
                self._take(len(tags.end))
            return self._go(self._read_close)
        may_be = any(may_become(self._text, mark) for mark in (*tags.ends, tags.parameter))
        if may_be and (self._is_begun or not self._is_over):
            self._take(len(self._text) if self._is_over else 0)  # a mark that was cut
            return False
        return self._read_named(tags.parameter, tags.key, tags.may_be_key, self._begin_value)

    def _begin_value(self, found: re.Match[str]) -> bool:
        key, parameters = found[1], self._schemas.get(self._name, {})
        self._given.add(key)
        self._types = types_of(schema_of(parameters, key), parameters)
        told = found[2] if found.re.groups > 1 else None
        if told == "true" and "string" in self._types:
            self._types = frozenset({"string"})
        elif told == "false":
            self._types = self._types - {"string"} or self._types
        self._is_text, self._value, self._is_first = self._types == {"string"}, list[str](), True
        opening = f"{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._is_text else "")
        self._tell_begin(("{" if not self._is_begun else ", ") + opening)
        return self._go(self._read_value)

    def _tell_begin(self, arguments: str) -> None:
        """What is told of arguments, behind the call's beginning where that was not told yet."""
        self._tell([*([] if self._is_begun else [CallBegin(self._name)]), Arguments(arguments)])
        self._is_begun, self._opening = True, ""

    def _read_value(self) -> bool:
        """A value: of a form in lines, a line break at its beginning and one at its end are the mark's."""
        tags = self._tags
        if self._is_first and self._text:
            self._is_first = False
            if tags.has_lines and self._text.startswith("\n"):
                self._take(1)
        place, mark = find_mark(self._text, tags.ends_of_values)
        self._add_to_value(self._take(len(self._text) if self._is_over and not mark else place))
        if not mark:
            if self._is_over and not self._is_text:
                self._tell([Arguments("".join(self._value).strip())])  # as far as it has come
            return False
        is_end = mark.endswith(tags.end_parameter) or self._is_end(mark)
        if is_end is None:
            return False
        if not is_end:
            self._add_to_value(self._take(len(mark)))
            return True
        if mark.endswith(tags.end_parameter):
            self._take(len(mark))
        self._tell([Arguments('"' if self._is_text else as_json("".join(self._value), self._types))])
        return self._go(self._read_member)

    def _add_to_value(self, piece: str) -> None:
        if self._is_text:
            self._tell([Arguments(json.dumps(piece, ensure_ascii=False)[1:-1])])
        else:
            self._value.append(piece)

    def _is_end(self, mark: str) -> bool | None:
        """Whether a value that lacks its own mark ends in front of another one, with which the text begins; None while
        that is not certain. A text may hold such marks."""
        tags = self._tags
        if mark.endswith(tags.parameter):
            found = tags.next_key.match(self._text)
            if found is not None:
                return found[1] in self._names and found[1] not in self._given
            may_come = not self._is_over and tags.may_be_next_key.fullmatch(self._text) is not None
            return None if may_come else False
        found = tags.call_close.match(self._text)
        if found is None:
            rest = self._text.lstrip("\n").removeprefix(tags.end)[: _MOST_BLANKS + len(tags.close)]
            kept = rest.lstrip()
            may_be = len(rest) - len(kept) <= _MOST_BLANKS and may_become(kept, tags.close)
            return None if may_be and not self._is_over else may_be and mark.startswith("\n")
        behind = self._text[found.end() : found.end() + _MOST_BEHIND]
        place, next_mark = find_mark(behind, (tags.end_parameter, tags.open))
        if not next_mark and len(behind) < _MOST_BEHIND and not self._is_over:
            return None
        # The value's own mark comes still: then this one was its text.
        is_own = next_mark == tags.end_parameter
        is_whole = not tags.end or bool(found[1])
        return not is_own and (is_whole or not behind[: place if next_mark else None].strip())

    def _read_close(self) -> bool:
        """Read what follows a call: its mark, or another call within the same marks."""
        tags = self._tags
        self._skip_blanks()
        if any(may_become(self._text, mark) for mark in (tags.close, tags.call)):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        if tags.call and self._text.startswith(tags.call) and self._is_marked:
            return self._go(self._read_function)
        if self._text.startswith(tags.close):
            self._take(len(tags.close))
        return self._go(self._begin)

    def _give_up(self) -> bool:
        """What stands next is no part of a call; what was taken for one is text."""
        if self._is_begun and not self._is_over:
            self._tell([Arguments("}")])
        self._say(self._opening)
        return self._go(self._begin)
