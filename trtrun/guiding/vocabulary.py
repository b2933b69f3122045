"""The tokens of a checkpoint as the grammar engine (llguidance) reads them: which bytes each of them stands for.

It knows a tokenizer and the size of a model's vocabulary. It does not know grammars or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from llguidance import LLTokenizer

from trtrun.errors import InvalidRequestError, RustLibrary, one_line
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
        """Of a target's tokenizer, and its logits of `vocab_size` numbers; what the tokenizer lacks of these stands for
        no text, and is never allowed.

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
