"""Reads the fields of a body by a table of fields, and the texts among them: fields without effect are passed over or
refused by name, and unknown ones are refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.openai.fields import BY_NAME, Field, Treatment
from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidRequestError, nearest

_ALLOWING = {"functions": "function_call"}
"""Fields that ask for nothing where another one is "none"."""


def take_fields(values: object, table: Mapping[str, Field], whose: str) -> dict[str, Any]:
    """The fields of a body that have an effect, each with a value that is not null.

    Args:
        values: the body.
        table: of the fields that it may have.
        whose: they are, for messages.

    Raises:
        Refusal: the body is no object, or has a field that is unknown, or asks for what there is not.
    """
    if not isinstance(values, dict):
        raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
    taken = {}
    for name, value in values.items():
        if value is None:
            continue
        field = table.get(name)
        if field is None:
            raise _unknown(name, table, whose)
        if field.treatment is Treatment.EFFECT:
            taken[name] = value
        elif field.treatment is Treatment.NEUTRAL and not _asks_for_nothing(field, value, values):
            raise _unsupported(field)
    return taken


def _asks_for_nothing(field: Field, value: object, values: Mapping[str, Any]) -> bool:
    if field.name == "best_of" and value == values.get("n"):
        return True
    if values.get(_ALLOWING.get(field.name, "")) == "none":
        return True
    # To Python true is 1, and false is 0.
    return any(value == neutral and (type(value) is bool) == (type(neutral) is bool) for neutral in field.neutral)


def _unsupported(field: Field) -> Refusal:
    line = f"{field.name} is not supported here: leave it out"
    if field.says:
        line = f"{field.name} is not supported here: give {field.says}"
    elif field.neutral:
        line += f", or give {' or '.join(map(show_value, field.neutral))}"
    if field.name in _ALLOWING:
        line += f', or give {_ALLOWING[field.name]} "none"'
    return Refusal(Kind.INVALID, line, field.name, "unsupported_field")


def _unknown(name: str, table: Mapping[str, Field], whose: str) -> Refusal:
    told = name[:100].encode(errors="backslashreplace").decode()  # half a character cannot be sent back
    match = difflib.get_close_matches(name[:100], sorted(table), n=1, cutoff=0.5)
    hint = f" (did you mean '{match[0]}'?)" if match else ": leave it out"
    if name in BY_NAME:
        others = BY_NAME[name].endpoint
        hint = f" of {whose}{'' if others is None else f': {others.value} have it'}"
    return Refusal(Kind.INVALID, f"unknown field {show_value(name)}{hint}", told, "unknown_field")


def check_names(field: str, where: str, value: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse what is not known of an object within a field, unless it is null."""
    for name, item in value.items():
        if name not in known and item is not None:
            line = f"unknown field {show_value(name)} of {where}{nearest(name, known)}"
            raise Refusal(Kind.INVALID, line, field)


def read_prediction(value: object) -> str:
    """The text that an answer is expected to be; empty for null.

    Raises:
        Refusal: it is none.
    """
    if value is None:
        return ""
    content = value.get("content") if isinstance(value, dict) and value.get("type") == "content" else None
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        line = f'prediction must be {{"type": "content", "content": "…"}}, not {show_value(value)}'
        raise Refusal(Kind.INVALID, line, "prediction")
    return read_text("prediction", "prediction", content)


def read_text(name: str, field: str, value: str) -> str:
    """A text that has UTF-8.

    Raises:
        Refusal: it has none.
    """
    try:
        check_characters(name, value)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error), field) from None
    return value
