"""One row of JSON lines: a prompt with its sampling parameters in, completions with their figures out.

It knows the format of a row; rows of OpenAI's batches, which have a `custom_id`, are read and answered by what does so
in `trtrun serve`. It does not know files (input.py reads rows, journal.py keeps them) or how prompts are completed. A
row that is wrong becomes a refused row with its reason; the others go on.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trtrun.chats.chat import CHAT_FIELDS, Chat
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionOutput, RequestOutput
from trtrun.core.sampling_params import LOGITS_FIELDS, SamplingParams
from trtrun.core.values import check_characters, cut_text, show_value, unique_keys
from trtrun.errors import ConfigError, InvalidRequestError, nearest

if TYPE_CHECKING:
    from launch.serve.batches.rows import BatchRow

_OF_CHATS = tuple(name for name in CHAT_FIELDS if name != "messages")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
KNOWN_KEYS = (*PROMPT_KEYS, *_OF_CHATS, *(item.name for item in fields(SamplingParams)))
NUM_INPUT_ROWS = "num_input_rows"
MOST_OF_AN_ERROR = 1000
"""Characters of a row's `error`."""

LONGEST_LINE = 1 << 26
"""Bytes of a row: many times the longest context's. Longer ones are refused without being held."""

_PART_FIELDS = re.compile(rb', "num_input_rows": [0-9]+\}(?=\n\Z)')
_TOO_DEEP = "not a valid row: lists or objects are nested too deeply"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PromptRow:
    """One input row.

    Attributes:
        index: place in the input, counted from 0; empty lines do not count.
        prompt: text, token ids, a chat, or a row of a batch, whose body is not read yet; None when the row is refused.
        sampling: None when the row is refused; of a row of a batch it means nothing.
        input_hash: of the input row and the defaults that it takes; tells at --resume whether the input is the same.
        error: why the row is refused, else None.
        line: number of its line in its file, counted from 1; None for a prompt of the command line.
        num_input_rows: rows of the whole input, where only a part of it runs; its output row tells `trtrun merge`.
        is_data: whether its output row is training data, which holds the prompt's tokens and how it was sampled.
    """

    index: int
    prompt: str | tuple[int, ...] | Chat | BatchRow | None
    sampling: SamplingParams | None
    input_hash: str
    error: str | None = None
    line: int | None = None
    num_input_rows: int | None = None
    is_data: bool = False

    @property
    def batch_row(self) -> BatchRow | None:
        """What it is where it is of a batch; else None."""
        return None if isinstance(self.prompt, str | tuple | Chat | None) else self.prompt

    @property
    def name(self) -> str:
        """The row as messages call it."""
        return f"row {self.index}" if self.line is None else f"row {self.index} (line {self.line})"


