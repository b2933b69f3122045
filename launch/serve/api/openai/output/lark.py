"""A grammar in llguidance's Lark, as its rules are put down; marks that are special tokens stand as their ids.

It knows Lark, and no forms of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from trtrun.core.guide import MOST_GUIDE_CHARACTERS
from trtrun.errors import InvalidRequestError


class Lark:
    """Rules of a grammar, as they are put down."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: dict[str, str] = {"TEXT": r"/(.|\n)*/", "BLANKS": r"/\s*/"}
        self._characters = 0

    @property
    def size(self) -> int:
        """How many rules there are."""
        return len(self._rules)

    def has(self, name: str) -> bool:
        """Whether a rule of that name was put down."""
        return name in self._rules

    def put(self, name: str, rule: str) -> str:
        """Put down a rule; returns its name.

        Raises:
            InvalidRequestError: all are longer than a grammar may be: not written first, as each parameter of a tool
                may have a rule that holds all that its schema defines.
        """
        self._characters += len(rule) - len(self._rules.get(name, ""))
        if self._characters > MOST_GUIDE_CHARACTERS:
            raise InvalidRequestError(
                f"tools: what guides the answer is longer than {MOST_GUIDE_CHARACTERS} characters, which are the most"
            )
        self._rules[name] = rule
        return name

    def mark(self, text: str) -> str:
        """A mark."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    def until(self, text: str, *absent: str) -> str:
        """Any text that does not hold some others, and a mark, which it does not hold."""
        before = self.without(*absent) if absent else "TEXT"
        if text in self._special:
            return f"{before} {self.mark(text)}"
        name = f"until_{len(self._rules)}"
        return self.put(f"{name}[lazy]", f"{before} {self.mark(text)}").removesuffix("[lazy]")

    def without(self, *texts: str) -> str:
        """Any text that holds no mark of some."""
        parts = ["/(.|\n)*/"]
        for escaped in filter(None, map(self.escaped, texts)):
            parts.append(rf"~/(.|\n)*{escaped}(.|\n)*/")
        return self.put(f"PLAIN_{len(self._rules)}", " & ".join(parts)) if len(parts) > 1 else "TEXT"

    def escaped(self, text: str) -> str:
        """A text as a regular expression has it; nothing for a special token, which no text holds."""
        return "" if text in self._special else re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")

    def whole(self, start: str) -> str:
        """All of it."""
        rules = [f"{name}: {rule}" for name, rule in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, ""])
