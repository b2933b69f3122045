"""A line of a file of JSON lines that trtrun itself may have written, as a row.

It does not know what rows are for.
"""

from __future__ import annotations

import json
from typing import Any

from trtrun.errors import ConfigError, shorten


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
