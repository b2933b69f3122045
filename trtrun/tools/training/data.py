"""Rows of training data: prompts and what the target made of them, as `trtrun generate-data` writes them.

It knows the format of a row, and the order in which rows are trained on. It does not know models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy

from trtrun.errors import ConfigError, wrap_errors
from trtrun.tokens.corpus import are_token_ids, read_json_row


@dataclass(frozen=True)
class DataRow:
    """A prompt and its completion.

    Attributes:
        tokens: of both.
        prompt_length: how many are the prompt's.
        is_greedy: whether each token of the completion is the target's first choice.
        number: of its line in its file, counted from 1.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    is_greedy: bool
    number: int


@dataclass(frozen=True)
class TrainingData:
    """The rows of some files.

    Attributes:
        rows: to train on.
        heldout: kept out of it.
        digest: SHA-256 of the files.
        num_left_out: rows of the files that neither has: refused ones, and prompts without a completion in the length.
    """

    rows: Sequence[DataRow]
    heldout: Sequence[DataRow]
    digest: str
    num_left_out: int


def read_data(paths: Sequence[Path], max_length: int, heldout_rows: int, vocab_size: int, seed: int) -> TrainingData:
    """Read files of rows; those that were refused, or have no completion within `max_length`, are left out.

    Args:
        paths: JSON lines with `prompt_token_ids`, `token_ids` and `temperature`.
        max_length: tokens of a row, at most.
        heldout_rows: rows to keep out of training, chosen by `seed`.
        vocab_size: of the target; no token may be outside it.
        seed: of that choice.

    Raises:
        ConfigError: a file cannot be read or is another vocabulary's, or there is no row to train on.
    """
    rows: list[DataRow] = []
    num_left_out = 0
    digest = hashlib.sha256()
    for path in paths:
        with wrap_errors(f"the data file {path}", ConfigError), open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if not line.strip():
                    continue
                row = _read_row(path, number, line, max_length)
                if row is None:
                    num_left_out += 1
                    continue
                _check_vocabulary(path, row, vocab_size)
                rows.append(row)
    names = ", ".join(map(str, paths))
    if not rows:
        raise ConfigError(f"{names}: no row to train on; make some with trtrun generate-data")
    if heldout_rows >= len(rows):
        raise ConfigError(
            f"--heldout-rows is {heldout_rows}, but {names} has {len(rows)} rows: hold fewer out, or make more data"
        )
    order = numpy.random.default_rng([seed, 0]).permutation(len(rows))
    heldout = [rows[index] for index in sorted(order[:heldout_rows])]
    trained = [rows[index] for index in sorted(order[heldout_rows:])]
    return TrainingData(trained, heldout, digest.hexdigest(), num_left_out)


def _check_vocabulary(path: Path, row: DataRow, vocab_size: int) -> None:
    if not 0 <= min(row.tokens) <= max(row.tokens) < vocab_size:
        raise ConfigError(
            f"the data file {path} is another vocabulary's: line {row.number} holds token {max(row.tokens)}, and the "
            f"target has tokens 0 to {vocab_size - 1}; make the data with this target"
        )


def _read_row(path: Path, number: int, line: bytes, max_length: int) -> DataRow | None:
    """A line's row; None for one without a completion."""
    where = f"the data file {path}, line {number}"
    values = read_json_row(line, where)
    if values is None:
        return None
    for key in ("prompt_token_ids", "token_ids"):
        if not are_token_ids(values.get(key)):
            raise ConfigError(f"{where}: needs a list of token ids '{key}': make the data with trtrun generate-data")
    temperature = values.get("temperature")
    if not isinstance(temperature, int | float):
        raise ConfigError(f"{where}: needs the 'temperature' that it was made at, 0 for greedy")
    prompt, completion = values["prompt_token_ids"], values["token_ids"]
    if not prompt or not completion or len(prompt) >= max_length:
        return None
    return DataRow(tuple([*prompt, *completion][:max_length]), len(prompt), temperature == 0, number)


def batch_indexes(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Indexes of the rows of one step: each pass over the data takes every row once, in an order of its own.

    A function of its arguments alone, so that a resumed run goes on with the same rows, and all ranks agree.
    """
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(num_rows, place // num_rows, seed)[place % num_rows]) for place in places]


@lru_cache(maxsize=4)
def _order(num_rows: int, epoch: int, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng([seed, 1, epoch]).permutation(num_rows)
