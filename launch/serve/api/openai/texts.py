"""Texts of requests beside messages: checked, and what an answer is expected to be.

It knows JSON values.
"""

from __future__ import annotations

from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidRequestError


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
