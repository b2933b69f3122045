"""Many sequences looked for at once: what is found, what may still become one, and how little that takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoints import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trtrun.tokens.detokenizer import ROOT, AhoCorasick, CompletionText, IncrementalDetokenizer
from trtrun.tokens.text import Tokenizer, read_tokenizer

LETTERS = st.text("ab", max_size=6)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(LETTERS, max_size=7), text=st.text("abc", max_size=40), passes=st.integers(0, 5))
def test_states_are_the_longest_ends_that_begin_a_word(words: list[str], text: str, passes: int) -> None:
    """For strings and for tuples, walked once and once more, with whole words passed over now and then."""
    whole = set(filter(None, words))
    begun = {word[:length] for word in whole for length in range(len(word) + 1)}
    unfinished = {word[:length] for word in whole for length in range(len(word))}
    automata = AhoCorasick(words), AhoCorasick([tuple(map(ord, word)) for word in words])
    assert bool(automata[0]) == bool(whole)

    def longest_end(seen: str, known: set[str]) -> int:
        return max((len(word) for word in known if seen.endswith(word)), default=0)

    for automaton, symbols in zip(2 * automata, 2 * (text, tuple(map(ord, text))), strict=True):
        state = ROOT
        for place, symbol in enumerate(symbols):
            state = automaton.step(state, symbol)
            seen = text[: place + 1]
            assert automaton.num_begun(state) == longest_end(seen, begun)
            assert automaton.num_whole(state) == longest_end(seen, whole)
            passed = automaton.pass_whole(state)
            assert automaton.num_begun(passed) == longest_end(seen, unfinished)
            if passes and place % passes == 0:
                state = passed


class CountedString(str):
    """A string that counts how often it is looked into."""

    num_looks = 0

    def __getitem__(self, key: object) -> str:
        CountedString.num_looks += 1
        return super().__getitem__(key)  # type: ignore[index]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytes")
    make_tokenizer(path)
    found = read_tokenizer(path)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["b" * 64] * 1023 + ["a" * 63 + "b"],
        [f"a{place:04}" + "b" * 59 for place in range(1023)] + ["a" * 63 + "b"],
        ["a" * length + "b" for length in range(360)],
        ["a" * 65_535 + "b"],
    ],
    ids=["one letter", "many beginnings", "each the end of the next", "one long"],
)
def test_a_thousand_stop_strings_cost_what_one_costs(tokenizer: Tokenizer, words: list[str]) -> None:
    """Characters that nearly are a stop string, again and again: a few looks each, however the words are made."""
    stop = AhoCorasick([CountedString(word) for word in words])
    CountedString.num_looks = 0
    randomness, num_characters = random.Random(1), 4000
    letter = {name: tokenizer.encode(name)[0] for name in "axd"}
    for _ in range(2):
        text = CompletionText(IncrementalDetokenizer(tokenizer), stop)
        told = []
        for place in range(num_characters):
            text.append(letter["a" if place < num_characters // 2 or randomness.random() < 0.98 else "x"])
            assert not text.cut_at_stop()
            told.append(text.take())
        told.append(text.finish())
        assert sum(map(len, told)) == num_characters
    # A search among 1,024 where a sequence branches or ends; a look where it goes on.
    assert CountedString.num_looks < 20 * num_characters


@pytest.mark.parametrize(
    ("marks", "text", "expected"),
    [
        (("<t>", "</t>"), "<t>ab</t>xaby", "<t>ab</t>x"),
        (("<t>", "</t>"), " \n<t>ab</t>ab", " \n<t>ab</t>"),
        (("<t>", "</t>"), "<t>ab", "<t>ab"),
        (("<t>", "</t>"), "xab<t>", "x"),
        (("<t>", "</t>"), "<ab", "<"),
        (("<t>", "</t>"), "<t", "<t"),
        (("", "</t>"), "ab</</t>zab", "ab</</t>z"),
        (("", "b"), "ab", "ab"),
        (("<c>an", "<c>fi"), "<c>an<m>ab<c>fi<m>xab", "<c>an<m>ab<c>fi<m>x"),
        (None, "<t>ab</t>", "<t>"),
    ],
)
def test_stop_strings_count_behind_thoughts(
    tmp_path: Path, marks: tuple[str, str] | None, text: str, expected: str
) -> None:
    make_tokenizer(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    for is_taken in (False, True):
        for num_passed in (0, 2):
            written = CompletionText(IncrementalDetokenizer(tokenizer), AhoCorasick(("ab",)), thoughts=marks)
            told, is_cut = "", False
            for count, token in enumerate(ids):
                written.append(token)
                is_cut = written.cut_at_stop() if count >= num_passed else bool(written.pass_stops())
                if is_cut:
                    break
                told += written.take() if is_taken else ""
            written.end_tokens()
            assert told + written.finish() == expected and is_cut == (expected != text)


def test_the_stop_string_that_is_whole_first_ends_a_text_whatever_its_tokens(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, merges=30)  # "abcdefg…" in tokens of several letters
    merged = read_tokenizer(tmp_path)
    assert merged is not None
    for stops, expected in {
        ("bcd", "c"): "ab",
        ("bc", "c"): "a",
        ("cde", "bcdefg"): "ab",
        ("zz", "abcdefgh"): "",
        ("zz",): "abcdefgh",
    }.items():
        for tokens in (merged.encode("abcdefgh"), [merged.encode(letter)[0] for letter in "abcdefgh"]):
            text = CompletionText(IncrementalDetokenizer(merged), AhoCorasick(stops))
            told = ""
            for token in tokens:
                text.append(token)
                if text.cut_at_stop():
                    break
                told += text.take()
            assert told + text.finish() == expected
    assert len(merged.encode("abcdefgh")) < 8
