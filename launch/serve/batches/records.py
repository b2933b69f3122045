"""What is known of a file and of a batch: as it is kept, and as clients are told it. It does not know where that is."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec

RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that is not over."""

_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_PLAIN = ("id", "endpoint", "model", "input_file_id", "completion_window", "status", "created_at", "expires_at")


class FileRecord(msgspec.Struct):
    """A file.

    Attributes:
        id, filename, purpose: of the file.
        bytes: its length.
        created_at, expires_at: seconds since the epoch; None for never.
        owner: whose key made it; empty without keys.
        kept_since: seconds since the epoch, with their parts: the order of those of one second.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    owner: str
    expires_at: int | None = None
    kept_since: float = 0.0

    def told(self) -> dict[str, Any]:
        """What clients are told, in OpenAI's words."""
        kept = msgspec.structs.asdict(self)
        del kept["owner"], kept["kept_since"]
        return {"object": "file", **kept, "status": "processed", "status_details": None}


class LineError(msgspec.Struct):
    """What is wrong with a batch.

    Attributes:
        code: a word for programs.
        message: one line.
        line: of the input file, counted from 1; None where it is no line's.
        param: of the row, that is wrong.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct):
    """A batch.

    Attributes:
        id, endpoint, model, input_file_id, completion_window, metadata: as it was asked for.
        owner: whose key made it; empty without keys.
        created_at, expires_at: seconds since the epoch.
        status: OpenAI's word.
        times: when it came to each status, by the status.
        output_seconds: for how long its output is kept; None where it does not say.
        errors: why it has failed.
        total, completed, failed: rows.
        output_file_id, error_file_id: once it is over, where there are such rows.
        kept_since: as of a file.
    """

    id: str
    owner: str
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None
    status: str = "validating"
    times: dict[str, int] = {}
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    kept_since: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status not in RUNNING

    @property
    def changed_at(self) -> int:
        """When it came to its status."""
        return self.times.get(self.status, self.created_at)

    def move_to(self, status: str, now: float) -> None:
        """It has a new status."""
        self.status = status
        self.times[status] = int(now)

    def told(self) -> dict[str, Any]:
        """What clients are told, in OpenAI's words."""
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "object": "batch",
            **{name: getattr(self, name) for name in _PLAIN},
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "errors": {"object": "list", "data": errors} if errors else None,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_file_id() -> str:
    """An id that nobody guesses."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """An id that nobody guesses."""
    return f"batch_{secrets.token_hex(16)}"


def output_id(batch_id: str, kind: str) -> str:
    """The id of a batch's file of answers or of errors: always the same one, however often a server is killed while it
    makes it."""
    return f"file-{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:32]}"
