"""A completion's text while its tokens come: complete characters only, and nothing that may become a stop string.

It knows tokenizers and stop strings. It does not know when a completion ends for other reasons, or who reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from trtrun.text import REPLACEMENT, Tokenizer

_CONTEXT = 5
"""Prompt tokens that decide how the first output token is spelled (its leading space)."""

_MAX_HELD = 8
"""Tokens after which bytes that are no character are let go of: an unfinished one has at most three bytes."""


class IncrementalDetokenizer:
    """Turns token ids into text as they come: what is known of each token, or a step of `tokenizers`' DecodeStream.

    Text is held back while it ends in an unfinished character: what `append` returned is never taken back. The pieces
    add up to the text of all tokens at once, except where a decoder would replace finished characters in hindsight
    (byte-fallback tokenizers, behind bytes that are not UTF-8).
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
        if tokenizer.decode(self._context, skip_special_tokens).endswith(REPLACEMENT):
            self._context = []
        self._own_texts = tokenizer.own_texts(skip_special_tokens)
        self._stream: DecodeStream | None = None
        self._is_stream_due = True  # begun when a token needs it
        self._held: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now certain: what `append` gives, token by token."""
        if self._own_texts is not None and not self._held and token_ids:
            texts = [self._own_texts[token] for token in token_ids]
            if all(texts):
                self._pass(token_ids[-1])
                return "".join(texts)
        return "".join([self.append(token) for token in token_ids])

    def append(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain, which may be empty."""
        if self._own_texts is not None and not self._held and (own := self._own_texts[token_id]):
            self._pass(token_id)
            return own
        if self._is_stream_due:
            self._stream, self._is_stream_due = self._begin_stream(), False
        self._held.append(token_id)
        text = self._step(token_id)
        if text:
            self._context, self._held = self._held, []
            if self._stream is None:
                self._stream = self._begin_stream()
            return text
        return "" if len(self._held) < _MAX_HELD else self._release()

    def flush(self) -> str:
        """The text still held back at the end, unfinished characters as U+FFFD."""
        if not self._held:
            return ""
        text = self._new_text(len(self._held))
        self._context, self._held = self._held, []
        return text

    def _pass(self, token_id: int) -> None:
        """The text is certain up to a token, the newest: a stream begins behind it."""
        self._context = [token_id]
        self._stream, self._is_stream_due = None, True

    def _begin_stream(self) -> DecodeStream:
        return DecodeStream(ids=list(self._context), skip_special_tokens=self._skip)

    def _step(self, token_id: int) -> str:
        """The text that the newest of the held tokens makes certain; all of them, or none."""
        if self._stream is not None:
            try:
                return self._tokenizer.step(self._stream, token_id) or ""
            except Exception:  # a bare one of the library's: what it held back changed with the new token
                self._stream = None
        # Behind bytes that are no characters a stream cannot begin: two decodes a token, until text is certain again.
        text = self._new_text(len(self._held))
        return "" if text.endswith(REPLACEMENT) else text

    def _release(self) -> str:
        """Bytes that will never become a character, or tokens without text: let go of all but the last few, at a place
        that splits no character, so that the work per token stays bounded."""
        text = self._new_text(len(self._held))
        for cut in range(len(self._held) - 3, 0, -1):
            before, after = self._new_text(cut), self._tokenizer.decode(self._held[cut:], self._skip)
            if text in (before + after, before + " " + after):
                if before:
                    self._context = self._held[:cut]
                self._held = self._held[cut:]
                self._stream = None
                return before
        return ""

    def _new_text(self, count: int) -> str:
        known = self._tokenizer.decode(self._context, self._skip)
        return self._tokenizer.decode(self._context + self._held[:count], self._skip)[len(known) :]


class CompletionText:
    """The text of one completion, and where its stop strings end it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str]) -> None:
        """Begin with no text.

        Args:
            detokenizer: behind the completion's prompt.
            stop: strings that end the text; they and what follows them are cut off.
        """
        self._detokenizer = detokenizer
        self._stop = stop
        self._pending = ""
        self._num_passed = 0
        self._is_cut = False

    def append(self, token_id: int) -> None:
        """Add one token."""
        if not self._is_cut:
            self._pending += self._detokenizer.append(token_id)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add tokens of a completion without stop strings; returns what `take` would."""
        assert not self._stop
        return self._detokenizer.extend(token_ids)

    def pass_stops(self) -> None:
        """Stop strings that are whole by now end nothing; one that is not may still."""
        self._num_passed = len(self._pending)

    def cut_at_stop(self) -> bool:
        """Cut the text at the first stop string that ends in what is new since the last look; whether there is one."""
        found = [
            place
            for stop in self._stop
            if (place := self._pending.find(stop, max(0, self._num_passed - len(stop) + 1))) >= 0
        ]
        if found:
            self._pending = self._pending[: min(found)]
            self._is_cut = True
        self._num_passed = len(self._pending)
        return bool(found)

    def take(self) -> str:
        """The text that is new since the last call and will not change, whatever follows. Where it is taken has no
        bearing on where it ends: what may become a stop string stays."""
        shown = len(self._pending) - (self._num_held_back() if self._stop and not self._is_cut else 0)
        text, self._pending = self._pending[:shown], self._pending[shown:]
        self._num_passed = max(0, self._num_passed - shown)
        return text

    def finish(self) -> str:
        """The rest, once no token follows: what may have become a stop string or a character is text after all."""
        if not self._is_cut:
            self._pending += self._detokenizer.flush()
        text, self._pending = self._pending, ""
        return text

    def _num_held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
