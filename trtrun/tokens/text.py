"""Between text and token ids: a checkpoint's tokenizer.json, its tokenizer.model (SentencePiece), or lists of tokens.

It knows the `tokenizers` library. Where no tokenizer.json lies beside a tokenizer.model, transformers converts it, in
memory alone; it is imported for that alone, because it takes seconds to load. Lists are read by byte_pair_files.py.
Text that grows token by token is in `detokenizer`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers.decoders import ByteLevel

from trtrun.errors import CheckpointError, RustLibrary, one_line
from trtrun.tokens.byte_pair_files import TEKKEN, TIKTOKEN, read_tekken, read_tiktoken
from trtrun.tokens.decoders.chain import Decoding, decoder_kinds, read_chain
from trtrun.tokens.token_bytes import TokenBytes, read_token_bytes

_MODEL = "tokenizer.model"
_LIBRARIES = ("transformers", "sentencepiece", "google.protobuf")


def read_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model directory, with the special tokens that tokenizer_config.json tells.

    Raises:
        CheckpointError: a library is missing, or the file cannot be converted.
    """
    missing = [name for name in _LIBRARIES if not _is_there(name)]
    if missing:
        raise CheckpointError(
            f"{path} has {_MODEL} but no tokenizer.json, and reading it needs the extra 'sentencepiece', of which "
            f"{', '.join(missing)} is missing: pip install 'trtrun[sentencepiece]', or scripts/install.sh sentencepiece"
        )
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with RustLibrary("tokenizers"):
            made = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = made.backend_tokenizer
    except Exception as error:  # whatever the libraries raise for a file that is none
        raise CheckpointError(
            f"{path / _MODEL} is no tokenizer that transformers can convert ({one_line(error)}): copy it again, or "
            "save it once with transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    return backend


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


_JSON = "tokenizer.json"
_KEEPING = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
"""Pre-tokenizers that part texts, and leave out nothing unless they are told so."""

_LIBRARY = RustLibrary("tokenizers")

_READERS = {_MODEL: read_sentencepiece, TEKKEN: read_tekken, TIKTOKEN: read_tiktoken}
"""Files that are converted, where there is no tokenizer.json."""
_SLOW_FILES = ("vocab.json", "vocab.txt", "spiece.model")


_BEFORE, _BEHIND = ("", "a", ".", " ", "\n", "\n\n"), ("", "a", ".", " ", "\n", "\n\n", '"')
"""What may stand beside a mark in a text, and go with its first or last character."""


class _Lengths(msgspec.Struct):
    """What tokenizer.json asks for of the lengths of texts."""

    truncation: Any = None
    padding: Any = None


class Tokenizer:
    """A fast tokenizer as transformers applies it: the post-processor of tokenizer.json adds the special tokens.

    A file may ask for what the library cannot do with some texts: then methods raise LibraryPanicError.
    """

    def __init__(self, backend: tokenizers.Tokenizer, path: Path, content: bytes | None = None) -> None:
        """Wrap `backend`, read from `path` (for messages): from a tokenizer.json of this `content`, where there is one.
        Padding and truncation that the file asks for are off."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._content = content
        self.path = path
        self._decodings: dict[frozenset[str], Decoding] = {}

    def is_of_one_file(self, other: Tokenizer) -> bool:
        """Whether both were read from files of the same content, as pairs of one family have them: their tokens need
        not be compared, of which 128,000 take a quarter of a second."""
        return self._backend is other._backend

    @_LIBRARY
    def as_json(self) -> str:
        """What tokenizer.json has, or would have, without padding and truncation. The library itself writes a line for
        each id up to the largest: where one is absurd it fills all memory, and ends the process."""
        if self._content is None:
            text: str = self._backend.to_str()
            return text
        lengths = msgspec.json.decode(self._content, type=_Lengths)
        if lengths == _Lengths():
            return self._content.decode()
        return json.dumps(json.loads(self._content) | msgspec.structs.asdict(_Lengths()))

    @_LIBRARY
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the beginning-of-sequence token where the checkpoint's tokenizer adds one."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    @_LIBRARY
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts at once: in as many threads as RAYON_NUM_THREADS and TOKENIZERS_PARALLELISM allow,
        and without the interpreter, which this process's other threads have meanwhile."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    @_LIBRARY
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know (a model's padding) give nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decoding(self, skip_special_tokens: bool = True, end_token_ids: Sequence[int] = ()) -> Decoding:
        """Decode token by token: what each adds to a text. It is shared by all texts of this tokenizer. Special tokens
        that are not skipped are there as they are written, but for `end_token_ids`."""
        left_out = self.special_tokens
        if not skip_special_tokens:
            left_out &= {self._backend.id_to_token(token) for token in end_token_ids}
        found = self._decodings.get(left_out)
        if found is None:
            found = Decoding(read_chain(self._backend.decoder), self._backend.id_to_token, left_out)
            self._decodings[left_out] = found
        return found

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Tokens that are no text, as they are written."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def most_bytes_of_a_token(self) -> int | None:
        """UTF-8 bytes of text that one token may stand for, at most; None where that is not known, because texts are
        made others before they become tokens, or some of them may leave no token."""
        backend = self._backend
        keeps = backend.pre_tokenizer is None or _keeps_all(json.loads(backend.pre_tokenizer.__getstate__()))
        strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if not isinstance(backend.decoder, ByteLevel) or backend.normalizer is not None or not keeps or strips:
            return None
        # Tokens are spelled with a character for each byte, added ones as they are.
        return max((len(token.encode()) for token in self.vocabulary()), default=None)

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included; the model's vocabulary may be padded beyond."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, as the vocabulary has it; None where there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def vocabulary(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    def token_bytes(self) -> TokenBytes:
        """What each token stands for.

        Raises:
            CheckpointError: that cannot be told of tokenizers of this kind.
        """
        kinds = decoder_kinds(self._backend.decoder) if self._backend.decoder is not None else []
        added = self._backend.get_added_tokens_decoder()
        found = read_token_bytes(
            kinds,
            self.vocabulary(),
            {token: entry.content for token, entry in added.items() if not entry.special},
            {token: entry.content for token, entry in added.items() if entry.special},
        )
        if found is None:
            names = ", ".join(str(kind["type"]) for kind in kinds) or "none"
            raise CheckpointError(
                f"{self.path}: its tokens cannot be matched with those of another tokenizer, as only byte-level and "
                f"SentencePiece's can (its decoder is {names})"
            )
        return found

    @_LIBRARY
    def spellings(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Token sequences that hold a text, alone and beside others, where its first and last characters may be tokens
        with what stands beside them; that of the text alone first. One of a token has no other."""
        places = [(before, after) for before in _BEFORE for after in _BEHIND]
        encoded = self._backend.encode_batch(
            [before + text + after for before, after in places], add_special_tokens=False
        )
        found: dict[tuple[int, ...], None] = {}
        for (before, _), encoding in zip(places, encoded, strict=True):
            begin, end = len(before), len(before) + len(text)
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            found[tuple(token for token, (first, last) in spans if first < end and last > begin)] = None
        found.pop((), None)
        return tuple(found)

    @_LIBRARY
    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each of `words`, at the start of a text and behind a space; no duplicates."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encoded if encoding.ids))


def _keeps_all(kind: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer, as tokenizer.json has it, is known to leave out no character."""
    if kind["type"] == "Sequence":
        return all(map(_keeps_all, kind["pretokenizers"]))
    return kind["type"] in _KEEPING and kind.get("behavior") != "Removed"


def hash_tokenizer_files(directory: Path) -> str:
    """Tells the tokenizer of a model directory from others, one that cannot be read from all."""
    for name in (_JSON, *_READERS):
        try:
            return hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except OSError:
            pass
    return "none"


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Read the tokenizer of a model directory; None when it has none, and only token ids can be used.

    Raises:
        CheckpointError: tokenizer.json is damaged, or the directory has a tokenizer of another kind only.
    """
    file = path / _JSON
    if not file.is_file():
        for name in _READERS:
            if (path / name).is_file():
                return Tokenizer(_convert(path, name, hash_tokenizer_files(path)), path)
        slow = next((name for name in _SLOW_FILES if (path / name).is_file()), None)
        if slow is None:
            return None
        raise CheckpointError(
            f"{path} has {slow} but no tokenizer.json; save it once with transformers "
            f"(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    try:
        backend, content = _read_backend(file.read_bytes())
        return Tokenizer(backend, path, content)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is no tokenizer that can be read ({one_line(error)}): copy it again") from None


@lru_cache(maxsize=2)
def _convert(path: Path, name: str, content: str) -> tokenizers.Tokenizer:
    """Convert a file, once for its content: it takes seconds."""
    return _READERS[name](path)


@lru_cache(maxsize=2)
@_LIBRARY
def _read_backend(content: bytes) -> tuple[tokenizers.Tokenizer, bytes]:
    """Read the content of tokenizer.json, and keep the result: a start reads the same several times, of target and
    draft, and each takes a part of a second. Nothing alters the tokenizer but `Tokenizer`, always alike."""
    return tokenizers.Tokenizer.from_buffer(content), content


def read_shared_tokenizer(target: Path, draft: Path | None) -> Tokenizer | None:
    """The target's tokenizer, once it is known to be the draft's too; None where the target has none.

    Args:
        target: directory of the target's tokenizer.
        draft: the draft's directory; None without a draft model.

    Raises:
        CheckpointError: one is damaged, or the two differ.
    """
    tokenizer = read_tokenizer(target)
    other = read_tokenizer(draft) if draft is not None else None
    if tokenizer is not None and other is not None:
        check_same_tokenizer(tokenizer, other)
    return tokenizer


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that both spell every token with the same id; sizes that differ only by the models' padding are not seen
    here, because padding has no tokens.

    Raises:
        CheckpointError: they differ; names the first token that does.
    """
    if target.is_of_one_file(draft):
        return
    target_tokens, draft_tokens = target.vocabulary(), draft.vocabulary()
    if target_tokens == draft_tokens:
        return
    by_id = {index: token for token, index in target_tokens.items()}
    draft_by_id = {index: token for token, index in draft_tokens.items()}
    first = min(index for index in by_id.keys() | draft_by_id.keys() if by_id.get(index) != draft_by_id.get(index))

    def spell(tokens: dict[int, str]) -> str:
        return f"'{tokens[first]}'" if first in tokens else "missing"

    raise CheckpointError(
        f"target and draft have different tokenizers: token {first} is {spell(by_id)} in {target.path} but "
        f"{spell(draft_by_id)} in {draft.path}; use a draft that was trained with the target's tokenizer, or leave "
        "draft.vocabulary out"
    )
