"""Each token's own part of a completion's text, for those who show tokens apart.

A token alone has no text: a character may take several, and a word's space hangs on what is before it. So the tokens go
through the same steps that made the text, and each has what it made certain: a character of several tokens is its last
one's, and where bytes are tokens of their own, their characters are those of the token behind them. It knows
tokenizers, and nothing of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.tokens.detokenizer import IncrementalDetokenizer, TokenText
from trtrun.tokens.text import Tokenizer


class TokenTexts:
    """The choices of one request."""

    def __init__(self, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], n: int) -> None:
        """Begin behind the prompts.

        Args:
            tokenizer: None where there is no text.
            prompts: the tokens of each prompt.
            n: choices of each.
        """
        self._choices: list[IncrementalDetokenizer | None] = []
        for prompt in prompts:
            first = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt)
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
