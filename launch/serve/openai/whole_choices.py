"""Choices of whole answers of the OpenAI API: what came of each is kept as JSON already, and put together at the end.

It knows fields and their values. It does not know what they mean, or which there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


class _List:
    """A list as JSON, made as its values come: a whole answer's may have millions."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, values: Sequence[Any]) -> None:
        """Add values at its end."""
        if values:
            self._parts.append(_ENCODER.encode(values)[1:-1])

    def whole(self) -> msgspec.Raw:
        """All of it."""
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


class Choice:
    """What came of one choice so far, its lists as JSON already.

    Attributes:
        text: in parts.
        told: the other fields, as the last piece has them.
    """

    def __init__(self) -> None:
        self.text: list[str] = []
        self.told: dict[str, Any] = {}
        self._lists: dict[str, _List] = {}
        self._origins: list[str] = []

    def add(self, text: str, told: dict[str, Any]) -> None:
        """Go on with the next piece."""
        self.text.append(text)
        logprobs = told.get("logprobs")
        if logprobs is not None:
            told["logprobs"] = self._with_lists("logprobs.", logprobs)
        if "token_origins" in told:
            self._origins.append(told["token_origins"])
        self.told = self._with_lists("", told)

    def whole(self, text: dict[str, Any]) -> dict[str, Any]:
        """All of it, with its text as the answer has that."""
        told = _with_whole_lists(self.told)
        if isinstance(self.told.get("logprobs"), dict):
            told["logprobs"] = _with_whole_lists(self.told["logprobs"])
        if "token_origins" in told:
            told["token_origins"] = "".join(self._origins)
        return {"index": told.pop("index"), **text, **told}

    def _with_lists(self, where: str, told: dict[str, Any]) -> dict[str, Any]:
        """The fields, with lists that have what came before in front."""
        return {
            name: self._extended(where + name, value) if isinstance(value, list) else value
            for name, value in told.items()
        }

    def _extended(self, name: str, values: list[Any]) -> _List:
        found = self._lists.setdefault(name, _List())
        found.extend(values)
        return found


def _with_whole_lists(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.whole() if isinstance(value, _List) else value for name, value in told.items()}
