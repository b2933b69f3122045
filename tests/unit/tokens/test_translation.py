"""Texts in another vocabulary's tokens: spelled as its tokenizer spells them, whatever comes in which pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from checkpoints import make_tokenizer
from permuted import permute_tokenizer
from tokenizer_layouts import TEXTS, layout

from trtrun.errors import CheckpointError
from trtrun.tokens.respelling import Respeller, whole_characters
from trtrun.tokens.text import Tokenizer, check_same_tokenizer, read_tokenizer
from trtrun.tokens.token_bytes import CommonTokens, TokenBytes, find_common_tokens
from trtrun.tokens.translation import TranslatedText, Vocabularies, choose_way, read_vocabularies

BYTES = ("byte-level", "byte-fallback", "Unigram")
"""Layouts that can spell any text."""
PAIRS = [(target, draft) for target in (*BYTES, "Metaspace") for draft in BYTES]
LONG = " ".join([TEXTS[0]] * 12) + "".join(TEXTS[1:4]) + " ".join([TEXTS[3], TEXTS[0]] * 4)


def pair(target: Tokenizer, draft: Tokenizer) -> Vocabularies:
    sides = target.token_bytes(), draft.token_bytes()
    return Vocabularies(*sides, find_common_tokens(*sides), Respeller(target, sides[0]), Respeller(draft, sides[1]))


def pieces(tokens: list[int], seed: int, most: int = 7) -> list[list[int]]:
    chance, found, place = random.Random(seed), [], 0
    while place < len(tokens):
        size = chance.randint(1, most)
        found.append(tokens[place : place + size])
        place += size
    return found


def read_out(vocabulary: TokenBytes, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.of_token.get(token, b"") for token in tokens)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("texts", [False, True])
def test_a_growing_text_is_spelled_as_the_other_tokenizer_spells_it(target: str, draft: str, texts: bool) -> None:
    """Token by token where both have one; else as a whole, with what tokenizers put in front."""
    both, written, other = pair(layout(target), layout(draft)), LONG, layout(draft)
    if target == "Metaspace":  # which lacks some characters
        written = layout(target).decode(layout(target).encode(LONG))
    found = TranslatedText(both, both.kept(texts=texts))
    kept: list[int] = []
    for piece in pieces(layout(target).encode(written), seed=len(draft)):
        before, found.first_changed = [*found.tokens], len(found.tokens)
        found.extend(piece)
        assert found.tokens[: found.num_final][: len(kept)] == kept
        assert found.tokens[: found.first_changed] == before[: found.first_changed]
        kept = found.tokens[: found.num_final]
    assert other.decode(found.tokens) == written
    assert found.num_final > len(found.tokens) // 2
    if not texts:
        assert found.tokens == other.encode(written)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("texts", [False, True])
def test_tokens_of_any_kind_keep_their_bytes(target: str, draft: str, texts: bool) -> None:
    """Halves of characters, and special tokens between them, of which both have the same."""
    both, chance = pair(layout(target), layout(draft)), random.Random(7)
    found = TranslatedText(both, both.kept(texts=texts))
    special = {token: name for token, name in both.target.special.items() if name in ("<s>", "</s>")}
    tokens = [chance.choice([*both.target.of_token, *special]) for _ in range(400)]
    for piece in pieces(tokens, seed=3):
        found.extend(piece)
    mine = [part for token in tokens for part in (both.target.of_token.get(token), special.get(token)) if part]
    theirs = [
        part
        for token in found.tokens
        for part in (both.draft.of_token.get(token), both.draft.special.get(token))
        if part is not None
    ]
    if theirs[0] == "<s>" and mine[0] != "<s>":
        theirs = theirs[1:]
    merged = [b"".join(run.encode() if isinstance(run, str) else run for run in parts) for parts in (mine, theirs)]
    # A text's first token may have a space in front that is not the text's.
    assert merged[0].lstrip() == merged[1].lstrip()


@pytest.mark.parametrize("texts", [False, True])
def test_what_a_vocabulary_lacks_is_left_out(texts: bool) -> None:
    both = pair(layout("byte-level"), layout("Metaspace"))
    found = TranslatedText(both, both.kept(texts=texts))
    found.extend(layout("byte-level").encode("is 𝛀 it 𝛀"))
    assert layout("Metaspace").decode(found.tokens) == "is  it "
    assert both.draft_speller.spell("𝛀".encode()) == []


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_drafted_text_becomes_what_the_target_would_say(target: str, draft: str) -> None:
    both, written = pair(layout(target), layout(draft)), " ".join([TEXTS[0]] * 2)
    tokens = layout(target).encode(written, add_special_tokens=False)
    for cut in range(1, len(tokens) - 4, 3):
        behind = tokens[cut : cut + 4]
        drafted = both.draft_speller.spell(read_out(both.target, behind))
        assert both.to_target(tokens[:cut], drafted) == behind


def test_drafted_text_is_spelled_behind_the_word_that_it_goes_on_with() -> None:
    """A text without blanks is one: its last token alone would have the target spell what follows otherwise."""
    both = pair(layout("byte-level"), layout("byte-level"))
    text = next(text for text in TEXTS if text.startswith("日本語の文章"))
    tokens = layout("byte-level").encode(text, add_special_tokens=False)
    behind = tokens[6:10]
    assert both.to_target(tokens[:6], both.draft_speller.spell(read_out(both.target, behind))) == behind


def test_drafts_end_where_they_mean_nothing_to_the_target() -> None:
    both = pair(layout("byte-level"), layout("byte-fallback"))
    end, words = both.special_of_draft, both.draft_speller.spell(b" is it")
    (stop,) = (token for token, name in both.draft.special.items() if name == "</s>")
    unknown = 1 << 20  # as a model's padding is
    said = layout("byte-level").encode(" is it", add_special_tokens=False)
    found = both.to_target([], [*words, stop, *words])
    assert found[: len(said)] == said and found[len(said)] == end[stop]
    assert both.to_target([], [*words, unknown, *words]) == said
    # Half a character is none yet.
    half = [token for token, text in both.draft.of_token.items() if text == "🦙".encode()[:1]]
    assert both.to_target([], [*words, half[0]]) == said
    assert whole_characters("a🦙".encode()[:-1]) == b"a" and whole_characters("a🦙".encode()) == "a🦙".encode()


def test_what_is_common_has_the_same_bytes_or_the_same_name() -> None:
    target = TokenBytes({1: b"A", 2: b" b", 3: b"\xe6", 4: b"c"}, {0: "<s>", 9: "<end>"})
    draft = TokenBytes({10: b"A", 11: b"A", 12: b"\xe6", 13: b" b"}, {20: "<s>", 21: "</s>"}, frozenset({10, 12}))
    found = find_common_tokens(target, draft, (9,), (21,))
    assert found == CommonTokens({0: 20, 1: 11, 2: 13, 3: 12, 9: 21}, 6, 6, {})
    assert found.share_of_target == pytest.approx(5 / 6)
    # A byte to fall back to goes with another such, and a piece with a piece.
    other = TokenBytes({1: b"A", 2: b"A", 3: b"\xe6"}, {}, frozenset({1, 3}))
    assert find_common_tokens(other, draft).draft_of == {1: 10, 2: 11, 3: 12}
    # What ends a text here stands for what does so there.
    ends = find_common_tokens(TokenBytes({}, {0: "<s>", 9: "<end>"}), draft, (0, 9), (21,))
    assert ends.draft_of == {0: 20} and ends.ends == {9: 21}


def test_the_way_follows_from_what_is_common(tmp_path: Path) -> None:
    for name, merges in (("target", 26), ("few", 2), ("none", 0)):
        (tmp_path / name).mkdir()
        make_tokenizer(tmp_path / name, merges=merges)
    (tmp_path / "empty").mkdir()
    permute_tokenizer(tmp_path / "target", tmp_path / "permuted", seed=3)
    assert choose_way(tmp_path / "target", tmp_path / "target") == "same"
    assert choose_way(tmp_path / "target", tmp_path / "empty") == "same"
    assert choose_way(tmp_path / "target", tmp_path / "few") == "intersection"
    assert choose_way(tmp_path / "target", tmp_path / "permuted") == "intersection"
    permuted = read_vocabularies(tmp_path / "target", tmp_path / "permuted").common
    assert permuted.share_of_target == permuted.share_of_draft == 1.0
    common = read_vocabularies(tmp_path / "target", tmp_path / "few").common
    assert (len(common.draft_of), common.num_target, common.num_draft) == (259, 283, 259)
    file = json.loads((tmp_path / "target" / "tokenizer.json").read_text())
    (tmp_path / "spaced").mkdir()
    (tmp_path / "spaced" / "tokenizer.json").write_text(json.dumps(file, indent=3))
    assert choose_way(tmp_path / "target", tmp_path / "spaced") == "same"
    large = tmp_path / "large"
    large.mkdir()
    layout("byte-level")._backend.save(str(large / "tokenizer.json"))
    words = dict(file["model"]["vocab"]) | {f"w{number}": 1000 + number for number in range(900)}
    file["model"]["vocab"] = words
    (large / "tokenizer.json").write_text(json.dumps(file))
    assert choose_way(large, tmp_path / "few") == "text"


def test_what_cannot_be_matched_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("target", "draft", "empty"):
        (tmp_path / name).mkdir()
    make_tokenizer(tmp_path / "target")
    layout("WordPiece")._backend.save(str(tmp_path / "draft" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"empty has no tokenizer .* copy the draft's there") as caught:
        read_vocabularies(tmp_path / "target", tmp_path / "empty")
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"its decoder is WordPiece"):
        read_vocabularies(tmp_path / "target", tmp_path / "draft")
    # Left to choose, they count as the same, which they are not.
    assert choose_way(tmp_path / "target", tmp_path / "draft") == "same"
    tokenizers = [read_tokenizer(tmp_path / name) for name in ("target", "draft")]
    with pytest.raises(CheckpointError, match="different tokenizers"):
        check_same_tokenizer(*tokenizers)  # type: ignore[arg-type]
