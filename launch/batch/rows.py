"""Rows of JSON lines: prompts with their sampling parameters in, completions with their figures out.

It knows the format of the rows. It does not know where finished rows are kept (journal.py) or how prompts are
completed. A row that is wrong becomes a refused row with its reason; the others go on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trtrun.core import SamplingParams
from trtrun.errors import ConfigError, InvalidRequestError, nearest
from trtrun.outputs import CompletionOutput, RequestOutput

PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class PromptRow:
    """One input row.

    Attributes:
        index: place in the input, counted from 0; empty lines do not count.
        prompt: text or token ids; None when the row is refused.
        sampling: None when the row is refused.
        input_hash: of the input row and the defaults that it takes; tells at --resume whether the input is the same.
        error: why the row is refused, else None.
    """

    index: int
    prompt: str | tuple[int, ...] | None
    sampling: SamplingParams | None
    input_hash: str
    error: str | None = None


def input_hash(values: object) -> str:
    """64 bits of the SHA-256 of a value's canonical JSON (sorted keys, no spaces, ASCII), as 16 hexadecimal digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def all_rows(prompts: Sequence[str], prompts_file: Path | None, defaults: Mapping[str, object]) -> list[PromptRow]:
    """All input rows, those of the command line first.

    Raises:
        ConfigError: no prompt at all, or the file cannot be read.
        InvalidRequestError: a default is outside its range.
    """
    rows = rows_from_prompts(prompts, defaults)
    if prompts_file is not None:
        rows += rows_from_file(prompts_file, defaults, start=len(rows))
    if not rows:
        raise ConfigError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")
    return rows


def rows_from_prompts(prompts: Sequence[str], defaults: Mapping[str, object], start: int = 0) -> list[PromptRow]:
    """Rows of prompts from the command line.

    Raises:
        InvalidRequestError: a default is outside its range; nothing could run with it.
    """
    sampling = SamplingParams.from_mapping(defaults)
    return [
        PromptRow(start + place, prompt, sampling, input_hash({**defaults, "prompt": prompt}))
        for place, prompt in enumerate(prompts)
    ]


def rows_from_file(path: Path, defaults: Mapping[str, object], start: int = 0) -> list[PromptRow]:
    """Rows of a JSON lines file: `{"prompt": "…"}` or `{"prompt_token_ids": […]}` and any sampling parameter.

    Args:
        path: the file.
        defaults: sampling parameters for rows that do not name them.
        start: index of the first row.

    Raises:
        ConfigError: the file cannot be read, or has no row.
        InvalidRequestError: a default is outside its range.
    """
    SamplingParams.from_mapping(defaults)
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"the prompts file {path} is not a file: it is read more than once, so write the rows to a file first"
        )
    try:
        # Only "\n" ends a row: other Unicode line ends may stand inside a JSON string.
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the prompts file {path}: {reason}") from None
    if not lines:
        raise ConfigError(f'the prompts file {path} has no rows: write one {{"prompt": "…"}} a line')
    return [_parse_row(start + place, line, defaults) for place, line in enumerate(lines)]


def _parse_row(index: int, line: str, defaults: Mapping[str, object]) -> PromptRow:
    try:
        values = json.loads(line)
    except ValueError as error:
        return PromptRow(index, None, None, input_hash(line), f"not a valid row: {' '.join(str(error).split())}")
    digest = input_hash({**defaults, **values} if isinstance(values, dict) else values)
    try:
        if not isinstance(values, dict):
            raise InvalidRequestError('a row must be an object such as {"prompt": "…"}')
        known = [*PROMPT_KEYS, *(item.name for item in fields(SamplingParams))]
        for name in values:
            if name not in known:
                raise InvalidRequestError(f"unknown key '{name}'{nearest(name, known)}")
        prompt = _parse_prompt({name: values.pop(name) for name in PROMPT_KEYS if name in values})
        return PromptRow(index, prompt, SamplingParams.from_mapping({**defaults, **values}), digest)
    except InvalidRequestError as error:
        return PromptRow(index, None, None, digest, str(error))
    except (TypeError, ValueError) as error:  # a value of a kind that no parameter has
        return PromptRow(index, None, None, digest, f"not a valid row: {' '.join(str(error).split())}")


def _parse_prompt(values: Mapping[str, Any]) -> str | tuple[int, ...]:
    if len(values) != 1:
        raise InvalidRequestError('a row needs one of "prompt" and "prompt_token_ids"')
    if "prompt" in values:
        prompt = values["prompt"]
        if not isinstance(prompt, str):
            raise InvalidRequestError(f'"prompt" must be a text, not {type(prompt).__name__}')
        return prompt
    tokens = values["prompt_token_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidRequestError('"prompt_token_ids" must be a list of whole numbers')
    return tuple(tokens)


def output_row(prompt: PromptRow, output: RequestOutput) -> dict[str, object]:
    """The output row of one prompt; with n above 1 the row's own fields are the first completion's, and `completions`
    holds all of them."""
    if output.error is not None or not output.completions:
        return refused_row(prompt, output.error or "no completion")
    fields_ = _completion_fields(output.completions[0])
    row: dict[str, object] = {"index": prompt.index, **fields_, "error": None, "input_hash": prompt.input_hash}
    if len(output.completions) > 1:
        row["completions"] = [_completion_fields(completion) for completion in output.completions]
    return row


def refused_row(prompt: PromptRow, error: str) -> dict[str, object]:
    """The output row of a prompt that was not run."""
    return {
        "index": prompt.index,
        "text": "",
        "token_ids": [],
        "finish_reason": None,
        "num_rounds": 0,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "mean_acceptance_length": 0.0,
        "time_to_first_token_s": None,
        "time_s": None,
        "error": error,
        "input_hash": prompt.input_hash,
    }


def _completion_fields(completion: CompletionOutput) -> dict[str, object]:
    statistics = completion.statistics
    fields_: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_rounds": statistics.num_rounds,
        "num_draft_tokens": statistics.num_draft_tokens,
        "num_accepted_draft_tokens": statistics.num_accepted_draft_tokens,
        "mean_acceptance_length": round(statistics.mean_acceptance_length, 4),
        "time_to_first_token_s": _seconds(statistics.arrival, statistics.first_token),
        "time_s": _seconds(statistics.arrival, statistics.finished),
    }
    if completion.logprobs is not None:
        fields_["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": round(entry.logprob, 6),
                "alternatives": [[token, round(value, 6)] for token, value in entry.alternatives],
            }
            for entry in completion.logprobs
        ]
    return fields_


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