def input_hash(values: object) -> str:
    """64 bits of the SHA-256 of a value's canonical JSON (sorted keys, no spaces, ASCII), as 16 hexadecimal digits."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


_NONE: Mapping[str, object] = MappingProxyType({})


def is_blank(line: bytes) -> bool:
    """Whether a line of the input holds no row."""
    text = line.removeprefix(_BYTE_ORDER_MARK).strip()
    # Most rows are told by their first byte; the other kinds of space are those of Unicode.
    return not text or (text[:1] != b"{" and not text.decode(errors="replace").strip())


def read_prompt(
    index: int, prompt: str, defaults: Mapping[str, object], sampling: SamplingParams | None = None
) -> PromptRow:
    """The row of a prompt from the command line; `sampling` is what the defaults make, where it is known already."""
    return _read_row(index, None, {"prompt": prompt}, prompt, defaults, sampling)


def read_line(
    index: int, number: int, line: bytes, defaults: Mapping[str, object], of_model: Mapping[str, object] = _NONE
) -> PromptRow:
    """The row of a line: `{"prompt": "…"}`, `{"prompt_token_ids": […]}` or `{"messages": […]}` with what else makes a
    chat, and any sampling parameter; or of a batch, `{"custom_id", "method", "url", "body"}`, which takes no defaults.

    Args:
        index: of the row.
        number: of the line.
        line: with or without its line end.
        defaults: sampling parameters for a row that does not name them.
        of_model: the model's own for what neither says, which do not tell one input from another.

    Raises:
        ConfigError: it is of a batch, and what the extra `serve` installs is missing.
    """
    if len(line) > LONGEST_LINE:
        return _refuse(index, number, line[:1000].decode(errors="replace"), f"longer than {LONGEST_LINE} bytes")
    text = line.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n").decode(errors="surrogateescape")
    try:
        values = _parse_json(line, text)
        if isinstance(values, dict) and "custom_id" in values:
            return PromptRow(index, _read_batch_row(line), SamplingParams(), input_hash(values), line=number)
        return _read_row(index, number, values, text, defaults, None, of_model)
    except InvalidRequestError as error:
        return _refuse(index, number, text, str(error))


def _read_batch_row(line: bytes) -> BatchRow:
    """The row of a batch.

    Raises:
        InvalidRequestError: it is wrong.
        ConfigError: what reads it is missing.
    """
    try:
        from launch.serve.batches.rows import read_row  # most runs do without what it takes
    except ImportError as error:
        raise ConfigError(
            f"rows of a batch need the extra 'serve', of which {error.name} is missing: pip install 'trtrun[serve]'"
        ) from None
    return read_row(line)


def _parse_json(line: bytes, text: str) -> object:
    """What a line of JSON says.

    Raises:
        InvalidRequestError: it is no JSON, or an object has a key twice.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = len(text[: error.start].encode(errors="surrogateescape")) + 1
        raise InvalidRequestError(
            f"not UTF-8 text: byte {place} of the line, 0x{ord(text[error.start]) & 0xFF:02x}, is not valid there"
        ) from None
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at").removesuffix(" starting")
        raise InvalidRequestError(f"not valid JSON at character {error.pos + 1} of the line: {reason}") from None
    except RecursionError:
        raise InvalidRequestError(_TOO_DEEP) from None
    except ValueError:  # the only other one
        raise InvalidRequestError("not a valid row: a number has more digits than any parameter can have") from None


def _read_row(
    index: int,
    number: int | None,
    values: object,
    text: str,
    defaults: Mapping[str, object],
    sampling: SamplingParams | None,
    of_model: Mapping[str, object] = _NONE,
) -> PromptRow:
    """Check the values of a row. Whatever goes wrong while one row is read is that row's error."""
    digest = None
    try:
        # A null stands for the default, which the command line may have set.
        taken = (
            {name: value for name, value in values.items() if value is not None or name not in defaults}
            if isinstance(values, dict)
            else None
        )
        digest = input_hash(values if taken is None else {**defaults, **taken})
        if taken is None:
            raise InvalidRequestError(f'a row must be an object such as {{"prompt": "…"}}, not {show_value(values)}')
        for name in taken:
            if name not in KNOWN_KEYS:
                raise InvalidRequestError(f"unknown key '{cut_text(name, 100)}'{nearest(name, KNOWN_KEYS)}")
        prompt = _read_prompt({name: taken.pop(name) for name in (*PROMPT_KEYS, *_OF_CHATS) if name in taken})
        named = {name: value for name, value in taken.items() if value is not None or name not in of_model}
        chosen = sampling or SamplingParams.from_mapping({**of_model, **defaults, **named})
        for name in LOGITS_FIELDS:
            if getattr(chosen, name):
                raise InvalidRequestError(
                    f"{name}: rows have no logits, which are too large for JSON: ask for logprobs or prompt_logprobs, "
                    "or take them from the Python API or over Triton's protocol"
                )
        return PromptRow(index, prompt, chosen, digest, line=number)
    except InvalidRequestError as error:
        return _refuse(index, number, text, str(error), digest)
    except RecursionError:
        return _refuse(index, number, text, _TOO_DEEP, digest)
    except Exception as error:
        return _refuse(index, number, text, f"not a valid row: {type(error).__name__}: {error}", digest)


def _refuse(index: int, number: int | None, text: str, error: str, digest: str | None = None) -> PromptRow:
    return PromptRow(index, None, None, digest or input_hash(text), cut_text(error, MOST_OF_AN_ERROR), number)


