"""Tokenizer, growing text, and the check that target and draft share a tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import tokenizers
from checkpoints import make_checkpoint, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trtrun.errors import CheckpointError
from trtrun.guiding.grammars import Spelling
from trtrun.tokens.detokenizer import IncrementalDetokenizer
from trtrun.tokens.text import Tokenizer, check_same_tokenizer, read_tokenizer

TEXT = "def naïve(x): # 東京 🦙🏽 \n\treturn 'é'\u200d"


def byte_tokenizer(path: Path, **options: object) -> Tokenizer:
    path.mkdir(parents=True, exist_ok=True)
    make_tokenizer(path, **options)  # type: ignore[arg-type]
    tokenizer = read_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """Like Llama 2's: words begin with ▁, unknown characters fall back to bytes."""
    from tokenizers import decoders, models, pre_tokenizers

    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁b"]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[("▁", "a"), ("▁", "b")])
    model.byte_fallback = True
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    tokenizer = read_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def whole_text(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.append(token) for token in ids]) + detokenizer.flush()


def test_encode_decode_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_checkpoint(tmp_path, tokenizer=True)
    tokenizer = byte_tokenizer(tmp_path, merges=20, add_bos=True)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(TEXT + "abab")
    assert ids == reference(TEXT + "abab").input_ids
    assert ids[0] == 0 and tokenizer.encode("a", add_special_tokens=False)[0] != 0
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == TEXT + "abab"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|endoftext|>")
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.decode([*ids, 99999]) == TEXT + "abab"  # a padded vocabulary's id has no text


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"has vocab\.json but no tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer that can be read \(") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None and len(tokenizer.encode("abcdef")) == 6 and len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("prompt", ["", "x", "東"])
def test_growing_text_adds_up_and_never_shows_half_a_character(tmp_path: Path, prompt: str) -> None:
    tokenizer = byte_tokenizer(tmp_path, merges=5)
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(TEXT)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    pieces = [detokenizer.append(token) for token in ids]
    assert "".join(pieces) == TEXT and detokenizer.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces)


def test_unfinished_character_comes_out_at_the_end_only(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    ids = tokenizer.encode("a🦙")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_left_out_or_kept(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, special=("<think>",))
    ids = [*tokenizer.encode("a"), 1, *[0] * 30, *tokenizer.encode("b")]
    without, kept = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert whole_text(without, ids) == "ab"
    assert whole_text(kept, ids) == "a<think>" + "<|endoftext|>" * 30 + "b"


def test_first_word_keeps_its_space_behind_a_prompt(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path)
    ids = tokenizer.encode("a b é東 a")
    assert whole_text(IncrementalDetokenizer(tokenizer), ids) == "a b é東 a"
    # Behind bytes too, however many, and behind such that make no character.
    for prompt in ("b a", "👍", "👍👍", "你好", "b 你好你好"):
        assert whole_text(IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt)), ids) == " a b é東 a"
    assert whole_text(IncrementalDetokenizer(tokenizer, tokenizer.encode("你好")[:-1]), ids) == " a b é東 a"


def test_where_output_changes_the_prompts_last_characters_the_text_is_what_follows_the_rest(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path / "fallback")
    for each in (tokenizer, byte_tokenizer(tmp_path / "bytes")):
        torn = each.encode("b東")
        assert whole_text(IncrementalDetokenizer(each, torn[:-1]), torn[-1:]) == "東"
    # Bytes are all UTF-8 or none, so that a wrong one unmakes the character before it, in prompt and output.
    wrong = tokenizer.vocabulary()["<0xFF>"]
    assert tokenizer.decode([*tokenizer.encode("b東"), wrong]) == "b" + "\ufffd" * 4
    assert whole_text(IncrementalDetokenizer(tokenizer, tokenizer.encode("b東")), [wrong]) == "\ufffd" * 4
    pieces = IncrementalDetokenizer(tokenizer, tokenizer.encode("b"))
    *before, space = [*tokenizer.encode("東")[-3:], wrong, tokenizer.encode(" a")[-1]]
    assert [pieces.append(token) for token in before] == [""] * 4
    assert pieces.append(space).startswith("\ufffd" * 4)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 256), max_size=80))
def test_any_bytes_add_up_to_the_whole_text(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    tokenizer = byte_tokenizer(path)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert whole_text(detokenizer, ids) == tokenizer.decode(ids)


@settings(max_examples=80, deadline=None)
@given(
    rounds=st.lists(st.lists(st.integers(0, 290), max_size=6), max_size=20),
    text=st.lists(st.sampled_from(["ab", "東", "🦙", " é", "\ufffd"]), max_size=8),
    prompt=st.lists(st.integers(0, 290), max_size=6),
    skips=st.booleans(),
)
def test_a_table_of_tokens_gives_the_text_of_the_steps(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]], text: list[str], prompt: list[int], skips: bool
) -> None:
    """Whatever a round brings: parts of characters, special tokens, ids without a token."""
    path = tmp_path_factory.getbasetemp() / "table"
    tokenizer = byte_tokenizer(path, merges=20, special=("<think>",))
    rounds = [*rounds, *map(tokenizer.encode, text)]
    table, steps, single = (IncrementalDetokenizer(tokenizer, prompt, skips) for _ in range(3))
    steps._own_texts = defaultdict(str)
    for ids in rounds:
        expected = "".join([steps.append(token) for token in ids])
        assert table.extend(ids) == expected == "".join([single.append(token) for token in ids])
    assert table.flush() == steps.flush() == single.flush()


