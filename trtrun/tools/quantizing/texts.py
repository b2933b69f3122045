"""Texts to calibrate and to measure with, as tokens: a file of JSON lines, or of plain text.

It knows files and a tokenizer. It does not know models. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtrun.errors import ConfigError, shorten, shorten_path, wrap_errors
from trtrun.tokens.corpus import are_token_ids, read_json_row
from trtrun.tokens.text import Tokenizer
from trtrun.tools.quantizing.settings import QuantizingSettings

TEXT_KEYS = ("text", "article", "prompt")
"""Keys of a row, the first of which that is there counts; `article` is what cnn_dailymail has."""

HELD_OUT_SHARE = 8
"""One text in so many is measured on, where there is no file for that."""

_CHARACTERS_OF_A_TOKEN = 64
"""Characters that are read of a long text for each token that is wanted, at most."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class CalibrationTexts:
    """Texts as tokens, two each at least.

    Attributes:
        samples: to calibrate with.
        held_out: to measure on, none of which is a sample.
        digest: SHA-256 of all their tokens.
    """

    samples: Sequence[Tokens] = ()
    held_out: Sequence[Tokens] = ()
    digest: str = ""


def check_texts_file(path: Path, option: str) -> None:
    """Raise ConfigError for what is no file, such as the name of a data set."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise ConfigError(f"{option} {shorten_path(path)}: {error.strerror}") from None
    if not is_file:
        raise ConfigError(
            f"{option} {shorten_path(path)}: no such file; data sets are not downloaded: save texts as JSON lines such "
            'as {"text": "…"}, and name that file'
        )


def read_texts(
    calibration: Path | None,
    held_out: Path | None,
    tokenizer: Tokenizer | None,
    settings: QuantizingSettings,
    vocab_size: int,
) -> CalibrationTexts:
    """Read texts, in the order of their files; those of fewer than two tokens are left out.

    Args:
        calibration: the file of samples; without one there are none.
        held_out: the file to measure on; without one it is a share of the other, its last texts.
        tokenizer: the model's; rows of token ids do without one.
        settings: how many texts, and how long.
        vocab_size: of the model; no token may be outside it.

    Raises:
        ConfigError: a file cannot be read, has no text, or is another vocabulary's.
    """
    most_held_out = settings.held_out_samples
    samples: list[Tokens] = []
    measured: list[Tokens] = []
    if held_out is not None and most_held_out:
        measured = _read(held_out, tokenizer, settings.max_length, most_held_out, vocab_size)
    if calibration is not None:
        more = 0 if held_out is not None else most_held_out
        samples = _read(calibration, tokenizer, settings.max_length, settings.samples + more, vocab_size)
        if held_out is None:
            kept = len(samples) - min(most_held_out, len(samples) // HELD_OUT_SHARE)
            measured = samples[kept:]
            samples = samples[:kept]
        samples = samples[: settings.samples]
    digest = hashlib.sha256(repr((samples, measured)).encode()).hexdigest()
    return CalibrationTexts(samples, measured, digest)


def _read(path: Path, tokenizer: Tokenizer | None, max_length: int, most: int, vocab_size: int) -> list[Tokens]:
    found: list[Tokens] = []
    with wrap_errors(f"the file of texts {shorten_path(path)}", ConfigError):
        rows = _json_rows(path, tokenizer, max_length) if path.suffix == ".jsonl" else _pieces(path, tokenizer)
        for tokens in rows:
            for start in range(0, len(tokens), max_length) if path.suffix != ".jsonl" else (0,):
                piece = tuple(tokens[start : start + max_length])
                if len(piece) > 1:
                    _check_vocabulary(path, piece, vocab_size)
                    found.append(piece)
                if len(found) == most:
                    return found
    if not found:
        raise ConfigError(f"{shorten_path(path)} has no text of two tokens or more")
    return found


def _json_rows(path: Path, tokenizer: Tokenizer | None, max_length: int) -> Iterator[Sequence[int]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{shorten_path(path)}, line {number}"
            row = read_json_row(line, where) if line.strip() else None
            if row is None:
                continue
            ids = row.get("prompt_token_ids", row.get("token_ids"))
            if ids is not None:
                if not are_token_ids(ids):
                    raise ConfigError(f"{where}: token ids must be a list of whole numbers, not {shorten(ids)}")
                answer = row.get("token_ids", []) if "prompt_token_ids" in row else []
                yield [*ids, *(answer if are_token_ids(answer) else [])]
                continue
            text = next((row[key] for key in TEXT_KEYS if key in row), None)
            if not isinstance(text, str):
                raise ConfigError(f'{where}: needs a text, as {{"text": "…"}}, or token_ids')
            text = text[: max_length * _CHARACTERS_OF_A_TOKEN]
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{where}: the text has half of a surrogate pair, which is no character") from None
            yield _tokenizer(tokenizer, path).encode(text)


def _pieces(path: Path, tokenizer: Tokenizer | None) -> Iterator[Sequence[int]]:
    """The whole text of a file of another kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{shorten_path(path)} is no text in UTF-8") from None
    yield _tokenizer(tokenizer, path).encode(text)


def _tokenizer(tokenizer: Tokenizer | None, path: Path) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(
            f"the model has no tokenizer.json, and {shorten_path(path)} has texts: give rows of token_ids, or copy the "
            "tokenizer to the model"
        )
    return tokenizer


def _check_vocabulary(path: Path, tokens: Tokens, vocab_size: int) -> None:
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ConfigError(
            f"{shorten_path(path)} is another vocabulary's: it has token {max(tokens)}, and the model has tokens 0 to "
            f"{vocab_size - 1}"
        )
