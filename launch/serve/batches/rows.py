"""Rows of a batch, in OpenAI's format: requests in, answers out.

A row is `{"custom_id", "method": "POST", "url", "body"}`. What a body means is the endpoint's business.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from launch.serve.admission.refusals import HTTP_STATUS, Refusal
from launch.serve.api.openai.api import ROW_ENDPOINTS
from launch.serve.batches.records import LineError
from trtrun.core.values import cut_text, show_value
from trtrun.errors import InvalidRequestError
from trtrun.files import describe_foreign, read_lines

MOST_ROWS = 50_000
"""Rows of a batch, as OpenAI has it."""

MOST_ERRORS = 100
"""Lines that are named of a file that is wrong."""

_LONGEST_ID = 512
_MARK = b"\xef\xbb\xbf"

OUTPUT, ERRORS = "output", "error"
"""The kinds of a batch's files."""


class RowError(InvalidRequestError):
    """What is wrong with a row.

    Attributes:
        code: a word for programs.
        param: of the row.
    """

    def __init__(self, code: str, line: str, param: str | None = None) -> None:
        super().__init__(line)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class BatchRow:
    """A request of a batch.

    Attributes:
        custom_id: the client's name of it.
        url: its endpoint.
        body: JSON.
    """

    custom_id: str
    url: str
    body: bytes


class _Given(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


_GIVEN = msgspec.json.Decoder(_Given)


def read_row(line: bytes, endpoint: str | None = None) -> BatchRow:
    """Read a row.

    Args:
        line: of the file.
        endpoint: of the batch; None where each row has its own.

    Raises:
        RowError: it is wrong.
    """
    try:
        given = _GIVEN.decode(line.removeprefix(_MARK))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RowError("invalid_json_line", f"the line is no row of a batch: {cut_text(str(error), 200)}") from None
    except RecursionError:
        line_ = "the line is no row of a batch: lists or objects are nested too deeply"
        raise RowError("invalid_json_line", line_) from None
    if not isinstance(given.custom_id, str) or not 0 < len(given.custom_id) <= _LONGEST_ID:
        line_ = f"custom_id must be a text of 1 to {_LONGEST_ID} characters, not {show_value(given.custom_id)}"
        raise RowError("invalid_custom_id", line_, "custom_id")
    if given.method != "POST":
        raise RowError("invalid_method", f"method must be POST, not {show_value(given.method)}", "method")
    known = tuple(ROW_ENDPOINTS) if endpoint is None else (endpoint,)
    if given.url not in known:
        raise RowError("invalid_url", f"url must be {' or '.join(known)}, not {show_value(given.url)}", "url")
    body = bytes(given.body)
    if not body.startswith(b"{"):
        raise RowError("invalid_body", "body must be an object, the request itself", "body")
    return BatchRow(given.custom_id, given.url, body)


def check_rows(path: Path, endpoint: str, most_bytes: int) -> tuple[int, list[LineError]]:
    """Check all rows of a file.

    Args:
        path: of the file.
        endpoint: of the batch.
        most_bytes: of one row.

    Returns:
        How many there are, and what is wrong.

    Raises:
        OSError: it cannot be read.
    """
    first_lines: dict[str, int] = {}
    errors: list[LineError] = []
    num_rows = 0
    with path.open("rb") as file:
        problem = describe_foreign(file.read(8))
        if problem is not None:
            return 0, [LineError("invalid_file", f"the file {problem}")]
        file.seek(0)
        for number, line in enumerate(read_lines(file, most_bytes), start=1):
            if not line.strip():
                continue
            num_rows += 1
            if num_rows > MOST_ROWS:
                return num_rows, [LineError("too_many_rows", f"a batch has at most {MOST_ROWS} rows", number)]
            try:
                if len(line) > most_bytes:
                    raise RowError("line_too_long", f"the line is longer than {most_bytes} bytes")
                row = read_row(line, endpoint)
                if row.custom_id in first_lines:
                    told = f"custom_id {show_value(row.custom_id)} is that of line {first_lines[row.custom_id]}, too"
                    raise RowError("duplicate_custom_id", told, "custom_id")
                first_lines[row.custom_id] = number
            except RowError as error:
                errors += [LineError(error.code, str(error), number, error.param)] if len(errors) < MOST_ERRORS else []
    if not num_rows:
        errors.append(LineError("empty_file", "the file has no rows"))
    return num_rows, errors


def read_rows(path: Path, most_bytes: int) -> Iterator[BatchRow]:
    """The rows of a file that was checked.

    Raises:
        OSError: it cannot be read.
        RowError: it is another one than was checked.
    """
    with path.open("rb") as file:
        yield from (read_row(line) for line in read_lines(file, most_bytes) if line.strip())


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Answered(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Error | None


def answered_row(custom_id: str, body: bytes, status: int = 200) -> bytes:
    """The line of a row that has its answer, or a refusal in the words of its endpoint."""
    response = _Response(status, f"req_{secrets.token_hex(16)}", msgspec.Raw(body))
    return _line(_Answered(f"batch_req_{secrets.token_hex(16)}", custom_id, response, None))


def refused_row(custom_id: str, refusal: Refusal, body: Mapping[str, Any]) -> bytes:
    """The line of a row that was refused; `body` is what a client would be told."""
    return answered_row(custom_id, msgspec.json.encode(body), HTTP_STATUS[refusal.kind])


def row_not_run(custom_id: str, code: str, message: str) -> bytes:
    """The line of a row that has no answer at all; the codes are OpenAI's."""
    return _line(_Answered(f"batch_req_{secrets.token_hex(16)}", custom_id, None, _Error(code, message)))


def _line(row: _Answered) -> bytes:
    return msgspec.json.encode(row) + b"\n"
