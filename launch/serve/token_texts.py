"""Each token's own part of a completion's text, for those who show tokens apart.

A token alone has no text: a character may take several, and a word's space hangs on what is before it. So the tokens go
through the same steps that made the text, and each has what it made certain: a character of several tokens is its last
one's. It knows tokenizers, and nothing of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.detokenizer import IncrementalDetokenizer
from trtrun.text import Tokenizer


class TokenTexts:
    """The choices of one request."""

    def __init__(self, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], n: int) -> None:
        """Begin behind the prompts.

        Args:
            tokenizer: None where there is no text.
            prompts: the tokens of each prompt.
            n: choices of each.
        """
        self._choices = [
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt)
            for prompt in prompts
            for _ in range(n)
        ]

    def take(self, choice: int, token_ids: Sequence[int], is_end: bool) -> list[str]:
        """The texts of a choice's next tokens. Together they are its text, but that stop strings are not cut off.

        Args:
            choice: its number.
            token_ids: its next tokens.
            is_end: whether no more follow.
        """
        detokenizer = self._choices[choice]
        if detokenizer is None:
            return [""] * len(token_ids)
        texts = [detokenizer.append(token) for token in token_ids]
        if is_end and texts:
            texts[-1] += detokenizer.flush()
        return texts
