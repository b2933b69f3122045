"""Command lines of TensorRT-LLM's examples as web pages print them: pasted into a shell, they are read all the same.

It knows words, and that options have other names there. It does not know options.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import click

from trtrun.errors import ConfigError, nearest

DASHES = "\u2013\u2014"
OPENING_QUOTES, CLOSING_QUOTES = "\u201c\u2018", "\u201d\u2019"


class LenientParser(argparse.ArgumentParser):
    """Errors as one line, like those of trtrun's commands."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            click.UsageError: always.
        """
        raise click.UsageError(message)

    def parse_mended(self, words: Sequence[str]) -> argparse.Namespace:
        """The options of a command line; see `mend_words`.

        Raises:
            click.UsageError: one is unknown, or lacks its value.
        """
        known = [option for action in self._actions for option in action.option_strings]
        arguments, unknown = self.parse_known_args([_part(word, known) for word in mend_words(words)])
        if unknown:
            raise click.UsageError(f"unknown option '{unknown[0]}'{nearest(unknown[0].partition('=')[0], known)}")
        return arguments


def mend_words(words: Sequence[str]) -> list[str]:
    """Undo what web pages do to a command line: `–option`, `-- option` where a line was broken between them,
    `--option = value`, and “quotes” that no shell sees.

    Words that the shell has split inside such quotes are put together again, with single spaces. A prompt that was
    quoted for the shell keeps every character.
    """
    mended: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word[:1] in tuple(DASHES) and word[1:2].isalpha():
            word = "--" + word[1:]
        if word == "--" and rest and rest[0].partition("=")[0].isidentifier():
            word += rest.pop(0)
        if word.startswith("--") and rest[:1] == ["="] and len(rest) > 1:
            word += "=" + rest[1]
            rest = rest[2:]
        closing_at = _find_closing(word, rest)
        if closing_at is not None:
            word = " ".join([word, *rest[: closing_at + 1]])[:-1]
            word = word.translate({ord(mark): None for mark in OPENING_QUOTES})
            rest = rest[closing_at + 1 :]
        mended.append(word)
    return mended


@contextmanager
def naming_options(names: Mapping[str, str]) -> Iterator[None]:
    """Have what is wrong said with the options that were typed.

    Args:
        names: by the names that trtrun's own command has for them.

    Raises:
        ConfigError: as it was raised inside, with other names of options.
    """
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"(?<![\w/-])--[\w-]+", lambda found: names.get(found[0], found[0]), str(error))
        raise ConfigError(message) from None


def _part(word: str, known: Sequence[str]) -> str:
    """Put back the sign between an option and a path: `--output_dir./engine`."""
    option, dot, path = word.partition("./")
    return f"{option}={dot}{path}" if dot and option in known else word


def _find_closing(word: str, rest: Sequence[str]) -> int | None:
    """Index in `rest` of the word that ends a quotation which `word` opens and does not close; None without one."""
    value = word.partition("=")[2] if word.startswith("--") else word
    if value[:1] not in tuple(OPENING_QUOTES) or any(mark in value for mark in CLOSING_QUOTES) or " " in value:
        return None
    return next((place for place, later in enumerate(rest) if later.endswith(tuple(CLOSING_QUOTES))), None)
