"""Values that come with a request: each read as the kind that its field holds, or refused in one line.

The words of the messages are those of JSON (true, null, a list), for rows come as JSON; `show_value` cuts what it
shows. This module knows kinds of values. It does not know fields, their ranges or what they mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from trtrun.errors import InvalidRequestError

MOST_SHOWN = 200
"""Characters of a value that a message shows."""

LARGEST_TOKEN_ID = 2**31 - 1
"""Token ids travel and are looked up as int32."""

MOST_WORDS = 1024
"""Texts in one list: each becomes tokens, and is looked for behind every token of the output while all rows wait."""

MOST_LETTERS = 1 << 16
"""Characters of the texts in one list."""

_DIGITS = re.compile(r"[0-9]{1,20}")


def show_value(value: object) -> str:
    """A value as JSON writes it, on one line, cut to MOST_SHOWN characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # such as a number of too many digits, or keys of other kinds
        text = f"a value of kind {type(value).__name__}"
    return cut_text(text, MOST_SHOWN)


def cut_text(text: str, most: int) -> str:
    """`text` on one line of printable characters, others escaped, and at most `most` of them."""
    cut = text if len(text) <= most else text[:most] + "…"
    if cut.isprintable():
        return cut
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, for json.loads.

    Raises:
        InvalidRequestError: a key stands twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequestError(f"the key {show_value(name)} stands twice")
            seen.add(name)
    return values


def check_characters(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which is no character: it has no UTF-8 and no tokens.

    Args:
        name: of the text, for the message.
        text: any.

    Raises:
        InvalidRequestError: `text` holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        line = f"{name} holds {half}, half of a surrogate pair, which is no character"
        raise InvalidRequestError(line) from None


def read_integer(name: str, value: object) -> int:
    """A whole number.

    Raises:
        InvalidRequestError: it is something else, such as true or 4.0.
    """
    if type(value) is int:  # before the general question, which takes longer
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} must be a whole number, not {show_value(value)}")
    return int(value)


def read_optional_integer(name: str, value: object) -> int | None:
    """A whole number, or None."""
    return None if value is None else read_integer(name, value)


def read_optional_name(name: str, value: object) -> str | None:
    """A text that names something, or None.

    Raises:
        InvalidRequestError: it is no text, or an empty one.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name} must be a name, not {show_value(value)}")
    check_characters(name, value)
    return value


MOST_SALT = 1024
"""Characters of a salt."""


def read_salt(name: str, value: object) -> str | None:
    """A text that is kept secret, or None.

    Raises:
        InvalidRequestError: it is no text, or an empty or a long one.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MOST_SALT:
        raise InvalidRequestError(f"{name} must be a text of 1 to {MOST_SALT} characters, or left out")
    check_characters(name, value)
    return value


def read_number(name: str, value: object) -> float:
    """A finite number.

    Raises:
        InvalidRequestError: it is something else, or larger than any floating-point number.
    """
    number = math.nan
    if type(value) is float:
        number = value
    elif isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be a finite number, not {show_value(value)}")
    return number


def read_flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        InvalidRequestError: it is something else, such as "false", which Python would take for true.
    """
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, not {show_value(value)}")
    return value


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Hold a list of words to MOST_WORDS and MOST_LETTERS, without a look at any of them where there are too many.

    Args:
        name: of the list, for messages.
        words: texts, or token ids of each.
        unit: what words are made of, for messages.

    Raises:
        InvalidRequestError: there are too many, or they are too long.
    """
    _check_number(name, words)
    length = sum(map(len, words))
    if length > MOST_LETTERS:
        raise InvalidRequestError(f"{name} is {length} {unit} long in all; {MOST_LETTERS} are the most")


def _check_number(name: str, words: Sized) -> None:
    if len(words) > MOST_WORDS:
        raise InvalidRequestError(f"{name} has {len(words)} entries; {MOST_WORDS} are the most")


def read_texts(name: str, value: object) -> tuple[str, ...]:
    """One text or several, none of them empty.

    Raises:
        InvalidRequestError: it is something else, a text holds half of a surrogate pair, or as of `check_words`.
    """
    items = (value,) if isinstance(value, str) else _read_list(value)
    _check_number(name, items or ())  # before a look at any of them
    texts = tuple(item for item in items or () if isinstance(item, str))
    if items is None or len(texts) < len(items):
        raise InvalidRequestError(f"{name} must be a text or a list of texts, not {show_value(value)}")
    for text in texts:
        if not text:
            raise InvalidRequestError(f"{name} must not hold an empty text")
        check_characters(name, text)
    check_words(name, texts)
    return texts


