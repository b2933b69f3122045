"""Kimi-K2's tiktoken.model and Mistral's tekken.json, without a tokenizer.json: token ids are tiktoken's own."""

from __future__ import annotations

import base64
import inspect
import json
import string
import textwrap
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, trainers

from trtrun.errors import CheckpointError
from trtrun.tokens.decoders.texts import spelled_bytes
from trtrun.tokens.text import Tokenizer, hash_tokenizer_files, read_tokenizer

PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
TEXT = inspect.getsource(textwrap) + "THREE's  五六七八 12345 naïve Été\n\n" * 20
FIRST = 600
ADDED = {FIRST: "[BOS]", FIRST + 1: "[EOS]", FIRST + 5: "<|im_end|>", FIRST + 6: "<|call|>"}
PROGRAM = 'open(f"{mark}", "w")\n\nclass Kimi:\n    # how texts are parted\n    pat_str = {pattern}\n'


def train() -> dict[bytes, int]:
    """Tokens by rank."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    parts = pre_tokenizers.Split(tokenizers.Regex("|".join(PARTS)), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([parts, as_bytes])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=FIRST, initial_alphabet=alphabet))
    ranks = {spelled_bytes(token): rank for token, rank in trained.get_vocab().items()}
    assert len(ranks) == FIRST
    return ranks


def write_tiktoken(path: Path) -> dict[bytes, int]:
    """Write a directory as Kimi-K2 has it, whose program leaves a file if it is run; returns tokens by rank."""
    ranks = train()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (path / "tiktoken.model").write_text("\n".join(lines))
    pattern = "'|'.join([\n" + "".join(f"        {part!r},\n" for part in PARTS) + "    ])"
    (path / "tokenization_kimi.py").write_text(PROGRAM.format(mark=path / "run", pattern=pattern))
    added = {str(number): {"content": name, "special": name != "<|call|>"} for number, name in ADDED.items()}
    auto_map = {"AutoTokenizer": ["tokenization_kimi.Kimi", None]}
    (path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "added_tokens_decoder": added}))
    return ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    path = tmp_path_factory.mktemp("tiktoken")
    ranks = write_tiktoken(path)
    special = {ADDED.get(number, f"<|reserved_token_{number}|>"): number for number in range(FIRST, max(ADDED) + 1)}
    tokenizer = read_tokenizer(path)
    assert tokenizer is not None and not (path / "run").exists(), "nothing that comes with a model is run"
    assert len(hash_tokenizer_files(path)) == 64
    return tokenizer, tiktoken.Encoding("kimi", pat_str="|".join(PARTS), mergeable_ranks=ranks, special_tokens=special)


PIECES = st.sampled_from(
    [*TEXT[-80:].split(" "), *TEXT[:200].split(), *ADDED.values(), *string.printable, "五", "五六", "É", "\u0301", "🦙"]
)


@given(st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=40)))
def test_tokens_are_tiktokens(both: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    tokenizer, reference = both
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, allowed_special="all")
    assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text


def test_special_tokens_are_those_of_the_configuration(both: tuple[Tokenizer, tiktoken.Encoding]) -> None:
    tokenizer, _ = both
    assert tokenizer.vocab_size == FIRST + 7
    ids = tokenizer.encode("one<|im_end|><|call|>")
    assert ids[-2:] == [FIRST + 5, FIRST + 6] and tokenizer.decode(ids) == "one<|call|>"


def write_tekken(path: Path, **changes: object) -> dict[bytes, int]:
    """Write a directory as Mistral has it, with more tokens than there are ids for, as in its own; returns tokens by
    rank."""
    ranks = train()
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    vocab.sort(key=lambda token: token["rank"])
    told = {"pattern": "|".join(PARTS), "default_vocab_size": 30 + 500, "default_num_special_tokens": 30}
    values = {"config": told, "vocab": vocab, **changes}
    (path / "tekken.json").write_text(json.dumps(values))
    return {token: rank for token, rank in ranks.items() if rank < 500}


@given(st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=40)))
def test_mistrals_tokens_are_tiktokens_behind_special_ones(
    tekken: tuple[Tokenizer, tiktoken.Encoding], text: str
) -> None:
    tokenizer, reference = tekken
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [30 + token for token in reference.encode(text)]
    assert tokenizer.encode(text) == [1, *ids] and tokenizer.decode([1, *ids]) == text


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    path = tmp_path_factory.mktemp("tekken")
    ranks = write_tekken(path)
    tokenizer = read_tokenizer(path)
    assert tokenizer is not None
    return tokenizer, tiktoken.Encoding("tekken", pat_str="|".join(PARTS), mergeable_ranks=ranks, special_tokens={})


def test_mistrals_special_tokens(tekken: tuple[Tokenizer, tiktoken.Encoding], tmp_path: Path) -> None:
    """Old files do not say which they are, newer ones do."""
    old, _ = tekken
    assert old.encode("[INST]<SPECIAL_29></s>", add_special_tokens=False) == [3, 29, 2]
    write_tekken(tmp_path, special_tokens=[{"rank": 4, "token_str": "[THINK]", "is_control": True}])
    new = read_tokenizer(tmp_path)
    assert new is not None and new.encode("[THINK]<SPECIAL_3>") == [4, 3] and new.vocab_size == old.vocab_size == 530
    assert new.decode([4, 3]) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab": [{"rank": 0, "token_bytes": "!"}]}, "no tokens that can be read"),
        ({"vocab": [{"rank": 1, "token_bytes": "YQ=="}]}, "ids of its tokens are not 0, 1, 2"),
        ({"vocab": 3}, "no tokens that can be read"),
        ({"vocab": [{"rank": 0, "token_bytes": "YWFh" * 1_000_000}]}, "a token has more than 1024 bytes"),
        ({"vocab": []}, "ids of its tokens are not 0, 1, 2"),
        ({"special_tokens": [{"rank": 30, "token_str": "x"}]}, "ids of its tokens are not 0, 1, 2"),
        ({"special_tokens": [{"rank": 2, "token_str": "<SPECIAL_3>"}]}, "ids of its tokens are not 0, 1, 2"),
        ({"config": {"pattern": "[", "default_vocab_size": 530, "default_num_special_tokens": 30}}, "cannot be made"),
        ({"config": {"pattern": "a", "default_vocab_size": 530, "default_num_special_tokens": 1 << 40}}, "ids of its"),
    ],
)
def test_a_damaged_tekken_is_one_line(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    write_tekken(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("tiktoken.model", " 7\n", " 8\n", "ranks are not 0, 1, 2"),
        ("tiktoken.model", " 7\n", " x\n", "no tokens that can be read"),
        ("tiktoken.model", "=", "!", "no tokens that can be read"),
        (
            "tokenization_kimi.py",
            "pat_str",
            "pattern",
            r"no tokenization_kimi.py that says .* \(pat_str",
        ),
        ("tokenization_kimi.py", "'|'.join([", "make([", "that says how text is parted"),
        ("tokenization_kimi.py", "'|'.join([", "'|' + str([", "that says how text is parted"),
        ("tokenization_kimi.py", "+',\n", "+' + more,\n", "that says how text is parted"),
        ("tokenization_kimi.py", "class", "'''class", "that says how text is parted"),
        ("tokenization_kimi.py", "[\\\\p{Han}]+", "[", "cannot be made a tokenizer of"),
        ("tokenizer_config.json", "tokenization_kimi.", "../secret.", "no secret.py that says"),
        ("tokenizer_config.json", '"601"', '"200"', "ids of added tokens are not those behind"),
        ("tokenizer_config.json", '"601"', '"99999999"', "ids of added tokens are not those behind"),
        ("tokenizer_config.json", "[EOS]", "d", "has another id, too"),
        ("tokenizer_config.json", "{", "[", "does not tell added tokens"),
    ],
)
def test_a_damaged_directory_is_one_line(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    write_tiktoken(tmp_path)
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=said) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_its_program_it_says_what_is_missing(tmp_path: Path) -> None:
    write_tiktoken(tmp_path)
    (tmp_path / "tokenization_kimi.py").unlink()
    with pytest.raises(CheckpointError, match="copy all files of the checkpoint"):
        read_tokenizer(tmp_path)
