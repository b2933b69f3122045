"""Between text and token ids: a checkpoint's tokenizer.json, and text that grows token by token.

It knows the `tokenizers` library and nothing of models, requests or ranks. Chat templates are not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from trtrun.errors import CheckpointError

_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) UTF-8
_MAX_HELD = 8  # tokens; an unfinished character has at most three bytes, hence at most three tokens
_CONTEXT = 5  # prompt tokens that decide how the first output token is spelled (its leading space)


class Tokenizer:
    """A fast tokenizer as transformers applies it: the post-processor of tokenizer.json adds the special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, path: Path) -> None:
        """Wrap `backend`, read from `path` (for messages). Padding and truncation that the file asks for are off."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.path = path

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the beginning-of-sequence token where the checkpoint's tokenizer adds one."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know (a model's padding) give nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

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
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} is no tokenizer that can be read ({reason}): copy it again") from None


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


class IncrementalDetokenizer:
    """Turns token ids into text as they come, in time linear in their number.

    A token is decoded behind the few before it, because decoders treat the first token of a text specially, and text is
    held back while it ends in an unfinished character: what `append` returned is never taken back. The pieces add up to
    the text of all tokens at once, except where a decoder would replace finished characters in hindsight (byte-fallback
    tokenizers, behind bytes that are not UTF-8).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """Begin behind a prompt.

        Args:
            tokenizer: of the target.
            prompt_token_ids: decides whether the first word begins with a space.
            skip_special_tokens: leave special tokens out of the text.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = list(prompt_token_ids[-_CONTEXT:])
        if self._decode(self._context).endswith(_REPLACEMENT):
            self._context = []
        self._held: list[int] = []

    def append(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain, which may be empty."""
        self._held.append(token_id)
        return self._release()

    def flush(self) -> str:
        """The text still held back at the end, unfinished characters as U+FFFD."""
        text = self._new_text(len(self._held))
        self._context, self._held = self._held, []
        return text

    def _release(self) -> str:
        text = self._new_text(len(self._held))
        if text and not text.endswith(_REPLACEMENT):
            return self._cut(len(self._held), text)
        if len(self._held) < _MAX_HELD:
            return ""
        # Bytes that will never become a character, or tokens without text: let go of all but the last few, at a place
        # that splits no character, so that the work per token stays bounded.
        for cut in range(len(self._held) - 3, 0, -1):
            before, after = self._new_text(cut), self._decode(self._held[cut:])
            if text in (before + after, before + " " + after):
                return self._cut(cut, before)
        return ""

    def _new_text(self, count: int) -> str:
        known = self._decode(self._context)
        return self._decode(self._context + self._held[:count])[len(known) :]

    def _cut(self, count: int, text: str) -> str:
        if text:
            self._context = self._held[:count]
        self._held = self._held[count:]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)
