"""Parts of answers of the OpenAI API: usage, choices that come whole, each token's text, and prompts that are echoed.

Usage and speculation's counts are named as clients and benchmarks read them. A choice that comes whole is kept as
JSON, and put together at the end.

A token alone has no text: a character may take several tokens, and a word's space depends on what precedes it. Where
tokens are shown one by one, they go through the same steps that made the text, and each gets the text that it made
certain: a character of several tokens belongs to the last of them.

`echo` puts a prompt in front of each of its choices, with its tokens' log probabilities where the request asks for
any; `prompt_logprobs` gives these as vLLM does. They come with the first piece of the prompt's first completion;
pieces of its other completions wait until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from launch.serve.frontend.frontend import Usage
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, PromptLogprobs
from trtrun.core.request_statistics import RequestStatistics
from trtrun.tokens.detokenizer import IncrementalDetokenizer, TokenText
from trtrun.tokens.text import Tokenizer


def tell_usage(usage: Usage, draft_len: int) -> dict[str, Any]:
    """What a request took, and what speculation did for it, as aiperf reads that."""
    cached = {"prompt_tokens_details": {"cached_tokens": usage.num_cached_prompt_tokens}}
    told: dict[str, Any] = {"usage": tell_tokens(usage) | cached}
    if draft_len:
        told["metrics"] = {"speculative_decoding": _speculation(list(usage.statistics.values()), draft_len)}
    return told


def tell_tokens(usage: Usage) -> dict[str, Any]:
    """Tokens of prompts and completions, so far."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _speculation(statistics: Sequence[RequestStatistics], draft_len: int) -> dict[str, Any]:
    """Sums over all choices, of the rounds that verified a draft: so read aiperf and vLLM's dashboards them.

    Args:
        statistics: of each choice.
        draft_len: tokens drafted in a round, at most.
    """
    histogram = [0] * (draft_len + 1)
    for of_choice in statistics:
        for accepted, number in enumerate(of_choice.acceptance_histogram):
            histogram[accepted] += number
    drafts = sum(of_choice.num_drafts for of_choice in statistics)
    histogram[0] -= sum(of_choice.num_rounds for of_choice in statistics) - drafts  # those without one kept none
    drafted = sum(of_choice.num_draft_tokens for of_choice in statistics)
    accepted = sum(of_choice.num_accepted_draft_tokens for of_choice in statistics)
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": draft_len,
        "mean_acceptance_length": round(1 + accepted / drafts, 4) if drafts else 0.0,
        "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
    }


_ENCODER = msgspec.json.Encoder()


class JsonList:
    """A list as JSON, made as its values come: a whole answer's may have millions."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, values: Sequence[Any]) -> None:
        """Add values at its end."""
        if values:
            self._parts.append(_ENCODER.encode(values)[1:-1])

    def whole(self) -> msgspec.Raw:
        """All of it."""
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


class Choice:
    """What came of one choice so far, its lists as JSON already.

    Attributes:
        text: in parts.
        told: the other fields, as the last piece has them.
    """

    def __init__(self) -> None:
        self.text: list[str] = []
        self.told: dict[str, Any] = {}
        self._lists: dict[str, JsonList] = {}
        self._origins: list[str] = []

    def add(self, text: str, told: dict[str, Any]) -> None:
        """Go on with the next piece."""
        self.text.append(text)
        logprobs = told.get("logprobs")
        if logprobs is not None:
            told["logprobs"] = self._with_lists("logprobs.", logprobs)
        if "token_origins" in told:
            self._origins.append(told["token_origins"])
        self.told = self._with_lists("", told)

    def whole(self, text: dict[str, Any]) -> dict[str, Any]:
        """All of it, with its text as the answer has that."""
        told = _with_whole_lists(self.told)
        if isinstance(self.told.get("logprobs"), dict):
            told["logprobs"] = _with_whole_lists(self.told["logprobs"])
        if "token_origins" in told:
            told["token_origins"] = "".join(self._origins)
        return {"index": told.pop("index"), **text, **told}

    def _with_lists(self, where: str, told: dict[str, Any]) -> dict[str, Any]:
        """The fields, with lists that have what came before in front."""
        return {
            name: self._extended(where + name, value) if isinstance(value, list) else value
            for name, value in told.items()
        }

    def _extended(self, name: str, values: list[Any]) -> JsonList:
        found = self._lists.setdefault(name, JsonList())
        found.extend(values)
        return found


def _with_whole_lists(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.whole() if isinstance(value, JsonList) else value for name, value in told.items()}


class TokenTexts:
    """The choices of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        n: int,
        skip_special_tokens: bool = True,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin behind the prompts.

        Args:
            tokenizer: None where there is no text.
            prompts: the tokens of each prompt.
            n: choices of each.
            skip_special_tokens, end_token_ids: see IncrementalDetokenizer.
        """
        self._choices: list[IncrementalDetokenizer | None] = []
        for prompt in prompts:
            first = None
            if tokenizer is not None:
                first = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens, end_token_ids)
            self._choices += [None if first is None else first.copied() for _ in range(n)]

    def take(self, choice: int, token_ids: Sequence[int], is_end: bool) -> list[TokenText]:
        """The texts of a choice's next tokens, and where each begins. Together they are the choice's text, but that
        stop strings are not cut off.

        Args:
            choice: its number.
            token_ids: its next tokens.
            is_end: whether no more follow.
        """
        detokenizer = self._choices[choice]
        if detokenizer is None:
            return [TokenText(0, "")] * len(token_ids)
        texts = [detokenizer.append_placed(token) for token in token_ids]
        if is_end and texts:
            texts[-1] = TokenText(texts[-1].begin, texts[-1].text + detokenizer.flush())
        return texts


Spell = Callable[[int], str]

_REPLACEMENT = "\ufffd"
_KEPT_SPELLINGS = 2
"""A tokenizer's, and that without one."""


