"""What becomes of a prompt: its tokens, checked, and the requests that complete it.

Everything that the engine core takes passes through here: what gets through can be carried by the wire and computed by
the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Thread
from typing import Any, Protocol

from llguidance import LLTokenizer

from trtrun.core.guide import Guide
from trtrun.core.nouns import LoadedAdapter, Request
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.token_lists import NO_LISTS, ThoughtBounds, TokenLists, TokenSequences
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError, one_line, shorten
from trtrun.guiding.grammars import Grammars, Spelling, grammars_of
from trtrun.tokens.text import Tokenizer

Prompt = str | Sequence[int]

_KEPT_WORD_LISTS = 16
_LAST_TOKENS = 16
"""Tokens at a prompt's end in which thoughts may begin."""


class Vocabulary(Protocol):
    """What prompts have to know of a model.

    Attributes:
        vocab_size: tokens that it knows.
        eos_token_ids: those that end a text; may be none.
    """

    @property
    def vocab_size(self) -> int:
        """The number of the model's tokens."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""


class PromptReader:
    """Turns prompts and sampling parameters into requests of one model."""

    def __init__(self, model: Vocabulary, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tokens: LLTokenizer | None = None
        self._grammars: Grammars | None = None
        # The prompts of one call have the same words, which are made tokens once.
        self._spellings = lru_cache(_KEPT_WORD_LISTS)(_spellings_of(tokenizer)) if tokenizer is not None else None
        self._bad_word_ids = lru_cache(_KEPT_WORD_LISTS)(_sequences_of(tokenizer)) if tokenizer is not None else None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's tokens.

        Args:
            prompt: a text, or token ids: a sequence of them, a tensor or an array of one dimension.

        Raises:
            InvalidRequestError: it is empty, holds an id outside the vocabulary, is a text that cannot be tokenized, or
                is no prompt at all.
        """
        return self._check_tokens(self._encode_text(prompt) if isinstance(prompt, str) else _token_ids(prompt))

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """The tokens of several texts, made at once.

        Raises:
            InvalidRequestError: as of `encode`, for the first text that is wrong.
        """
        try:
            encoded = self._tokenizer.encode_all(texts) if self._tokenizer is not None else None
        except MemoryError:
            raise
        except Exception:  # as in `_encode_text`; one after the other says which text it is
            encoded = None
        if encoded is None:
            return [self.encode(text) for text in texts]
        return [self._check_tokens(tuple(ids)) for ids in encoded]

    def _check_tokens(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens, unless there are none, or some that the model has not."""
        if not tokens:
            raise InvalidRequestError("the prompt is empty: it needs at least one token")
        size = self._model.vocab_size
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < size:
            return tokens  # in the interpreter's own loops: prompts may be long, and rounds wait for this
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequestError(f"prompt token {shorten(token)} is not a token id between 0 and {size - 1}")
        return tokens

    def requests(
        self,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        next_id: Callable[[], int],
        max_length: int,
        adapter: LoadedAdapter | None = None,
    ) -> Iterator[Request]:
        """The `n` requests of a prompt; each has a seed of its own, derived from the prompt's.

        Args:
            tokens: from `encode`.
            sampling: of the prompt, that `check` lets through.
            next_id: called for the request_id of each.
            max_length: tokens that a text may have, prompt and output.
            adapter: that `sampling` names.
        """
        stops = self._stop_ids(sampling)
        lists = self._lists(sampling, stops, tokens, min(max_length, len(tokens) + sampling.max_tokens))
        first = sampling.with_seed()
        for index in range(sampling.n):
            yield Request(next_id(), tokens, first.of_completion(index), stops, lists, adapter)

    def _lists(
        self, sampling: SamplingParams, stops: frozenset[int], tokens: tuple[int, ...], longest: int
    ) -> TokenLists:
        """What ranks learn of the tokens that parameters name, for texts of at most `longest` tokens that begin with
        `tokens`."""
        words = self._encode_bad_words(sampling.bad_words).within(longest, self._model.vocab_size)
        held = stops if sampling.min_tokens > 0 else ()
        thoughts = self._bound_thoughts(sampling, tokens)
        if not (held or sampling.logit_bias or words or thoughts):
            return NO_LISTS
        return TokenLists.of(held, sampling.logit_bias, words, thoughts)

    def _bound_thoughts(self, sampling: SamplingParams, tokens: tuple[int, ...]) -> ThoughtBounds | None:
        """What bounds the thoughts behind a prompt's tokens."""
        budget, (begin, *ends) = sampling.thinking_token_budget, sampling.thinking_marks
        if budget is None or self._tokenizer is None or self._spellings is None or budget >= sampling.max_tokens:
            return None
        if begin and self.ends_with(tokens, begin):
            begin = ""
        begins = TokenSequences.of(self._spellings(begin) if begin else ())
        spelled = [spelling for end in ends for spelling in self._spellings(end)]
        return ThoughtBounds(budget, begins, TokenSequences.of(spelled))

    def thoughts_without_stops(self, sampling: SamplingParams, tokens: Sequence[int]) -> tuple[str, str] | None:
        """The marks of thoughts in which stop strings are not looked for, as they are behind a prompt's tokens; None
        where stop strings count in all of the text."""
        if sampling.stop_in_thoughts or not sampling.stop:
            return None
        begin, end, *_ = sampling.thinking_marks
        return ("" if begin and self.ends_with(tokens, begin) else begin), end

    def ends_with(self, tokens: Sequence[int], mark: str) -> bool:
        """Whether a prompt's text ends with a mark, and blanks perhaps."""
        if self._tokenizer is None:
            return False
        end = self._tokenizer.decode(tokens[-_LAST_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(mark)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens of the model that end a text."""
        return self._model.eos_token_ids

    def check(self, sampling: SamplingParams) -> None:
        """Raise InvalidRequestError for a parameter that this model cannot follow."""
        size = self._model.vocab_size
        given = {
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": sampling.logit_bias,
            "draft_token_ids": sampling.draft_token_ids,
        }
        for name, ids in given.items():
            if ids and max(ids) >= size:  # none is below 0
                token = next(token for token in ids if token >= size)
                raise InvalidRequestError(f"{name}: {shorten(token)} is not a token id between 0 and {size - 1}")
        if sampling.thinking_token_budget is not None:
            self._check_end_of_thoughts(sampling.thinking_marks[1])
        if (sampling.stop or sampling.bad_words) and self._tokenizer is None:
            raise InvalidRequestError("stop and bad_words need a tokenizer, which this checkpoint does not have")
        self._check_some_allowed(sampling)
        if sampling.guided is not None:
            self._compile_guide(sampling.guided)

    def _check_end_of_thoughts(self, mark: str) -> None:
        """Refuse a mark behind thoughts that cannot be forced."""
        if self._tokenizer is None or self._spellings is None:
            line = "thinking_token_budget needs a tokenizer, which this checkpoint does not have: leave it out"
            raise InvalidRequestError(line)
        spelled = self._spellings(mark)
        if not spelled or mark not in self._tokenizer.decode(spelled[0], skip_special_tokens=False):
            raise InvalidRequestError(
                f"thinking_marks: this model's tokenizer cannot write {show_value(mark)}, so it cannot end thoughts"
            )

    def ids_in_guides(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of the texts that grammars cannot spell, because these are special tokens to them.

        Raises:
            InvalidRequestError: this model's texts cannot be guided.
        """
        tokens, found = self._guide_tokens(), {}
        for text in texts:
            token = None if self._tokenizer is None else self._tokenizer.token_to_id(text)
            if token is not None and tokens.is_special_token(token):
                found[text] = token
        return found

    def prepare_guides(self) -> None:
        """Have the vocabulary read in a thread, before the first guide is checked: it would hold up what this process
        does then."""
        with suppress(InvalidRequestError):  # told whoever asks for something guided
            Thread(target=_read_ahead, args=(self._spelling(),), daemon=True).start()

    def _spelling(self) -> Spelling:
        return Spelling.of(self._tokenizer, self._model.vocab_size, self._model.eos_token_ids)

    def _guide_tokens(self) -> LLTokenizer:
        """The vocabulary as the grammar engine has it. That it is the same takes as long to find out as the whole
        tokenizer is: so it is kept."""
        if self._tokens is None:
            self._tokens = self._spelling().read()
        return self._tokens

    def _compile_guide(self, guide: Guide) -> None:
        """Refuse a guide that is wrong, or takes more than it may."""
        if self._grammars is None:
            self._grammars = grammars_of(self._guide_tokens())
        self._grammars.check(guide)

    def _check_some_allowed(self, sampling: SamplingParams) -> None:
        """Refuse parameters under which no first token may be chosen, whatever the prompt is."""
        words, size = self._encode_bad_words(sampling.bad_words), self._model.vocab_size
        held = self._stop_ids(sampling) if sampling.min_tokens > 0 else frozenset()
        if len(held) + len(words) >= size:
            alone = words.tokens[words.starts[words.lengths == 1]].tolist()
            if len(held.union(alone)) >= size:
                raise InvalidRequestError(
                    f"min_tokens is {sampling.min_tokens}, and stop tokens and bad_words are all {size} tokens of the "
                    "model: none is left that may be chosen"
                )

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos_token_ids = () if sampling.ignore_eos else self._model.eos_token_ids
        return frozenset(sampling.stop_token_ids + eos_token_ids)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise InvalidRequestError("the target has no tokenizer: give prompt_token_ids instead of text")
        try:
            return tuple(self._tokenizer.encode(text))
        except MemoryError:
            raise  # no fault of the text's alone
        except Exception as error:  # the library raises bare Exception, and Python for half a surrogate pair
            raise InvalidRequestError(f"the prompt cannot be tokenized: {one_line(error)}") from None

    def _encode_bad_words(self, words: tuple[str, ...]) -> TokenSequences:
        if self._bad_word_ids is None or not words:
            return NO_LISTS.bad_words
        try:
            return self._bad_word_ids(words)
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidRequestError(f"bad_words cannot be tokenized: {one_line(error)}") from None


def _read_ahead(spelling: Spelling) -> None:
    with suppress(InvalidRequestError):
        spelling.read()


def _sequences_of(tokenizer: Tokenizer) -> Callable[[tuple[str, ...]], TokenSequences]:
    return lambda words: TokenSequences.of(tokenizer.bad_word_ids(words))


def _spellings_of(tokenizer: Tokenizer) -> Callable[[str], tuple[tuple[int, ...], ...]]:
    return lambda text: tokenizer.spellings(text)


def _token_ids(prompt: Any) -> tuple[int, ...]:
    """The ids of a sequence, a tensor or an array."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequestError(f"a prompt is a text or a list of token ids, not {shorten(prompt)}")
    return tuple(prompt)
