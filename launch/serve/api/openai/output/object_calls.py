"""Parsers of calls that are objects with a name and arguments: Hermes' and Llama 3's.

Hermes, Qwen2.5 and Qwen3 write an object between `<tool_call>` and `</tool_call>`, beside text. The answer of
Llama 3.1 and 3.2 is an object with `name` and `parameters`, or several with semicolons between them, perhaps behind
`<|python_tag|>`.
"""

from __future__ import annotations

from collections.abc import Container

from launch.serve.api.openai.output.json_values import CallObject
from launch.serve.api.openai.output.machine import Arguments, CallMachine, may_become

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallMachine):
    """Finds them. What stands behind a mark and is no call is text, with its marks. A mark that is left out at the end
    of a call is not missed."""

    def _begin(self) -> bool:
        if not self._say_until(OPEN):
            return False
        self._opening = self._take(len(OPEN))
        return self._go(self._read_brace)

    def _read_brace(self) -> bool:
        self._opening += self._skip_blanks()
        if not self._text and not self._is_over:
            return False
        if not self._text.startswith("{"):
            self._say(self._opening)
            return self._go(self._begin)
        self._call = CallObject(mark=CLOSE)
        return self._go(self._read_call)

    def _read_call(self) -> bool:
        self._tell(self._call.feed(self._take(len(self._text))))
        if self._call.is_over:
            self._text = self._call.rest
            return self._go(self._read_close)
        if self._is_over and self._call.is_begun:
            self._tell([Arguments(self._call.rest)])  # what might have become the mark
        if self._call.is_failed or (self._is_over and not self._call.is_begun):
            self._say(self._opening)
            self._text = self._call.text  # where another one may begin
            return self._go_behind_failure(self._call.num_read, self._begin)
        return False

    def _read_close(self) -> bool:
        """Read what follows a call: its mark, or another call."""
        self._skip_blanks()
        if may_become(self._text, CLOSE):
            if self._is_over:
                self._take(len(self._text))  # a mark that was cut
            return False
        if self._text.startswith("{"):
            self._opening = ""
            return self._go(self._read_brace)
        if self._text.startswith("}"):  # one too many
            self._take(1)
            return True
        if self._text.startswith(CLOSE):
            self._take(len(CLOSE))
        return self._go(self._begin)


TAG = "<|python_tag|>"


class Llama3Parser(CallMachine):
    """Finds them. Without the tag an answer is a call where it begins with an object that names a tool of the request:
    an object may also be what was asked for."""

    def __init__(self, known: Container[str]) -> None:
        """Begin.

        Args:
            known: names of the request's tools.
        """
        super().__init__()
        self._known = known
        self._opening = ""
        self._is_tagged = False

    def _begin(self) -> bool:
        """Read the answer's beginning."""
        self._opening += self._skip_blanks()
        if (not self._text or may_become(self._text, TAG)) and not self._is_over:
            return False
        if self._text.startswith("{"):
            return self._go(self._begin_call)
        self._say(self._opening)
        return self._go(self._read_text)

    def _read_text(self) -> bool:
        if not self._say_until(TAG):
            return False
        self._opening, self._is_tagged = self._take(len(TAG)), True
        return self._go(self._read_brace)

    def _read_brace(self) -> bool:
        self._opening += self._skip_blanks()
        if not self._text and not self._is_over:
            return False
        if self._text.startswith("{"):
            return self._go(self._begin_call)
        self._say(self._opening)
        return self._go(self._read_text)

    def _begin_call(self) -> bool:
        self._call = CallObject(None if self._is_tagged else self._known)
        return self._go(self._read_call)

    def _read_call(self) -> bool:
        self._tell(self._call.feed(self._take(len(self._text))))
        if self._call.is_over:
            self._text, self._opening = self._call.rest, ""
            return self._go(self._read_separator)
        if self._call.is_failed or (self._is_over and not self._call.is_begun):
            self._say(self._opening)
            self._text = self._call.text
            return self._go_behind_failure(self._call.num_read, self._say_brace)
        return False

    def _say_brace(self) -> bool:
        self._say(self._take(1))  # of what is no call
        return self._go(self._read_text)

    def _read_separator(self) -> bool:
        """Read what follows a call: another one, or text."""
        self._opening += self._skip_blanks()
        if not self._text and not self._is_over:
            return False
        if self._text.startswith(";") and ";" not in self._opening:
            self._opening += self._take(1)
            return True
        if self._text.startswith("{"):
            return self._go(self._begin_call)
        self._say(self._opening if self._text else "")
        return self._go(self._read_text)