def read_marks(name: str, value: object) -> tuple[str, ...]:
    """Texts in front of and behind something, and perhaps further ones behind it; only the first may be empty.

    Raises:
        InvalidRequestError: they are something else, fewer than 2, more than 8, or longer than 256 characters.
    """
    items = None if isinstance(value, str) else _read_list(value)
    texts = [item for item in items or () if isinstance(item, str) and len(item) <= _LONGEST_MARK]
    if items is None or len(texts) < len(items) or not 2 <= len(texts) <= _MOST_MARKS or not all(texts[1:]):
        raise InvalidRequestError(
            f"{name} must be a list of 2 to {_MOST_MARKS} texts of at most {_LONGEST_MARK} characters, of which only "
            f"the first may be empty, not {show_value(value)}"
        )
    for text in texts:
        check_characters(name, text)
    return tuple(texts)


_MOST_MARKS, _LONGEST_MARK = 8, 256


def read_token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids; whether the vocabulary has them is not known here.

    Raises:
        InvalidRequestError: it is something else, or an id is below 0 or above LARGEST_TOKEN_ID.
    """
    items = _read_list(value)
    if items and set(map(type, items)) == {int}:  # as nearly always, and in the interpreter's own loops
        plain: tuple[int, ...] = items  # type: ignore[assignment]
        if min(plain) >= 0 and max(plain) <= LARGEST_TOKEN_ID:
            return plain
    tokens = tuple(int(item) for item in items or () if isinstance(item, Integral) and not isinstance(item, bool))
    if items is None or len(tokens) < len(items):
        raise InvalidRequestError(f"{name} must be a list of whole numbers, not {show_value(value)}")
    for token in tokens:
        _check_token_id(name, token)
    return tokens


def read_token_sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """A list of lists of token ids, none of them empty.

    Raises:
        InvalidRequestError: it is something else, or as of `read_token_ids` and `check_words`.
    """
    items = _read_list(value)
    _check_number(name, items or ())
    if items is None or not all(items):
        raise InvalidRequestError(f"{name} must be a list of lists of token ids, not {show_value(value)}")
    sequences = tuple(read_token_ids(name, item) for item in items)
    check_words(name, sequences, "tokens")
    return sequences


def read_sizes(name: str, value: object) -> tuple[int, ...]:
    """Three whole numbers; what they may be is not known here. None of them where there is an empty list.

    Raises:
        InvalidRequestError: it is something else.
    """
    items = _read_list(value)
    sizes = tuple(int(item) for item in items or () if isinstance(item, Integral) and not isinstance(item, bool))
    if items is None or len(sizes) != len(items) or len(sizes) not in (0, 3):
        raise InvalidRequestError(f"{name} must be a list of three whole numbers, not {show_value(value)}")
    return sizes


def read_bias(name: str, value: object) -> dict[int, float]:
    """Numbers by token id; ids may be texts of digits, as keys of JSON objects are.

    Raises:
        InvalidRequestError: it is something else, or an id stands twice.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be an object of token ids and numbers, not {show_value(value)}")
    plain = _plain_bias(value)
    if plain is not None:
        return plain
    biases: dict[int, float] = {}
    for key, number in value.items():
        is_text = isinstance(key, str) and _DIGITS.fullmatch(key) is not None
        if not is_text and (isinstance(key, bool) or not isinstance(key, Integral)):
            raise InvalidRequestError(f"{name}: {show_value(key)} is not a token id")
        token = int(key)
        _check_token_id(name, token)
        if token in biases:
            raise InvalidRequestError(f"{name}: token {token} stands twice")
        biases[token] = read_number(f"{name} of token {token}", number)
    return biases


def _plain_bias(value: Mapping[object, object]) -> dict[int, float] | None:
    """What `read_bias` returns, in the interpreter's own loops: a vocabulary may have a bias each. None where something
    is unusual, or wrong."""
    keys: list[Any] = list(value.keys())
    numbers: list[Any] = list(value.values())
    kinds = set(map(type, keys))
    if kinds == {str} and all(map(_DIGITS.fullmatch, keys)):
        keys = list(map(int, keys))
    elif kinds != {int}:
        return None
    if not set(map(type, numbers)) <= {int, float}:
        return None
    with suppress(OverflowError):
        biases: dict[int, float] = dict(zip(keys, map(float, numbers), strict=True))
        is_fine = len(biases) == len(keys) and min(biases) >= 0 and max(biases) <= LARGEST_TOKEN_ID
        return biases if is_fine and all(map(math.isfinite, biases.values())) else None
    return None


def _read_list(value: object) -> tuple[object, ...] | None:
    """The items of a list or of anything like it; None for what is no list, such as a text or an object."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    return tuple(value)


def _check_token_id(name: str, token: int) -> None:
    if not 0 <= token <= LARGEST_TOKEN_ID:
        raise InvalidRequestError(
            f"{name}: {show_value(token)} is not a token id, a whole number from 0 to {LARGEST_TOKEN_ID}"
        )
