"""Tokenizers that come as a list of tokens, each some bytes, by rank: Kimi-K2's tiktoken.model, Mistral's tekken.json.
What is made of them is the byte-level tokenizer of the library `tokenizers` that has the same ids for all texts.

A Python file beside tiktoken.model says how text is parted before it becomes tokens (`pat_str`). Nothing of that file
is run: the pattern is read where it is written as literal texts. Special tokens are tokenizer_config.json's there.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import re
import tokenize
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from trtrun.errors import CheckpointError, RustLibrary, one_line
from trtrun.tokens.decoders.texts import spell_bytes

TIKTOKEN, TEKKEN = "tiktoken.model", "tekken.json"
_CONFIG = "tokenizer_config.json"
_PATTERN = "pat_str"
_MOST_BYTES = 1 << 26
"""Of a file: 163,584 tokens take 3 MB."""
_MOST_PROGRAM_BYTES = 1 << 20
_MOST_ADDED = 1 << 16
_LONGEST = 1024
"""Bytes of a token: all ways to cut it are tried. Mistral's have 78 at most."""
_END = ""
"""Of a statement, among words."""


class _Added(msgspec.Struct):
    """A token that is not among the ranks."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Config(msgspec.Struct):
    """What tokenizer_config.json has of it."""

    added_tokens_decoder: dict[int, _Added] = {}
    auto_map: dict[str, list[str | None] | str] = {}


class _Ranked(msgspec.Struct):
    """A token of tekken.json, its bytes in base64."""

    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    """Another one, whose rank is its id."""

    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    """How texts are parted, and how many ids there are, the special ones first."""

    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    """What tekken.json has of it."""

    config: _TekkenConfig
    vocab: list[_Ranked]
    special_tokens: list[_Special] | None = None


_BEGIN = "<s>"
_OLD_SPECIAL_TOKENS = [
    _Special(rank, name)
    for rank, name in enumerate(
        (
            *("<unk>", _BEGIN, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
            *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
        )
    )
]
"""Of files that do not say, up to version 7 (mistral-common)."""


def read_tiktoken(path: Path) -> Tokenizer:
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: a file is missing or damaged, or does not say how text is parted.
    """
    ranks, config = _read_ranks(path / TIKTOKEN), _read_config(path / _CONFIG)
    added = _added_tokens(config.added_tokens_decoder, len(ranks))
    return _make(path / TIKTOKEN, ranks, _read_pattern(path, config), added)


