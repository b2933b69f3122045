"""JSON schemas that scripts/soak/check_guided.py asks for: made up, or from files.

It knows what a file of schemas looks like. It does not know what is asked, or what an answer is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEPEST = 3
WORDS = ("name", "size", "colour", "tag", "path", "owner", "state", "count", "price", "unit", "note", "city")


class Schemas:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._plain: list[Callable[[], dict[str, Any]]] = [
            self._text, self._integer, self._number, self._choice, self._constant, self._pattern, self._simple,
        ]  # fmt: skip
        self._nested: list[Callable[[int], dict[str, Any]]] = [
            self._record, self._record, self._list, self._tuple, self._either, self._map,
        ]  # fmt: skip

    def draw(self) -> dict[str, Any]:
        """A schema, with a definition that it may refer to."""
        schema = self._record(0) if self._random.random() < 0.8 else self._list(0)
        compact = {"x-guidance": {"whitespace_flexible": False}} if self._random.random() < 0.9 else {}
        return {**compact, **schema, "$defs": {"part": self._record(DEEPEST)}}

    def _any(self, depth: int) -> dict[str, Any]:
        if depth < DEEPEST and self._random.random() < 0.4:
            return self._random.choice(self._nested)(depth + 1)
        if depth < DEEPEST and self._random.random() < 0.1:
            return {"$ref": "#/$defs/part"}
        return self._random.choice(self._plain)()

    def _text(self) -> dict[str, Any]:
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)}

    def _integer(self) -> dict[str, Any]:
        least = self._random.randint(-500, 500)
        return {"type": "integer", "minimum": least, "maximum": least + self._random.choice((0, 7, 1000))}

    def _number(self) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "maximum": self._random.choice((1, 99))}

    def _choice(self) -> dict[str, Any]:
        return {"enum": [*self._random.sample(WORDS, 3), *self._random.sample((1, 2.5, None, True, [1], {"a": 1}), 2)]}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._random.choice(('é\\n"x"', 7, None, ["a", 1]))}

    def _pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._random.choice(("^[a-c]{2,4}$", "^\\d{4}-\\d{2}$", "^(yes|no)!?$"))}

    def _simple(self) -> dict[str, Any]:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}

    def _record(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(1, 4))
        needed = [name for name in names if self._random.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}

    def _list(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> dict[str, Any]:
        parts = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth), self._any(depth)]}

    def _map(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._any(depth), "maxProperties": 2}


def schemas_of(directory: Path, seed: int) -> Iterator[tuple[str, Any]]:
    """The schemas that lie in a directory and below it, each with its file, in an order that the seed draws.

    A file is a JSON schema, or an object whose `schema` is one, as those of maskbench are. Others are left out.

    Raises:
        SystemExit: there is none.
    """
    paths = sorted(path for path in directory.glob("**/*.json") if path.is_file())
    random.Random(seed).shuffle(paths)
    found = False
    for path in paths:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found = True
            yield str(path.relative_to(directory)), value["schema"] if isinstance(value.get("schema"), dict) else value
    if not found:
        raise SystemExit(f"check_guided.py: --schemas-from {directory}: no JSON schema lies there (files *.json)")
