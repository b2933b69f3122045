"""The tokens of a checkpoint as the grammar engine (llguidance) reads them: which bytes each of them stands for.

It knows a tokenizer and the size of a model's vocabulary. It does not know grammars or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

from llguidance import LLTokenizer

from trtrun.errors import InvalidRequestError, one_line
from trtrun.tokens.text import Tokenizer

_lock = Lock()


def grammar_tokens(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of `tokenizer` for logits of `vocab_size` numbers. A vocabulary of 128,000 tokens takes about a second
    when it is first asked for; the last ones are kept. From any thread.

    Args:
        tokenizer: of the target.
        vocab_size: of the target; what the tokenizer lacks of it stands for no text, and is never allowed.
        eos_token_ids: tokens that end a text.

    Raises:
        InvalidRequestError: there is no tokenizer, no token that ends a text, or a tokenizer that cannot be read so.
    """
    if tokenizer is None:
        raise InvalidRequestError("guided needs a tokenizer, and the target has none: leave it out")
    if not eos_token_ids:
        raise InvalidRequestError("guided needs a token that ends a text, and the target's configuration names none")
    with _lock:
        return _read(tokenizer.as_json(), max(vocab_size, tokenizer.vocab_size), tuple(eos_token_ids))


@lru_cache(maxsize=2)
def _read(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    try:
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # whatever the library raises for a tokenizer of a kind that it does not know
        raise InvalidRequestError(f"guided cannot be followed with the target's tokenizer: {one_line(error)}") from None
