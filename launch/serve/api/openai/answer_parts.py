"""Parts of answers of the OpenAI API: what a request took, choices that come whole, and each token's own part of a
text.

What a request took, and what speculation did for it, is told as clients and benchmarks read that. What came of a choice
that comes whole is kept as JSON already, and put together at the end.

A token alone has no text: a character may take several, and a word's space hangs on what is before it. So for those who
show tokens apart the tokens go through the same steps that made the text, and each has what it made certain: a
character of several tokens is its last one's, and where bytes are tokens of their own, their characters are those of
the token behind them. It knows counts, fields and tokenizers, and nothing of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from launch.serve.frontend.front import Usage
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
