"""A tokenizer's whole decoder as a chain of steps: what tokens add to a text, and where a text stands behind a prompt.

What is certain of a text depends on the kind of decoder: a character is when its last byte is there (ByteLevel), bytes
that are tokens of their own are when another token ends them (ByteFallback), a last token is when the next one is there
(BPEDecoder), and the rest at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

from trtrun.errors import RustLibrary
from trtrun.tokens.decoders.elements import BytesAsTokens, Deduplicated, LastApart, Mapped, Step
from trtrun.tokens.decoders.texts import JoinedBytes, Replaced, Stripped, Withheld


class Decoding:
    """Decoding of a tokenizer's tokens, with or without special ones. Tables are filled as tokens come.

    Attributes:
        names: the string of each token as a list, empty for a token that gives no text: one that is left out, or that
            the tokenizer does not know.
        own_texts: what each token adds to a text in which nothing is kept, whatever that is; empty where that depends
            on the tokens before or behind it, and where there is nothing.
    """

    def __init__(self, chain: Chain, name_of: Callable[[int], str | None], left_out: Container[str]) -> None:
        """Take a decoder's chain, the string of each token, and strings that are left out of texts."""
        self._beginning, self._settled = chain, chain.settled()
        self.names: Mapping[int, list[str]] = _Names(name_of, left_out)
        self.own_texts: Mapping[int, str] = _OwnTexts(self._settled, self.names)
        self._anchors = _Anchors(self._settled, self.names)

    def behind(self, prompt_token_ids: Sequence[int]) -> Chain:
        """A chain that stands where it would if it had been fed with a prompt.

        It takes the prompt's first tokens, which may be written in another way than those behind them, and of the rest
        those behind which it does not matter what came before: one as a rule, all bytes of a run of them. Only where
        such a place cannot be known (a decoder that replaces what several tokens spell) does it take the whole prompt.
        """
        chain = self._beginning.copied()
        begin, size = 0, 1
        while begin < len(prompt_token_ids) and not chain.is_settled:
            self._feed(chain, prompt_token_ids[begin : begin + size])
            begin, size = begin + size, 2 * size
        for place in range(len(prompt_token_ids) - 1, begin - 1, -1):
            if self._anchors[prompt_token_ids[place]]:
                chain, begin = self._settled.copied(), place
                break
        self._feed(chain, prompt_token_ids[begin:])
        return chain

    def _feed(self, chain: Chain, token_ids: Sequence[int]) -> None:
        chain.feed([name for token in token_ids for name in self.names[token]])


class _Names(dict[int, list[str]]):
    def __init__(self, name_of: Callable[[int], str | None], left_out: Container[str]) -> None:
        super().__init__()
        self._name_of, self._left_out = name_of, left_out

    def __missing__(self, token_id: int) -> list[str]:
        name = self._name_of(token_id)
        self[token_id] = found = [] if name is None or name in self._left_out else [name]
        return found


class _OwnTexts(dict[int, str]):
    def __init__(self, settled: Chain, names: Mapping[int, list[str]]) -> None:
        super().__init__()
        self._settled, self._names = settled, names

    def __missing__(self, token_id: int) -> str:
        chain = self._settled.copied()
        text = chain.feed(self._names[token_id])
        self[token_id] = text = text if chain.is_neutral else ""
        return text


class _Anchors(dict[int, bool]):
    def __init__(self, settled: Chain, names: Mapping[int, list[str]]) -> None:
        super().__init__()
        self._settled, self._names = settled, names

    def __missing__(self, token_id: int) -> bool:
        self[token_id] = found = any([self._settled.is_anchor(name) for name in self._names[token_id]])
        return found


_NUM_LOOKED_AT = 64
"""The bytes, of many, whose characters go through the other steps to be counted: what these cut off is at the
beginning."""


class Chain:
    """Steps, each fed with what the one before gives."""

    def __init__(self, steps: Sequence[Step]) -> None:
        """Begin with no text."""
        self._steps = list(steps)

    def copied(self) -> Chain:
        """Make a copy that goes on by itself."""
        return Chain([step.copied() for step in self._steps])

    def feed(self, names: Sequence[str]) -> str:
        """Add tokens; returns the text that is now certain."""
        elements = list(names)
        for step in self._steps:
            elements = step.feed(elements)
        return "".join(elements)

    def feed_apart(self, name: str) -> tuple[str, str]:
        """Add a token; returns the text that it makes certain of those before it, and of its own."""
        before: list[str] = []
        own = [name]
        for step in self._steps:
            before = step.feed(before) if before else []
            if own:
                before += step.close(own[0])
                own = step.feed(own)
        return "".join(before), "".join(own)

    def rest(self) -> str:
        """The text that follows if no more tokens come: bytes that make no character as U+FFFD. Changes nothing."""
        elements: list[str] = []
        for step in self._steps:
            if elements:
                ended = step.copied()
                elements = [*ended.feed(elements), *ended.rest()]
            else:
                elements = step.rest()
        return "".join(elements)

    def num_characters(self) -> int:
        """Whole characters that follow if no more tokens come, where bytes are tokens."""
        for place, step in enumerate(self._steps):
            if isinstance(step, BytesAsTokens) and not step.is_neutral:
                number, later = step.num_characters(), self._steps[place + 1 :]
                if all([isinstance(other, Stripped) and other.is_settled for other in later]):
                    return number
                first = step.first_characters(_NUM_LOOKED_AT)
                told = Chain([other.copied() for other in later]).feed(first)
                return max(0, number - len("".join(first)) + len(told))
        return 0

    def is_anchor(self, name: str) -> bool:
        """Whether behind a token a settled chain stands alike, whatever came before it."""
        for place, step in enumerate(self._steps):
            given = step.anchor(name)
            if given is None:
                # A step that keeps its last string stands alike behind each; what it gave before matters where the
                # steps behind it remember that.
                return isinstance(step, LastApart) and all(
                    isinstance(other, Mapped) for other in self._steps[place + 1 :]
                )
            name = given
        return True

    @property
    def is_settled(self) -> bool:
        """Whether the text is past its beginning."""
        return all([step.is_settled for step in self._steps])

    @property
    def is_neutral(self) -> bool:
        """Whether what comes next is written alike whatever came before."""
        return all([step.is_neutral for step in self._steps])

    def settled(self) -> Chain:
        """Make one that stands behind the beginning of a text and keeps nothing."""
        other = self.copied()
        for step in other._steps:
            step.settle()
        return other