def _read_prompt(values: Mapping[str, Any]) -> str | tuple[int, ...] | Chat:
    found = {name: values[name] for name in PROMPT_KEYS if name in values}
    found = {name: value for name, value in found.items() if value is not None} or found
    if len(found) != 1:
        raise InvalidRequestError('a row needs one of "prompt", "prompt_token_ids" and "messages"')
    ((name, value),) = found.items()
    if name == "messages":
        return Chat.read({"messages": value, **{name: values[name] for name in _OF_CHATS if name in values}})
    of_chat = next((name for name in _OF_CHATS if values.get(name) is not None), None)
    if of_chat is not None:
        raise InvalidRequestError(f'"{of_chat}" is of chats: give "messages" instead of "{name}", or leave it out')
    if name == "prompt":
        if not isinstance(value, str):
            raise InvalidRequestError(f'"prompt" must be a text, not {show_value(value)}')
        check_characters('"prompt"', value)
        return value
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise InvalidRequestError(f'"prompt_token_ids" must be a list of whole numbers, not {show_value(value)}')
    return tuple(value)


def encode_row(row: Mapping[str, object]) -> bytes:
    """An output row as its line: JSON in UTF-8, in which a number that is not finite is null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair has no UTF-8: its escape means the same to JSON.
    return (text + "\n").encode(errors="backslashreplace")


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def is_refused(row: Mapping[str, Any]) -> bool:
    """Whether an output row has no completion."""
    response = row.get("response")
    status = response.get("status_code") if isinstance(response, Mapping) else None
    return row["error"] is not None or status not in (None, 200)


def batch_output_row(prompt: PromptRow, answered: Mapping[str, object]) -> dict[str, object]:
    """The output row of a row of a batch: its answer, between what tells `--resume` and `trtrun merge` which row it
    is."""
    own = {"input_hash": prompt.input_hash, **_part_fields(prompt)}
    return {"index": prompt.index, **answered, **own}


def output_row(prompt: PromptRow, output: RequestOutput) -> dict[str, object]:
    """The output row of one prompt; with n above 1 the row's own fields are the first completion's, and `completions`
    holds all of them."""
    if output.error is not None or not output.completions:
        return refused_row(prompt, output.error or "no completion")
    fields_ = _completion_fields(output.completions[0])
    row: dict[str, object] = {"index": prompt.index, **fields_, "error": None, "input_hash": prompt.input_hash}
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [None if entry is None else _logprob_fields(entry) for entry in output.prompt_logprobs]
    if len(output.completions) > 1:
        row["completions"] = [_completion_fields(completion) for completion in output.completions]
    return row | _data_fields(prompt, output) | _part_fields(prompt)


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
        "draft_hit_rate": None,
        "time_to_first_token_s": None,
        "time_s": None,
        "error": cut_text(error, MOST_OF_AN_ERROR),
        "input_hash": prompt.input_hash,
        **_part_fields(prompt),
    }


def _data_fields(prompt: PromptRow, output: RequestOutput) -> dict[str, object]:
    """What a row of training data has beside that of a run."""
    if not prompt.is_data or prompt.sampling is None:
        return {}
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "temperature": prompt.sampling.temperature,
        "seed": prompt.sampling.seed,
    }


def _part_fields(prompt: PromptRow) -> dict[str, object]:
    """What the row of a part has beside that of a whole run: at its end, where `without_part_fields` cuts it off."""
    return {} if prompt.num_input_rows is None else {NUM_INPUT_ROWS: prompt.num_input_rows}


def without_part_fields(line: bytes) -> bytes:
    """The line of an output row, as a run of the whole input would have written it."""
    return _PART_FIELDS.sub(b"}", line)


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
        "draft_hit_rate": None if (rate := statistics.foresight.hit_rate) is None else round(rate, 4),
        "time_to_first_token_s": _seconds(statistics.arrival, statistics.first_token),
        "time_s": _seconds(statistics.arrival, statistics.finished),
    }
    if completion.logprobs is not None:
        fields_["logprobs"] = [_logprob_fields(entry) for entry in completion.logprobs]
    return fields_


def _logprob_fields(entry: TokenLogprobs) -> dict[str, object]:
    return {
        "token_id": entry.token_id,
        "logprob": round(entry.logprob, 6),
        "alternatives": [[token, round(value, 6)] for token, value in entry.alternatives],
    }


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