class Spelling:
    """Tokens as texts of their own, for log probabilities: each made once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def spell(self, token: int) -> str:
        """A token's text; where there is none, such as without a tokenizer, its id."""
        text = self._texts.get(token)
        if text is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer is not None else ""
            self._texts[token] = text = text or f"token_id:{token}"
        return text

    def bytes_of(self, token: int) -> list[int] | None:
        """The UTF-8 of what `spell` gives, be it a text or an id; None where it is no text by itself."""
        if token not in self._bytes:
            text = self.spell(token)
            self._bytes[token] = None if _REPLACEMENT in text else list(text.encode())
        return self._bytes[token]


@lru_cache(_KEPT_SPELLINGS)
def spelling_of(tokenizer: Tokenizer | None) -> Spelling:
    """The spelling of a tokenizer, which answers share."""
    return Spelling(tokenizer)


class ScoredPrompts:
    """The log probabilities of a request's prompts, as they come."""

    def __init__(self, n: int, are_awaited: bool) -> None:
        """Begin with none.

        Args:
            n: choices of each prompt.
            are_awaited: whether nothing may be told of a prompt's choices before its log probabilities are there.
        """
        self._n = n
        self._are_awaited = are_awaited
        self._found: dict[int, PromptLogprobs] = {}
        self._waiting: dict[int, list[CompletionDelta]] = {}

    def take(self, delta: CompletionDelta) -> list[CompletionDelta]:
        """Take a piece; returns those that may be told now, in order."""
        prompt = delta.index // self._n
        if delta.prompt_logprobs is not None:
            self._found[prompt] = delta.prompt_logprobs
        elif self._are_awaited and prompt not in self._found:
            self._waiting.setdefault(prompt, []).append(delta)
            return []
        return [delta, *self._waiting.pop(prompt, [])]

    def of_choice(self, choice: int, alternatives: int) -> list[TokenLogprobs | None]:
        """What a choice's prompt has, one entry a token."""
        return self._found[choice // self._n].entries(alternatives)


class EchoedPrompts:
    """The texts of a request's prompts."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], n: int, skip_special_tokens: bool = True
    ) -> None:
        """Make none of them yet: that may take long.

        Args:
            tokenizer: None where there is no text.
            prompts: the tokens of each.
            n: choices of each.
            skip_special_tokens: leave special tokens out of the texts.
        """
        self._skips = skip_special_tokens
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._texts: dict[int, list[TokenText]] = {}
        self._begun: set[int] = set()

    def begins(self, choice: int) -> bool:
        """Whether nothing was told of a choice, the first time that it is asked."""
        if choice in self._begun:
            return False
        self._begun.add(choice)
        return True

    def tokens(self, choice: int) -> list[int]:
        """The prompt's tokens of a choice."""
        return list(self._prompts[choice // self._n])

    def parts(self, choice: int) -> list[TokenText]:
        """Each token's part in the text of a choice's prompt, as the tokenizer writes it."""
        prompt = choice // self._n
        if prompt not in self._texts:
            texts = TokenTexts(self._tokenizer, [()], 1, self._skips)
            self._texts[prompt] = texts.take(0, self._prompts[prompt], is_end=True)
        return self._texts[prompt]

    def text(self, choice: int) -> str:
        """The text of a choice's prompt."""
        return "".join(part.text for part in self.parts(choice))


def tell_logprobs(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], begins: Sequence[int], spell: Spell
) -> dict[str, Any]:
    """Log probabilities as OpenAI's completions have them, each token's own beside the top ones; null where there are
    none, as of a prompt's first token.

    Args:
        tokens: that they are of.
        entries: of each.
        begins: characters of the choice's text before each.
        spell: gives a token's text.
    """
    return {
        "tokens": list(map(spell, tokens)),
        "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
        "top_logprobs": [
            None
            if entry is None
            else {spell(token): value for token, value in ((entry.token_id, entry.logprob), *entry.alternatives[::-1])}
            for entry in entries
        ],
        "text_offset": list(begins),
    }


def tell_prompt_logprobs(entries: Sequence[TokenLogprobs | None], spell: Spell) -> list[Mapping[str, Any] | None]:
    """Log probabilities of a prompt as vLLM has them: by token id, with ranks as far as they are known."""
    return [None if entry is None else _tell_position(entry, spell) for entry in entries]


def _tell_position(entry: TokenLogprobs, spell: Spell) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.alternatives, start=1)}
    return {
        str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": spell(token)}
        for token, value in {entry.token_id: entry.logprob, **dict(entry.alternatives)}.items()
    }
