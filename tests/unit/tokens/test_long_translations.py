"""Texts in another vocabulary's tokens take no longer the longer they are, whatever the vocabulary lacks."""

from __future__ import annotations

import random

import pytest
from tokenizer_layouts import TEXTS, layout

from trtrun.tokens.respelling import Respeller
from trtrun.tokens.token_bytes import TokenBytes, find_common_tokens
from trtrun.tokens.translation import TranslatedText, Vocabularies

MOST_KEPT = 1024 + 128
"""Bytes that are spelled anew, at most."""


def pair(target: str, draft: str) -> Vocabularies:
    tokenizers = layout(target), layout(draft)
    sides = [tokenizer.token_bytes() for tokenizer in tokenizers]
    spellers = [Respeller(*side) for side in zip(tokenizers, sides, strict=True)]
    return Vocabularies(sides[0], sides[1], find_common_tokens(*sides), spellers[0], spellers[1])


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("unit", ["漢字仮名", "漢字 is it 𝛀 ", "0123456789", "🦙\n"])
def test_what_is_spelled_anew_is_bounded_where_a_draft_lacks_characters(unit: str, texts: bool) -> None:
    """What is left out is left out once, nothing else is, and what was final stays."""
    both, chance = pair("byte-level", "Metaspace"), random.Random(5)
    target, draft = layout("byte-level"), layout("Metaspace")
    found = TranslatedText(both, both.kept(texts=texts))
    tokens, place, kept = target.encode(unit * 1200, add_special_tokens=False), 0, list[int]()
    while place < len(tokens):
        size = chance.choice((1, 3, 40, 900))
        before, found.first_changed = [*found.tokens], len(found.tokens)
        found.extend(tokens[place : place + size])
        place += size
        assert len(found._tail) <= MOST_KEPT
        assert found.tokens[: len(kept)] == kept
        assert found.tokens[: found.first_changed] == before[: found.first_changed]
        kept = found.tokens[: found.num_final]
    known = {letter for letter in unit if both.draft_speller.spell(letter.encode())}
    written = "".join(letter for letter in unit * 1200 if letter in known)
    assert draft.decode(found.tokens).strip() == written.strip()


def test_a_text_without_tokens_keeps_its_opening() -> None:
    both = pair("byte-level", "Metaspace")
    found = TranslatedText(both, both.kept(texts=False))
    found.extend(layout("byte-level").encode("漢" * 3000, add_special_tokens=False))
    assert [*found.tokens] == [*both.draft_speller.opening] and len(found._tail) <= MOST_KEPT


class Counted(dict[bytes, int]):
    """Counts what is looked for."""

    looked = 0

    def __contains__(self, key: object) -> bool:
        self.looked += 1
        return super().__contains__(key)


def test_a_long_token_costs_nothing_where_it_does_not_begin() -> None:
    vocabulary = TokenBytes({0: b"a", 1: b"bc", 2: b"b" + b" " * 5000, 3: b"\xff\xff"}, {})
    speller = Respeller(layout("byte-level"), vocabulary)
    assert speller._pieces_of(b"") == []
    speller._pieces = counted = Counted(speller._pieces or {})
    assert speller._pieces_of(b"abcab" * 1000) == [0, 1, 0] * 1000  # a single "b" is no token
    assert counted.looked <= 4 * 5000
    assert speller._pieces_of(b"b" + b" " * 5000 + b"a") == [2, 0]


def test_bytes_that_are_no_characters_are_parted_from_text_at_once() -> None:
    """Those beside each other are one part, of which tokens of several bytes are made."""
    vocabulary = TokenBytes({0: b"a", 1: b"\xff", 2: b"\xff\xfe", 3: b"\xe2\x82", 4: "é".encode()}, {})
    speller = Respeller(layout("byte-level"), vocabulary)
    assert speller.spell(b"\xff\xfea\xff\xe2\x82\xff\xfe" + "é".encode()) == [2, 0, 1, 3, 2, 4]
    assert speller.spell(b"\xed\xa0\x80a") == [0]  # half of a pair is no character


@pytest.mark.parametrize("draft", ["byte-level", "byte-fallback", "Unigram"])
def test_any_bytes_are_spelled(draft: str) -> None:
    vocabulary = layout(draft).token_bytes()
    speller, chance = Respeller(layout(draft), vocabulary), random.Random(2)
    for length in range(1, 60):
        data = bytes(chance.choices(range(256), k=length)) + TEXTS[3].encode()[: length % 7]
        assert b"".join(vocabulary.of_token[token] for token in speller.spell(data)) == data
