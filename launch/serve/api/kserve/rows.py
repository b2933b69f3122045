"""The inputs of a request, seen from one row of its batch: numbers, texts and lists instead of tensors; and lists of
words as TensorRT-LLM carries them: token ids behind each other, and where each word ends.

    [[ 11, 12, 13, 21, 22],       words [11, 12, 13] and [21, 22]
     [  3,  5, -1, -1, -1]]

It knows arrays that `requests.check_request` has let through, and neither an input by name nor a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch.serve.admission.limits import check_words
from launch.serve.api.kserve.tensors import Array, refuse_input


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


def read_word_list(name: str, values: Array | None) -> tuple[tuple[int, ...], ...]:
    """The words of a list.

    Args:
        name: of the input, for messages.
        values: [2, length] int32; None for no words.

    Raises:
        Refusal: ends do not rise, or lie behind the tokens; a word has a number below 0; or there are too many words,
            or they are too long.
    """
    if values is None:
        return ()
    tokens, ends = values.tolist()
    words: list[tuple[int, ...]] = []
    begin = 0
    for end in ends:
        if end == -1 or (end == 0 and not words):  # clients pad lists without words with both
            break
        if not begin < end <= len(tokens):
            raise refuse_input(name, f"word {len(words)} ends at {end}, where it begins at {begin} of {len(tokens)}")
        word = tuple(tokens[begin:end])
        if min(word) < 0:
            raise refuse_input(name, f"{min(word)} is no token id")
        words.append(word)
        begin = end
    check_words(name, words, "tokens")
    return tuple(words)


def write_word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> Array:
    """The lists of a batch, as tensorrtllm_backend's preprocessing pads them.

    Args:
        rows: for each row its words, each as token ids.

    Returns:
        [batch, 2, length] int32; tokens are filled up with 0, ends with -1. The length is 1 at least.
    """
    spelled = [[word for word in words if word] for words in rows]
    length = max((sum(map(len, words)) for words in spelled), default=0)
    found = np.zeros((len(rows), 2, max(1, length)), np.int32)
    found[:, 1] = -1
    for place, words in enumerate(spelled):
        flat = [token for word in words for token in word]
        found[place, 0, : len(flat)] = flat
        found[place, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return found
