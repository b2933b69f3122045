"""Lists of words as TensorRT-LLM carries them: token ids behind each other, and where each word ends.

    [[ 11, 12, 13, 21, 22],       words [11, 12, 13] and [21, 22]
     [  3,  5, -1, -1, -1]]

It knows arrays and token ids, and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launch.serve.door.word_limits import check_words
from launch.serve.kserve.tensors import Array, refuse_input


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
