"""A file of texts as tokens: examples of answers, for drafting methods that look texts up; and the rows of JSON lines
that trtrun itself writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy

from trtrun.errors import ConfigError, shorten, wrap_errors
from trtrun.tokens.text import Tokenizer, read_tokenizer


def read_json_row(line: str | bytes, where: str) -> dict[str, Any] | None:
    """The row, whatever it holds; None for one that was refused.

    Args:
        line: JSON.
        where: file and line, for errors.

    Raises:
        ConfigError: it is no JSON, or no object.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {shorten(str(error))}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be an object, not {shorten(row)}")
    return None if row.get("error") is not None else row


def are_token_ids(value: object) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and all(type(token) is int for token in value)


SEPARATOR = -1
"""Stands behind each text."""

_KINDS = (".jsonl", ".txt")
_MOST_BYTES_OF_A_LINE = 1 << 26
_BYTES_AT_A_TIME = 1 << 16


def read_corpus(path: Path, tokenizer: Path, vocab_size: int, most_tokens: int) -> numpy.ndarray:
    """The texts of a file, one behind the other, each with a separator behind it; cut off at `most_tokens`.

    Args:
        path: JSON lines (.jsonl), each with a prompt (`prompt_token_ids` or `prompt`), its completion (`token_ids` or
            `text`) or both, as `trtrun run` and `trtrun generate-data` write them: of several completions the first;
            rows that were refused are passed over. Or one plain text (.txt), UTF-8.
        tokenizer: directory of the target's tokenizer, for texts that are no tokens yet.
        vocab_size: of the target; no token may be outside it.
        most_tokens: that are kept, separators among them.

    Returns:
        [tokens] int32.

    Raises:
        ConfigError: the file cannot be read, holds something else, or is another vocabulary's; one line.
    """
    where = f"speculation.suffix_corpus: {path}"
    if path.suffix not in _KINDS:
        raise ConfigError(f"{where}: give JSON lines, in a file that ends in .jsonl, or text, in one that ends in .txt")
    parts: list[numpy.ndarray] = []
    count = 0
    with wrap_errors(where, ConfigError), open(path, "rb") as file:
        speller = _Speller(tokenizer, where)
        for tokens in _read_rows(file, speller, where) if path.suffix == ".jsonl" else _read_text(file, speller, where):
            foreign = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if foreign is not None:
                raise ConfigError(
                    f"{where} is another vocabulary's: it holds token {foreign}, and the target has tokens 0 to "
                    f"{vocab_size - 1}"
                )
            ended = (*tokens, SEPARATOR) if path.suffix == ".jsonl" else tokens
            parts.append(numpy.array(ended, dtype=numpy.int32))
            count += len(ended)
            if count >= most_tokens:
                break
    if count <= len(parts):
        raise ConfigError(f"{where} holds no text: name another file, or leave the key out")
    return numpy.concatenate(parts)[:most_tokens]


class _Speller:
    """Makes tokens of texts, with a tokenizer that is read where there is a text."""

    def __init__(self, directory: Path, where: str) -> None:
        self._directory = directory
        self._where = where
        self._tokenizer: Tokenizer | None = None

    def __call__(self, text: str, is_start: bool) -> list[int]:
        """The tokens of `text`; with those that a text begins with where `is_start`."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._directory)
        if self._tokenizer is None:
            raise ConfigError(
                f"{self._where} holds text, and {self._directory} has no tokenizer: name one with the key 'tokenizer', "
                "or give rows of token_ids"
            )
        return self._tokenizer.encode(text, add_special_tokens=is_start)


def _read_text(file: IO[bytes], spell: _Speller, where: str) -> Iterator[list[int]]:
    """A text in pieces that end with lines: the bound may be far from its end."""
    is_start = True
    while lines := file.readlines(_BYTES_AT_A_TIME):
        yield spell(_decode(b"".join(lines), where), is_start)
        is_start = False


def _read_rows(file: IO[bytes], spell: _Speller, where: str) -> Iterator[list[int]]:
    number = 0
    while line := file.readline(_MOST_BYTES_OF_A_LINE):
        number += 1
        if line.strip():
            tokens = _read_row(_decode(line, f"{where}, line {number}"), spell, f"{where}, line {number}")
            if tokens:
                yield tokens


def _read_row(line: str, spell: _Speller, where: str) -> list[int]:
    """A row's tokens; none of one that was refused."""
    row = read_json_row(line, where)
    if row is None:
        return []
    found: list[int] | None = None
    for of_tokens, of_text in (("prompt_token_ids", "prompt"), ("token_ids", "text")):
        tokens, text = row.get(of_tokens), row.get(of_text)
        if tokens is not None:
            if not are_token_ids(tokens):
                raise ConfigError(f"{where}: '{of_tokens}' must be a list of token ids, not {shorten(tokens)}")
            found = [*(found or ()), *tokens]
        elif text is not None:
            if not isinstance(text, str):
                raise ConfigError(f"{where}: '{of_text}' must be a text, not {shorten(text)}")
            found = [*(found or ()), *spell(text, is_start=not found)]
    if found is None:
        raise ConfigError(f"{where}: needs 'prompt_token_ids' or 'prompt', 'token_ids' or 'text', or one of each")
    return found


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: it is not UTF-8 text") from None
