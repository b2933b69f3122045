"""The inputs of a request, seen from one row of its batch: numbers, texts and lists instead of tensors.

It knows arrays that `requests.check_request` has let through, and no input by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.serve.door.word_limits import check_words
from launch.serve.kserve.tensors import Array, refuse_input


class Row:
    """One row of a batch."""

    def __init__(self, inputs: Mapping[str, Array], place: int) -> None:
        self._inputs = inputs
        self._place = place

    def has(self, name: str) -> bool:
        """Whether the input is there."""
        return name in self._inputs

    def array(self, name: str) -> Array | None:
        """The row's values, without the batch dimension; None where the input is not there."""
        values = self._inputs.get(name)
        return None if values is None else values[self._place]

    def number(self, name: str, default: Any) -> Any:
        """The one number of an input.

        Args:
            name: of an input with one value a row.
            default: where the input is not there.
        """
        values = self.array(name)
        return default if values is None else values.item()

    def flag(self, name: str, default: bool = False) -> bool:
        """The one truth value of an input."""
        return bool(self.number(name, default))

    def text(self, name: str) -> str:
        """The one text of an input; empty where it is not there.

        Raises:
            Refusal: its bytes are no UTF-8.
        """
        return "".join(self.texts(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of an input; none where it is not there.

        Raises:
            Refusal: bytes that are no UTF-8.
        """
        values = self.array(name)
        try:
            return () if values is None else tuple(value.decode() for value in values.ravel())
        except UnicodeDecodeError as error:
            raise refuse_input(name, f"byte {error.start + 1} of a text is not valid UTF-8") from None

    def words(self, name: str) -> tuple[str, ...]:
        """The texts of an input that become tokens, each by itself.

        Raises:
            Refusal: as of `texts`; or there are too many, or they are too long.
        """
        found = self.texts(name)
        check_words(name, found)
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """The whole numbers of an input; none where it is not there."""
        return self.numbers(name)

    def numbers(self, name: str) -> tuple[Any, ...]:
        """The numbers of an input; none where it is not there."""
        values = self.array(name)
        return () if values is None else tuple(values.ravel().tolist())
