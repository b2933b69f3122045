"""A tokenizer for models that know no language: byte-level BPE with made-up merges, of any number of tokens.

Any text becomes tokens and comes back as it was, one to four letters of a word a token, and every token but the
first ones has a text of its own. So programs that serve texts can be tried and timed with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first ids: padding, beginning of sequence, end of sequence."""

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
"""The frequent ones first: what begins with them is merged first."""


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly so many tokens.

    Args:
        vocab_size: 259 (the special tokens and one for each byte) to 493,063.

    Raises:
        ValueError: there are not so many made-up tokens, or fewer than bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), max(0, vocab_size - len(SPECIAL) - len(alphabet))))
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    if len(tokens) != vocab_size:
        raise ValueError(f"a synthetic tokenizer has 259 to 493063 tokens, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Two letters, three letters, three letters behind a space, and four, each made of what came before."""
    yield from product(LETTERS, repeat=2)
    for first, second, third in product(LETTERS, repeat=3):
        yield first + second, third
    for word in product(LETTERS, repeat=3):
        yield "Ġ", "".join(word)  # byte-level BPE's letter for a space
    for *word, last in product(LETTERS, repeat=4):
        yield "".join(word), last
