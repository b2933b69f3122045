"""A tokenizer.model without a tokenizer.json: read by transformers, and equal to what SentencePiece itself says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from trtrun.errors import CheckpointError
from trtrun.tokens.text import hash_tokenizer_files, read_tokenizer

TEXTS = ["def f(x):\n    return x", "naïve 東京 🦙", "a  b\tc", "one two three", ""]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as Llama 2 has it, with a small vocabulary."""
    import sentencepiece

    path = tmp_path_factory.mktemp("sentencepiece")
    (path / "text.txt").write_text("\n".join(["def one(two):", "    return three", "if four: five = six"] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text.txt"), model_prefix=str(path / "tokenizer"), vocab_size=310, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 310}))
    told = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**told, "unk_token": "<unk>", "legacy": False}))
    return path


def test_tokens_are_sentencepieces(trained: Path) -> None:
    import sentencepiece

    tokenizer = read_tokenizer(trained)
    assert tokenizer is not None and tokenizer.vocab_size == 310
    reference: Any = sentencepiece.SentencePieceProcessor(model_file=str(trained / "tokenizer.model"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == reference.decode(ids) == text
    assert len(hash_tokenizer_files(trained)) == 64


def test_without_its_libraries_it_says_what_to_install(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtrun.tokens import text

    text._convert.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else found(name))
    with pytest.raises(CheckpointError, match=r"of which sentencepiece is missing: pip install 'trtrun\[sentencepiece"):
        read_tokenizer(trained)


def test_a_damaged_file_is_one_line(trained: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((trained / name).read_text())
    (tmp_path / "tokenizer.model").write_bytes(b"no tokenizer")
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model is no tokenizer that transformers can convert"
    ) as told:
        read_tokenizer(tmp_path)
    assert "\n" not in str(told.value)
