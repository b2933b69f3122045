"""Requests of a benchmark: trtllm-bench's JSON lines and gptManagerBenchmark's file, read; synthetic ones, made.

It knows these formats, and no model: tokens are numbers, and texts stay texts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trtrun.errors import ConfigError, why_unreadable


@dataclass(frozen=True)
class BenchRequest:
    """One request of a dataset.

    Attributes:
        task_id: its number there.
        prompt: a text, or token ids.
        output_tokens: how many are generated.
    """

    task_id: int
    prompt: str | tuple[int, ...]
    output_tokens: int


def read_dataset(path: Path, most: int = 0) -> list[BenchRequest]:
    """The requests of a file.

    Args:
        path: JSON lines with `input_ids` (or `logits`) or `prompt`, `output_tokens` and `task_id`; or one object with
            `samples`, each with `input_ids` or `input`, `output_len` and `task_id`.
        most: so many of them, from the first; 0 is all.

    Raises:
        ConfigError: it cannot be read, a request is not one, or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: cannot read {path}: {why_unreadable(error)}") from None
    samples = _whole_file(text)
    found: list[tuple[int, Any]] = list(enumerate(samples, 1)) if samples is not None else list(_lines(path, text))
    requests = [_read(path, number, fields) for number, fields in (found[:most] if most > 0 else found)]
    if not requests:
        raise ConfigError(f"--dataset: {path} has no request")
    return requests


def _whole_file(text: str) -> Sequence[Any] | None:
    """The samples of gptManagerBenchmark's file; None where the file is not one."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    samples = whole.get("samples") if isinstance(whole, dict) else None
    return samples if isinstance(samples, list) else None


def _lines(path: Path, text: str) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                _refuse(path, number, "is no JSON")


def _read(path: Path, number: int, fields: Any) -> BenchRequest:
    if not isinstance(fields, Mapping):
        _refuse(path, number, "is no object")
    if fields.get("lora_request") is not None:
        _refuse(path, number, "has a lora_request, which is not supported")
    ids = next((fields[name] for name in ("input_ids", "logits") if fields.get(name) is not None), None)
    text = next((fields[name] for name in ("prompt", "input") if fields.get(name) is not None), None)
    if ids is None and isinstance(text, list):
        ids = text
    output = fields.get("output_tokens", fields.get("output_len"))
    task = fields.get("task_id", number - 1)
    if type(output) is not int or output < 1:
        _refuse(path, number, "needs output_tokens, 1 or more")
    if type(task) is not int:
        _refuse(path, number, "needs a whole number as task_id")
    if ids is None:
        if not isinstance(text, str):
            _refuse(path, number, "needs input_ids or prompt")
        return BenchRequest(task, text, output)
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        _refuse(path, number, "needs token ids in input_ids")
    return BenchRequest(task, tuple(ids), output)


def _refuse(path: Path, number: int, reason: str) -> NoReturn:
    raise ConfigError(f"--dataset: request {number} of {path} {reason}")


def normal_lengths(mean: float, deviation: float, count: int, seed: int) -> list[int]:
    """Lengths of a normal distribution, rounded up, 1 or more; for a seed those of NVIDIA's script."""
    drawn = np.random.RandomState(seed).normal(mean, deviation, count)
    return [max(1, math.ceil(length)) for length in drawn]


def uniform_lengths(least: int, most: int, count: int, seed: int) -> list[int]:
    """Lengths from `least` to `most`; for a seed those of NVIDIA's script."""
    return [int(length) for length in np.random.default_rng(seed).integers(least, most + 1, count)]


def random_requests(
    lengths: Sequence[tuple[int, int]], vocabulary: int, ends: Collection[int], seed: int
) -> list[BenchRequest]:
    """Requests of random tokens.

    Args:
        lengths: of the prompt and the output of each.
        vocabulary: tokens of the model.
        ends: those that end a text, which no prompt has.
        seed: of the tokens.
    """
    generator = random.Random(seed)
    tokens = [token for token in range(vocabulary) if token not in ends]
    return [
        BenchRequest(number, tuple(generator.choices(tokens, k=prompt)), output)
        for number, (prompt, output) in enumerate(lengths)
    ]


def as_lines(requests: Iterable[BenchRequest]) -> str:
    """JSON lines of requests of tokens, as trtllm-bench reads them."""
    rows = (
        {"task_id": request.task_id, "input_ids": list(request.prompt), "output_tokens": request.output_tokens}
        for request in requests
    )
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
