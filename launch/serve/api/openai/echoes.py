"""Prompts in answers of the OpenAI API: `echo` puts a prompt in front of each of its choices, with its tokens' log
probabilities where the request asks for any; `prompt_logprobs` has these as vLLM does.

A prompt's log probabilities come with the first piece of its first completion; what comes of others before waits here.
It knows prompts, tokenizers and pieces, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.serve.api.openai.answer_parts import TokenTexts
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, PromptLogprobs
from trtrun.tokens.detokenizer import TokenText
from trtrun.tokens.text import Tokenizer

Spell = Callable[[int], str]


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
