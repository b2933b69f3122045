"""Between text and token ids: a checkpoint's tokenizer.json.

It knows the `tokenizers` library and nothing of models, requests or ranks. Text that grows token by token is
`detokenizer`'s business; chat templates are nobody's yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from trtrun.errors import CheckpointError, one_line

_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (yet) UTF-8."""


class _OwnTexts(dict[int, str]):
    """The texts of tokens that are whole characters each, made when first asked for; empty for the others."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], self._skip)
        self[token_id] = text = "" if REPLACEMENT in text else text
        return text


class Tokenizer:
    """A fast tokenizer as transformers applies it: the post-processor of tokenizer.json adds the special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, path: Path) -> None:
        """Wrap `backend`, read from `path` (for messages). Padding and truncation that the file asks for are off."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.path = path
        # Such a decoder joins the bytes of its tokens, and nothing else: behind whole characters a token of whole
        # characters is spelled alike wherever it stands.
        self._spells_alike = isinstance(backend.decoder, ByteLevel)
        self._own_texts: dict[bool, _OwnTexts] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the beginning-of-sequence token where the checkpoint's tokenizer adds one."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for several texts at once: in as many threads as RAYON_NUM_THREADS and TOKENIZERS_PARALLELISM allow,
        and without the interpreter, which this process's other threads have meanwhile."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know (a model's padding) give nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """Add one token to a stream of this tokenizer; returns the text that it completes, if any."""
        text: str | None = stream.step(self._backend, token_id)
        return text

    def own_texts(self, skip_special_tokens: bool = True) -> Mapping[int, str] | None:
        """What each token adds to a text that ends in a whole character, whatever that is: empty for tokens of parts of
        characters and for those without text, of which a stream or `decode` has to tell. None where what a token adds
        depends on those before it.
        """
        if not self._spells_alike:
            return None
        return self._own_texts.setdefault(skip_special_tokens, _OwnTexts(self, skip_special_tokens))

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows, added ones included; the model's vocabulary may be padded beyond."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def vocabulary(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each of `words`, at the start of a text and behind a space; no duplicates."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.encode(text, add_special_tokens=False))
                if ids:
                    sequences[ids] = None
        return tuple(sequences)


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Read the tokenizer of a model directory; None when it has none, and only token ids can be used.

    Raises:
        CheckpointError: tokenizer.json is damaged, or the directory has a tokenizer of another kind only.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        slow = next((name for name in _SLOW_FILES if (path / name).is_file()), None)
        if slow is None:
            return None
        raise CheckpointError(
            f"{path} has {slow} but no tokenizer.json; save it once with transformers "
            f"(AutoTokenizer.from_pretrained(…).save_pretrained(…))"
        )
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), path)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is no tokenizer that can be read ({one_line(error)}): copy it again") from None


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
        f"{spell(draft_by_id)} in {draft.path}; use a draft that was trained with the target's tokenizer"
    )
