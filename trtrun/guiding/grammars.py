"""Guides as grammars: compiled within bounds, kept by content, and where they are wrong, said where; and the tokens of
a checkpoint as the grammar engine (llguidance) reads them.

A matcher of a grammar follows a text token by token, and knows which tokens may come next (llguidance: an Earley parser
over a lexer of derivatives of regular expressions). Texts that a guide spells out are looked through first: what a
tokenizer would read as a special token in them could not be told from text.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from trtrun.core.guide import Guide
from trtrun.errors import InvalidRequestError, LibraryPanicError, RustLibrary, one_line
from trtrun.guiding.bounds import check_bounds, limits
from trtrun.guiding.complaints import WORDS, complaint, in_words
from trtrun.guiding.json_schemas import closed
from trtrun.threads import call_deep
from trtrun.tokens.text import Tokenizer

_lock = Lock()


@dataclass(frozen=True)
class Spelling:
    """What has to be known of a vocabulary.

    Attributes:
        tokenizer: as tokenizer.json has it.
        vocab_size: of the logits, or of the tokenizer where it has more.
        eos_token_ids: tokens that end a text.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> Spelling:
        """Make the spelling of a target's tokenizer, whose logits are `vocab_size` numbers; what the tokenizer lacks of
        these stands for no text, and is never allowed.

        Raises:
            InvalidRequestError: there is no tokenizer, or no token that ends a text.
        """
        if tokenizer is None:
            raise InvalidRequestError("guided needs a tokenizer, and the target has none: leave it out")
        if not eos_token_ids:
            raise InvalidRequestError(
                "guided needs a token that ends a text, and the target's configuration names none"
            )
        return cls(tokenizer.as_json(), max(vocab_size, tokenizer.vocab_size), tuple(eos_token_ids))

    def read(self) -> LLTokenizer:
        """The tokens. Those of 128,000 take half a second, in which no other thread of the interpreter runs; the last
        ones are kept, and so is what is wrong with them. From any thread.

        Raises:
            InvalidRequestError: the tokenizer is of a kind that the grammar engine does not know.
        """
        with _lock:
            found = _read(self)
        if isinstance(found, str):
            raise InvalidRequestError(f"guided cannot be followed with the target's tokenizer: {found}")
        return found


@lru_cache(maxsize=2)
def _read(spelling: Spelling) -> LLTokenizer | str:
    """The tokens, or why they cannot be read: trying again takes as long, and each row of a start's rounds asks."""
    try:
        with RustLibrary("llguidance"):
            return LLTokenizer(spelling.tokenizer, n_vocab=spelling.vocab_size, eos_token=[*spelling.eos_token_ids])
    except Exception as error:  # whatever the library raises
        return one_line(error)


