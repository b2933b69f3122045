"""Each token's own part of a text."""

from __future__ import annotations

from launch.serve.token_texts import TokenTexts
from trtrun.config import ASSETS
from trtrun.text import read_tokenizer


def test_a_character_of_several_tokens_is_its_last_ones() -> None:
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    text = 'a = "\u2192\U0001f600\u00e9"'
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)  # some characters take several
    for size in (1, 2, 3, len(tokens)):
        texts = TokenTexts(tokenizer, [tokenizer.encode("import os"), [5]], 2)
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        told = [text for part in parts for text in texts.take(3, part, is_end=part is parts[-1])]
        assert "".join(told) == text and len(told) == len(tokens)
        assert "\ufffd" not in "".join(told)


def test_what_is_left_at_the_end_is_the_last_tokens_and_without_a_tokenizer_there_is_no_text() -> None:
    tokenizer = read_tokenizer(ASSETS / "target")
    assert tokenizer is not None
    torn = tokenizer.encode("\U0001f600")[:-1]
    assert "".join(TokenTexts(tokenizer, [[5]], 1).take(0, torn, is_end=False)) == ""
    assert "\ufffd" in TokenTexts(tokenizer, [[5]], 1).take(0, torn, is_end=True)[-1]
    assert TokenTexts(None, [[5]], 1).take(0, [1, 2], is_end=True) == ["", ""]