def read_tekken(path: Path) -> Tokenizer:
    """The tokenizer of a model directory. A text begins with `<s>`, where special tokens are wanted.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / TEKKEN
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_Tekken)
        first = told.config.default_num_special_tokens
        regular = told.vocab[: told.config.default_vocab_size - first]
        ranks = {base64.b64decode(token.token_bytes, validate=True): token.rank + first for token in regular}
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} has no tokens that can be read ({one_line(error)}): copy it again") from None
    names = {token.rank: token.token_str for token in told.special_tokens or _OLD_SPECIAL_TOKENS}
    special = [names.get(number, f"<SPECIAL_{number}>") for number in range(min(first, _MOST_ADDED))]
    expected = range(first, first + len(regular))
    is_whole = sorted(ranks.values()) == [*expected] and bool(ranks)
    if not is_whole or len({*special}) < first or not {*names} <= {*range(first)}:
        raise CheckpointError(f"{file}: ids of its tokens are not 0, 1, 2 and so on, each once: copy it again")
    added = {number: AddedToken(name, normalized=False, special=True) for number, name in enumerate(special)}
    made = _make(file, ranks, told.config.pattern, added)
    if _BEGIN in special:
        begin = (_BEGIN, special.index(_BEGIN))
        made.post_processor = TemplateProcessing(single=f"{_BEGIN} $A", special_tokens=[begin])
    return made


def _make(file: Path, ranks: Mapping[bytes, int], pattern: str, added: Mapping[int, AddedToken]) -> Tokenizer:
    """A tokenizer of tokens with their ids, and those that are `added`, by id.

    Raises:
        CheckpointError: the library refuses it, two tokens are spelled alike, or one is longer than any is.
    """
    if max(map(len, ranks)) > _LONGEST:
        raise CheckpointError(f"{file}: a token has more than {_LONGEST} bytes: copy it again")
    try:
        with RustLibrary("tokenizers"):
            vocabulary, merges = _spell(ranks)
            names = {token.content: number for number, token in added.items()}
            made = Tokenizer(BPE({**names, **vocabulary}, merges, fuse_unk=False, ignore_merges=True))
            parts = Split(Regex(pattern), behavior="isolated")
            made.pre_tokenizer = Sequence([parts, ByteLevel(add_prefix_space=False, use_regex=False)])
            made.decoder = ByteDecoder()
            made.add_tokens([*added.values()])
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be made a tokenizer of ({one_line(error)})") from None
    for number, token in added.items():
        if made.token_to_id(token.content) != number:
            raise CheckpointError(f"{file}: added token {number}, {token.content!r}, has another id, too")
    return made


def _read_config(file: Path) -> _Config:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Config)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} does not tell added tokens ({one_line(error)}): copy it again") from None


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens and their ids: a line for each, its bytes in base64 and its rank."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError("it is too large")
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file} has no tokens that can be read ({one_line(error)}): copy it again") from None
    if sorted(ranks.values()) != list(range(len(lines))) or not ranks:
        raise CheckpointError(f"{file}: ranks are not 0, 1, 2 and so on, each once: copy it again")
    return ranks


def _spell(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary with a character for each byte; and by rank the pairs of tokens that become one: all that make the
    bytes of a token, as tiktoken joins any two neighbours whose bytes are one."""
    spelled = {token: spell_bytes(token) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def _read_pattern(path: Path, config: _Config) -> str:
    """How text is parted, from the Python file that tokenizer_config.json names.

    Raises:
        CheckpointError: there is no such file, or no such text in it.
    """
    module = re.search(r"\b(\w+)\.\w+", str(config.auto_map.get("AutoTokenizer")))
    file = path / f"{module.group(1) if module else 'tokenization'}.py"
    found: list[str] = []
    try:
        if file.stat().st_size <= _MOST_PROGRAM_BYTES:
            found = _assigned_texts(io.StringIO(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, SyntaxError, tokenize.TokenError):
        pass
    if len(found) != 1:
        raise CheckpointError(
            f"{path} has {TIKTOKEN} but no tokenizer.json, and no {file.name} that says how text is parted "
            f"({_PATTERN}): copy all files of the checkpoint, or put a tokenizer.json beside them"
        )
    return found[0]


def _assigned_texts(program: io.StringIO) -> list[str]:
    """Texts that a program assigns to `pat_str`: literal ones, or a list of such that one joins. Python's tokenizer is
    asked, not its parser, which deep nesting crashes."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.STRING, tokenize.NEWLINE)
    words = [word.string.strip() for word in tokenize.generate_tokens(program.readline) if word.type in kinds]
    found = []
    for place, (name, sign) in enumerate(pairwise(words)):
        if (name, sign) == (_PATTERN, "="):
            text = _text_of_all(words[place + 2 : words.index(_END, place)])
            found += [] if text is None else [text]
    return found


def _text_of_all(words: list[str]) -> str | None:
    """What an expression says, if that is a literal text or a list of such that one joins."""
    match words:
        case [word]:
            return _text_of(word)
        case [word, ".", "join", "(", "[", *inner, "]", ")"]:
            mark, *parts = map(_text_of, (word, *inner[::2]))
            known = [part for part in parts if part is not None]
            is_plain = len(known) == len(parts) and {*inner[1::2]} <= {","}
            return mark.join(known) if mark is not None and is_plain else None
    return None


def _text_of(word: str) -> str | None:
    """What a literal text says; None of anything else."""
    try:
        value = ast.literal_eval(word) if word[-1:] in ("'", '"') else None
    except (ValueError, SyntaxError):  # such as one with names in it
        return None
    return value if isinstance(value, str) else None


def _added_tokens(by_id: Mapping[int, _Added], first: int) -> dict[int, AddedToken]:
    """Tokens behind the `first` ones, by id: those that tokenizer_config.json leaves out have names of their own.

    Raises:
        CheckpointError: ids are among the first ones, or far behind them.
    """
    count = max(by_id, default=first - 1) + 1
    if min(by_id, default=first) < first or count - first > _MOST_ADDED:
        raise CheckpointError(f"{_CONFIG}: ids of added tokens are not those behind the {first} of {TIKTOKEN}")
    tokens = {number: by_id.get(number, _Added(f"<|reserved_token_{number}|>")) for number in range(first, count)}
    return {
        number: AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=False,
            special=token.special,
        )
        for number, token in tokens.items()
    }