def test_different_tokenizers_are_named_by_the_first_token(tmp_path: Path) -> None:
    target = byte_tokenizer(tmp_path / "target", merges=10)
    check_same_tokenizer(target, byte_tokenizer(tmp_path / "same", merges=10))
    with pytest.raises(CheckpointError, match=r"token 265 is 'ij' in .*target but missing in .*draft"):
        check_same_tokenizer(target, byte_tokenizer(tmp_path / "draft", merges=8))
    changed = byte_tokenizer(tmp_path / "other", merges=10)
    file = json.loads((tmp_path / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = file["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    changed = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(file)), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"token 1 is '!' in .* but '#' in"):
        check_same_tokenizer(target, changed)


def test_an_absurd_id_is_not_counted_up_to(tmp_path: Path) -> None:
    """What a guide reads is the file, as it lies there: written anew it would have a line for each id."""
    byte_tokenizer(tmp_path, merges=10)
    file = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    file["model"]["vocab"]["ij"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(file, indent=1), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.encode("ij")[-1] == 2**31
    assert tokenizer.as_json() == json.dumps(file, indent=1)
    assert Spelling.of(tokenizer, 300, (0,)).read().vocab_size == 300


def test_a_guide_reads_texts_of_any_length_whatever_the_file_asks_for(tmp_path: Path) -> None:
    whole = byte_tokenizer(tmp_path, merges=10).encode("abcdefgh", False)
    file = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    filled = {"direction": "Right", "strategy": {"Fixed": 90}, "pad_to_multiple_of": None, "pad_token": "a"}
    filled |= {"pad_id": 0, "pad_type_id": 0}
    for lengths in ({"truncation": cut}, {"padding": filled}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(file | lengths), encoding="utf-8")
        tokenizer = read_tokenizer(tmp_path)
        assert tokenizer is not None
        assert Spelling.of(tokenizer, 300, (0,)).read().tokenize_str("abcdefgh") == whole


def test_tokens_of_one_file_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_tokenizer(tmp_path / "target", merges=10)
    shutil.copytree(tmp_path / "target", tmp_path / "draft")
    byte_tokenizer(tmp_path / "other", merges=8)
    target, draft, other = (read_tokenizer(tmp_path / name) for name in ("target", "draft", "other"))
    assert target is not None and draft is not None and other is not None
    compared: list[Path] = []

    def vocabulary(self: Tokenizer) -> dict[str, int]:
        compared.append(self.path)
        return {"a": 0}

    monkeypatch.setattr(Tokenizer, "vocabulary", vocabulary)
    check_same_tokenizer(target, draft)
    assert not compared
    check_same_tokenizer(target, other)
    assert compared == [target.path, other.path]


def test_bad_words_with_and_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, merges=3, add_bos=True)
    plain, spaced = tokenizer.encode("ab", False), tokenizer.encode(" ab", False)
    assert tokenizer.bad_word_ids(["ab", "ab"]) == (tuple(plain), tuple(spaced))
    assert all(0 not in ids for ids in tokenizer.bad_word_ids(["ab"]))


@pytest.mark.parametrize("is_inside", [False, True])
def test_how_long_a_tokens_text_may_be_is_known_where_nothing_can_be_left_out(tmp_path: Path, is_inside: bool) -> None:
    from tokenizers import pre_tokenizers as kinds

    made = {
        "BertPreTokenizer": [kinds.BertPreTokenizer()],
        "ByteLevel": [kinds.ByteLevel(), kinds.ByteLevel(add_prefix_space=False, use_regex=False)],
        "CharDelimiterSplit": [kinds.CharDelimiterSplit("b")],
        "Digits": [kinds.Digits(), kinds.Digits(individual_digits=True)],
        "FixedLength": [kinds.FixedLength(2)],
        "Metaspace": [kinds.Metaspace()],
        "Punctuation": [kinds.Punctuation(), kinds.Punctuation("removed")],
        "Split": [kinds.Split(" ", "isolated"), kinds.Split(" ", "removed")],
        "UnicodeScripts": [kinds.UnicodeScripts()],
        "Whitespace": [kinds.Whitespace()],
        "WhitespaceSplit": [kinds.WhitespaceSplit()],
    }
    bases = {"PreTokenizer", "Sequence"}
    assert made.keys() == {name for name in dir(kinds) if name[0].isupper()} - bases, "the library has a new one"
    backend = copy.deepcopy(byte_tokenizer(tmp_path)._backend)  # that one is shared by all who read the file
    text = "a b,c  12é東"
    for kind in [kind for alike in made.values() for kind in alike]:
        places = {place for _, (begin, end) in kind.pre_tokenize_str(text) for place in range(begin, end)}
        backend.pre_tokenizer = kinds.Sequence([kind, kinds.ByteLevel()]) if is_inside else kind
        is_known = Tokenizer(backend, tmp_path).most_bytes_of_a_token is not None
        assert is_known == (len(places) == len(text)), kind
