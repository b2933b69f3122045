"""Texts to calibrate with: which rows of which files are samples, which are held out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from trtrun.errors import ConfigError
from trtrun.tokens.text import Tokenizer, read_tokenizer
from trtrun.tools.quantizing.settings import QuantizingSettings, choose_group_size
from trtrun.tools.quantizing.texts import check_texts_file, read_texts

SETTINGS = QuantizingSettings("fp8", samples=20, max_length=8, held_out_samples=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer | None:
    return read_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_the_last_eighth_is_held_out(tmp_path: Path, tokenizer: Tokenizer | None) -> None:
    file = write(tmp_path / "a.jsonl", *({"text": f"text number {index:02}"} for index in range(18)))
    texts = read_texts(file, None, tokenizer, SETTINGS, 260)
    assert (len(texts.samples), len(texts.held_out)) == (16, 2)
    assert all(len(text) == 8 for text in (*texts.samples, *texts.held_out))
    more = write(tmp_path / "b.jsonl", *({"text": f"{index:03} is a text"} for index in range(50)))
    texts = read_texts(more, None, tokenizer, SETTINGS, 260)
    assert tokenizer is not None
    assert [tokenizer.decode(text)[:3] for text in texts.held_out] == ["021", "022"]
    assert tokenizer.decode(texts.samples[-1])[:3] == "019"
    other = read_texts(more, file, tokenizer, SETTINGS, 260)
    assert (len(other.samples), len(other.held_out)) == (20, 3)
    assert other.digest != texts.digest


def test_rows_of_other_fields_and_plain_text(tmp_path: Path, tokenizer: Tokenizer | None) -> None:
    rows = [
        {"article": "of a newspaper"},
        {"prompt": "of prompts"},
        {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]},
        {"token_ids": [6, 7]},
        {"error": "refused", "index": 0},
        {"text": "x"},
    ]
    texts = read_texts(write(tmp_path / "a.jsonl", *rows), None, tokenizer, SETTINGS, 260)
    assert texts.samples[2:] == [(1, 2, 3, 4, 5), (6, 7)] and not texts.held_out
    plain = tmp_path / "plain.txt"
    plain.write_text("0123456789" * 2, encoding="utf-8")
    found = read_texts(plain, None, tokenizer, SETTINGS, 260).samples
    assert [len(text) for text in found] == [8, 8, 4]


def test_what_is_wrong_is_one_line(tmp_path: Path, tokenizer: Tokenizer | None) -> None:
    with pytest.raises(ConfigError, match="--calibration cnn_dailymail: no such file; data sets are not downloaded"):
        check_texts_file(Path("cnn_dailymail"), "--calibration")
    for rows, message in (
        ([{"words": "x"}], "line 1: needs a text"),
        ([{"token_ids": [1, "a"]}], "line 1: token ids must be a list"),
        ([{"token_ids": [1, 260]}], "another vocabulary's: it has token 260"),
        ([{"text": ""}], "has no text of two tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_texts(write(tmp_path / "a.jsonl", *rows), None, tokenizer, SETTINGS, 260)
    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        read_texts(write(tmp_path / "a.jsonl", {"text": "ab"}), None, None, SETTINGS, 260)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        read_texts(tmp_path / "a.txt", None, tokenizer, SETTINGS, 260)


@pytest.mark.parametrize(
    ("bounds", "most", "size"),
    [
        ([4096], 128, 128),
        ([688], 128, 16),
        ([960], 120, 96),
        ([344, 688], 128, 8),
        ([2752, 5504], 128, 64),
        ([48], 40, 24),
    ],
)
def test_a_group_is_of_whole_words_and_fits_the_kernel_where_it_can(bounds: list[int], most: int, size: int) -> None:
    assert choose_group_size(bounds, most, "w") == size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": "int4_awk"}, r"--format: unknown value 'int4_awk' \(did you mean 'int4_awq'\?\)"),
        ({"kv_cache": "fp4"}, "--kv-cache: unknown value"),
        ({"group_size": 12}, "--group-size is 12: it must be a multiple of 8"),
        ({"samples": 0}, "--samples is 0"),
        ({"smoothing": 1.5}, "--smoothing is 1.5"),
        ({"dtype": "float8"}, "--dtype: unknown value"),
        ({"layout": "trtlm"}, r"--layout: unknown value 'trtlm' \(did you mean 'trtllm'\?\)"),
        ({"layout": "trtllm", "format": "int8_sq"}, "--layout trtllm has no --format int8_sq; it has fp8, int4_awq"),
    ],
)
def test_settings_are_checked(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizingSettings(**{"format": "fp8", **wrong})  # type: ignore[arg-type]


def test_half_of_a_surrogate_pair_is_told_of_with_its_line(tmp_path: Path, tokenizer: Tokenizer | None) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a text"}\n{"text": "half \\ud800 of it"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: the text has half of a surrogate pair"):
        read_texts(file, None, tokenizer, SETTINGS, 260)