_ANNOTATIONS = ("title", "description", "$comment")
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)(?:"|\\?\Z)|/((?:\\.|[^/\\\n])*)(?:/|\n|\\?\Z)', re.DOTALL)
"""Texts and regular expressions of a grammar, closed or not, so that none is looked at twice. What stands outside of
them may name special tokens."""


def literals(guide: Guide) -> Iterator[str]:
    """Texts that sentences of a guide may hold, and others that stand in it; not those that its rules put together."""
    if guide.kind == "choice":
        yield from json.loads(guide.text)
    elif guide.kind == "regex":
        yield _unescaped(guide.text)
    elif guide.kind == "json":
        yield from _of_schema(json.loads(guide.text))
    else:
        for text, regex in _QUOTED.findall(guide.text):
            yield _unescaped(text or regex)


def _of_schema(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
            if "\\" in part:  # a pattern
                yield _unescaped(part)
        elif isinstance(part, Mapping):
            yield from part
            # Which are texts where they describe, and schemas where they name a property.
            left += [inner for key, inner in part.items() if key not in _ANNOTATIONS or not isinstance(inner, str)]
        elif isinstance(part, list):
            left += part


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


_MOST_KEPT = 64
_MOST_SECONDS_KEPT = 4.0
"""The most seconds that kept grammars took to build: what takes long takes much memory, too, some 200 MB a second."""
_MOST_FORCED = 8192
_MOST_SECONDS = 2.0
"""The most processor time to build what is let in: the target builds it again, and rows wait for it there."""


@lru_cache(maxsize=2)
def grammars_of(tokens: LLTokenizer) -> Grammars:
    """The grammars of a vocabulary, which all in a process share."""
    return Grammars(tokens)


class _Kept(NamedTuple):
    """A compiled grammar.

    Attributes:
        matcher: at the start of a text.
        first: [words] int32, the mask there.
        seconds: of processor time that it took.
    """

    matcher: LLMatcher
    first: np.ndarray
    seconds: float


class Grammars:
    """The grammars of one vocabulary, the last ones compiled."""

    def __init__(self, tokens: LLTokenizer) -> None:
        """Compile for `tokens`. From any thread."""
        self._tokens = tokens
        with RustLibrary("llguidance"):
            special = filter(tokens.is_special_token, range(tokens.vocab_size))
            names = [tokens.decode_str([token]) for token in special]
            self._special_names = [
                name for name in names if any(map(tokens.is_special_token, tokens.tokenize_str(name)))
            ]
        self._lock = Lock()
        self._kept: OrderedDict[Guide, _Kept] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, as masks have them."""
        return self._tokens.vocab_size

    def has(self, guide: Guide) -> bool:
        """Whether a guide is compiled."""
        return guide in self._kept

    def kept(self, guide: Guide) -> tuple[LLMatcher, np.ndarray] | None:
        """A matcher at the start of a text, and the mask there, [words] int32; None where the guide is not compiled.
        Cheap."""
        with self._lock:
            found = self._kept.get(guide)
        return None if found is None else (found.matcher.deep_copy(), found.first)

    def check(self, guide: Guide) -> None:
        """Compile a guide, unless it is among the last ones.

        Raises:
            InvalidRequestError: it is wrong, or needs more than a grammar may take; the message says where.
        """
        if self.has(guide):
            return
        if self._compiled(guide).seconds > _MOST_SECONDS:
            with self._lock:
                self._kept.pop(guide, None)
            raise InvalidRequestError(
                f"guided: the {WORDS[guide.kind]} takes longer than {_MOST_SECONDS:g} s to build: make it smaller"
            )

    def matcher(self, guide: Guide, *, anew: bool = False) -> LLMatcher:
        """A matcher at the start of a text; its errors are its own (`is_error`). Those of one grammar share what their
        lexer has found out, and the bound of its states: `anew` begins from nothing, here and for who asks next.

        Raises:
            InvalidRequestError: as of `check`.
        """
        return self._compiled(guide, anew=anew).matcher.deep_copy()

    def own_matcher(self, guide: Guide) -> LLMatcher:
        """Make a matcher that shares nothing with others.

        Raises:
            InvalidRequestError: as of `check`.
        """
        return self._compile(guide).matcher

    def idle_matcher(self) -> LLMatcher:
        """Make a matcher of no grammar, which takes no token."""
        return LLMatcher(self._tokens, "start: (", log_level=0)

    def _compiled(self, guide: Guide, *, anew: bool = False) -> _Kept:
        with self._lock:
            kept = self._kept.get(guide)
            if kept is not None and not anew:
                self._kept.move_to_end(guide)
                return kept
        if not anew:
            check_bounds(guide)
            self._check_literals(guide)
        kept = self._compile(guide)
        with self._lock:
            self._kept.pop(guide, None)
            self._kept[guide] = kept
            while len(self._kept) > _MOST_KEPT or (len(self._kept) > 1 and self._seconds_kept() > _MOST_SECONDS_KEPT):
                self._kept.popitem(last=False)
        return kept

    def _compile(self, guide: Guide) -> _Kept:
        """The grammar engine recurses along references and nesting, as deep as `check_bounds` lets a guide be."""

        def build() -> _Kept:
            started = time.thread_time()
            matcher = _build(self._tokens, guide)
            first = self._first_mask(guide, matcher.deep_copy())
            return _Kept(matcher, first, time.thread_time() - started)

        return call_deep(build)

    def _seconds_kept(self) -> float:
        """What took to build those that are kept."""
        return sum(kept.seconds for kept in self._kept.values())

    def _check_literals(self, guide: Guide) -> None:
        """Refuse a guide with the name of a special token in a text: what must follow is spelled as the tokenizer
        spells it, which would be that token. It is no text, and may end the row."""
        texts = "\n".join(literals(guide))
        name = next((name for name in self._special_names if name in texts), None)
        if name is not None:
            raise InvalidRequestError(
                f"guided: the {WORDS[guide.kind]} has {name} in a text, which is a special token to the target's "
                "tokenizer, and cannot be written as text: leave it out"
            )

    def _first_mask(self, guide: Guide, matcher: LLMatcher) -> np.ndarray:
        """What may come first, [words] int32, made beside the rounds. Refuse a guide that no text follows, or of whose
        texts too much is the same: all of it is looked at for each token."""
        bits = np.zeros(-(-self._tokens.vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error() or not bool(bits.any()):
            raise InvalidRequestError(
                f"guided: the {WORDS[guide.kind]} cannot be followed: no text is as it says, or it takes too much"
            )
        forced = len(matcher.compute_ff_tokens())
        if forced > _MOST_FORCED:
            raise InvalidRequestError(
                f"guided: the {WORDS[guide.kind]} leaves no choice for {forced} tokens; {_MOST_FORCED} are the most"
            )
        return bits


def _build(tokens: LLTokenizer, guide: Guide) -> LLMatcher:
    """A matcher at the start of a text.

    Raises:
        InvalidRequestError: the guide is wrong, or the library gives up on it.
    """
    try:
        with RustLibrary("llguidance"):
            matcher = LLMatcher(tokens, _grammar(guide), log_level=0, limits=limits())
            if matcher.is_error():
                raise InvalidRequestError(complaint(guide, matcher.get_error()))
            return matcher
    except LibraryPanicError as panic:
        raise InvalidRequestError(f"guided: the {WORDS[guide.kind]} cannot be followed: {panic}") from None


def _grammar(guide: Guide) -> str:
    """The guide as the grammar engine takes it.

    Raises:
        InvalidRequestError: it is a grammar in no form that can be read.
    """
    if guide.kind == "json":
        return LLMatcher.grammar_from_json_schema(closed(guide.text))
    if guide.kind == "regex":
        if _ends_with_escape(guide.text):  # which the library leaves out
            raise InvalidRequestError(
                "guided: the regular expression cannot be followed: it ends with a backslash and nothing behind it"
            )
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "choice":
        # One terminal for all: of a rule each text is an item of its own to the parser, whose bound many would pass.
        texts = " | ".join(map(json.dumps, json.loads(guide.text)))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(guide.text))
    except Exception as error:  # the library's own of a text that is neither
        raise InvalidRequestError(f"guided: the grammar cannot be followed: {in_words(str(error))}") from None


def _ends_with_escape(regex: str) -> bool:
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1