def read_chain(decoder: Any) -> Chain:
    """The chain of a tokenizer's decoder.

    Args:
        decoder: one of `tokenizers.decoders`; None where tokens are joined by spaces.
    """
    if decoder is None:
        return Chain([Mapped(lambda name: " " + name, lambda name: name)])
    steps: list[Step] = []
    is_joined, are_tokens = False, True
    kinds = decoder_kinds(decoder)
    for place, kind in enumerate(kinds):
        if kind["type"] == "Fuse":
            is_joined = True
            continue
        step = _text_step(kind) if is_joined else _element_step(kind, are_tokens)
        if step is None:
            return Chain([*steps, Withheld(_decode(kinds[place:]), is_joined)])
        steps.append(step)
        is_joined = is_joined or kind["type"] == "ByteLevel"
        are_tokens = are_tokens and kind["type"] != "ByteFallback"
    return Chain(steps)


def _element_step(kind: dict[str, Any], are_tokens: bool) -> Step | None:
    """The step for a decoder before strings are joined; None for one that is not known.

    Args:
        kind: as tokenizer.json has it.
        are_tokens: whether strings are one token's each, so that what becomes of them may be kept.
    """
    decode = _decode([kind])
    kept: Callable[[Callable[[str], str]], Callable[[str], str]] = cache if are_tokens else (lambda become: become)
    match kind["type"]:
        case "Replace":
            return Mapped(kept(lambda name: decode([name])))
        case "Metaspace" | "WordPiece":
            return Mapped(kept(lambda name: decode(["", name])), lambda name: decode([name]))
        case "Strip":
            content, start, stop = kind["content"], kind["start"], kind["stop"]
            return Mapped(kept(lambda name: _strip(name, content, start, stop)))
        case "CTC":
            return Deduplicated(kept(lambda name: decode([name])))
        case "BPEDecoder":
            return LastApart(kept(lambda name: decode([name, ""])), kept(lambda name: decode([name])))
        case "ByteFallback":
            return BytesAsTokens()
        case "ByteLevel":
            return JoinedBytes()
    return None


def _text_step(kind: dict[str, Any]) -> Step | None:
    """The step for a decoder behind a join, whose only string is the text; None where nothing is certain early."""
    match kind["type"]:
        case "Strip":
            return Stripped(kind["content"], kind["start"], kind["stop"])
        case "Replace" if kind["pattern"].get("String"):
            return Replaced(kind["pattern"]["String"], kind["content"])
        case "Metaspace":
            return Replaced(kind["replacement"], " " if kind["prepend_scheme"] == "never" else "")
    return None


def _strip(text: str, content: str, start: int, stop: int) -> str:
    """A string without a few characters at its ends. The library has no answer where it is too short; this is empty."""
    begin = min(start, len(text) - len(text.lstrip(content)))
    end = len(text) - min(stop, len(text) - len(text.rstrip(content)))
    return text[begin:end]


def decoder_kinds(decoder: Any) -> list[dict[str, Any]]:
    """The steps of one of `tokenizers.decoders` in their order, each as tokenizer.json has it."""
    return _flatten(_describe(decoder))


@RustLibrary("tokenizers")
def _describe(decoder: Any) -> dict[str, Any]:
    """A decoder as tokenizer.json has it."""
    holder = tokenizers.Tokenizer(WordLevel({}, unk_token=""))
    holder.decoder = decoder
    described: dict[str, Any] = json.loads(holder.to_str())["decoder"]
    return described


def _flatten(kind: dict[str, Any]) -> list[dict[str, Any]]:
    """Decoders in their order, without the sequences that hold them."""
    if kind["type"] != "Sequence":
        return [kind]
    return [inner for outer in kind["decoders"] for inner in _flatten(outer)]


def _decode(kinds: Sequence[dict[str, Any]]) -> Callable[[list[str]], str]:
    """What the library does with all strings at once."""
    holder = json.loads(tokenizers.Tokenizer(WordLevel({}, unk_token="")).to_str())
    holder["decoder"] = {"type": "Sequence", "decoders": list(kinds)}
    decoder: Any = tokenizers.Tokenizer.from_str(json.dumps(holder)).decoder
    decode: Callable[[list[str]], str] = RustLibrary("tokenizers")(decoder.decode)
    return decode
