"""The text of a custom tool's call, told apart from the JSON that the model writes it in, as it comes.

It knows JSON, and the name of the one argument. It knows no events.
"""

from __future__ import annotations

import json
import re

from launch.serve.api.openai.responses.tools import INPUT

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MOST_BEFORE = 64
"""Letters in which the text has to begin; behind them nobody looks for its beginning any more."""

_LETTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)
"""Of a text of JSON, each as a whole: half of one waits for the other half. Line breaks may stand as they are."""


class CustomInput:
    """The input of one call.

    Arguments that are no object with this text are told at their end: the one text that they hold, or all of them as
    they are.
    """

    def __init__(self) -> None:
        """Begin with no arguments."""
        self._parts: list[str] = []
        self._num_before = 0
        self._has_begun = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """What the next piece of the arguments adds to the text."""
        if self._is_over:
            return ""
        self._parts.append(arguments)
        if not self._has_begun and self._num_before > _MOST_BEFORE:
            return ""
        left = "".join(self._parts)
        if not self._has_begun:
            begin = _BEGIN.match(left)
            if begin is None:
                self._num_before = len(left)
                return ""
            self._has_begun, left = True, left[begin.end() :]
        letters = _LETTERS.match(left)
        end = letters.end() if letters else 0
        self._is_over = left.startswith('"', end)
        self._parts = [] if self._is_over else [left[end:]]
        return _decoded(left[:end])

    def finish(self) -> str:
        """What the end of the arguments adds."""
        left, self._parts = "".join(self._parts), []
        return left if self._has_begun else _only_text(left)


def _decoded(letters: str) -> str:
    text: str = json.loads(f'"{letters}"', strict=False)
    return text


def _only_text(arguments: str) -> str:
    try:
        found = json.loads(arguments, strict=False)
        texts = list(found.values()) if isinstance(found, dict) else [found]
        (text,) = texts
        text.encode()
    except (ValueError, RecursionError, AttributeError):
        return arguments
    return text if isinstance(text, str) else arguments
