"""How many words a request may bring: strings that stop it, words that must not come, words with a bias.

Each of them becomes tokens, and is looked for behind every token of the output, while the rounds of all requests wait.
It knows how many there may be, and not what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from launch.serve.refusals import Kind, Refusal

MOST_WORDS = 1024
"""In one list."""

MOST_LETTERS = 1 << 16
"""In one list: characters of its words, or tokens of those that come as tokens."""


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Hold a list to the limits.

    Args:
        name: of the field or input, for the message.
        words: texts, or token ids of each.
        unit: what words are made of, for the message.

    Raises:
        Refusal: there are too many, or they are too long.
    """
    if len(words) > MOST_WORDS:
        raise Refusal(Kind.INVALID, f"{name} has {len(words)} entries; {MOST_WORDS} are the most", name)
    length = sum(map(len, words))
    if length > MOST_LETTERS:
        raise Refusal(Kind.INVALID, f"{name} is {length} {unit} long in all; {MOST_LETTERS} are the most", name)
