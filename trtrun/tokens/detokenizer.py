"""A completion's text while its tokens come: what is certain of it, and nothing that may become a stop string.

The text of a completion is what the tokenizer's decoder makes of prompt and completion, behind what it makes of the
prompt. Stop strings are looked for by an Aho-Corasick automaton, made as far as it is walked. A state is the longest
end of what came so far that begins a sequence. What a step costs depends neither on how many sequences there are nor on
how long they are, but for a search among them where a state is reached for the first time; so the automaton of a
request is made at once, and its completions share it.

Source: A. V. Aho, M. J. Corasick, "Efficient string matching: an aid to bibliographic search", 1975.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

from trtrun.errors import LibraryPanicError
from trtrun.tokens.text import Tokenizer

ROOT = 0
"""The state in which nothing is begun."""


class AhoCorasick:
    """The automaton of some sequences. States are numbers, `ROOT` at first; whoever looks keeps theirs."""

    def __init__(self, sequences: Iterable[str] | Iterable[tuple[int, ...]]) -> None:
        """Take the sequences, all strings or all tuples; empty ones are nowhere."""
        # A state is a range of the sorted sequences, which begin with the same symbols, and how many these are.
        self._sequences: list[Any] = sorted(set(filter(None, sequences)))
        self._first = {sequence[0] for sequence in self._sequences}
        self._children: dict[tuple[int, str | int], int] = {}
        self._low, self._high, self._depth = [0], [len(self._sequences)], [0]
        # The longest state that ends as this one does, and the longest sequence that ends in it.
        self._fallback, self._whole = [ROOT], [0]

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._sequences)

    def step(self, state: int, symbol: str | int) -> int:
        """The state behind one more symbol."""
        if state == ROOT and symbol not in self._first:
            return ROOT
        # Each state that is new takes what would have followed in the state that it falls back to as its own fallback.
        found: list[int] = []
        while True:
            child = self._children.get((state, symbol))
            is_new = child is None
            if child is None:
                child = self._reach(state, symbol)
            if child is not None:
                found.append(child)
                if not is_new:
                    break
            if state == ROOT:
                found.append(ROOT)
                break
            state = self._fallback[state]
        for place in range(len(found) - 2, -1, -1):
            new, fallback = found[place], found[place + 1]
            self._fallback[new] = fallback
            self._whole[new] = self._whole[new] or self._whole[fallback]
        return found[0]

    def num_whole(self, state: int) -> int:
        """Symbols of the longest sequence that ends with the newest symbol; 0 where none does."""
        return self._whole[state]

    def num_begun(self, state: int) -> int:
        """Newest symbols that begin a sequence, or are one."""
        return self._depth[state]

    def pass_whole(self, state: int) -> int:
        """The state in which a sequence that is whole counts no more, unless a longer one begins with it."""
        while state != ROOT and not self._goes_on(state):
            state = self._fallback[state]
        return state

    def _goes_on(self, state: int) -> bool:
        low, depth = self._low[state], self._depth[state]
        return self._high[state] - low > 1 or len(self._sequences[low]) > depth

    def _reach(self, state: int, symbol: str | int) -> int | None:
        """A new state, one symbol deeper, without its fallback; None where no sequence goes on so."""
        low, high, depth = self._low[state], self._high[state], self._depth[state]
        low += len(self._sequences[low]) == depth
        if high - low == 1:  # as it is soon, where sequences are long
            if self._sequences[low][depth] != symbol:
                return None
        elif low < high:
            low = bisect_left(self._sequences, symbol, low, high, key=lambda sequence: sequence[depth])
            if low == high or self._sequences[low][depth] != symbol:
                return None
            high = bisect_right(self._sequences, symbol, low, high, key=lambda sequence: sequence[depth])
        else:
            return None
        child = self._children[state, symbol] = len(self._depth)
        self._low.append(low)
        self._high.append(high)
        self._depth.append(depth + 1)
        self._fallback.append(ROOT)
        self._whole.append(depth + 1 if len(self._sequences[low]) == depth + 1 else 0)
        return child


class TokenText(NamedTuple):
    """A token's part in a text.

    Attributes:
        begin: characters of the text before the token's own. A token that goes on with a character begins where that
            does. Among bytes that are tokens of their own, of which a later one may show that they make no characters,
            the characters that they make so far count.
        text: what is certain with the token, which may be empty, or of tokens before it.
    """

    begin: int
    text: str


class IncrementalDetokenizer:
    """Turns token ids into text as they come: what `append` returned is never taken back, and with `flush` it is
    decode(prompt + output)[len(decode(prompt)) :], whatever decoder the tokenizer has.

    Where the output changes how the prompt's last tokens are written, as the second half of a character does or a byte
    behind which those before it are none, there is no such text. It is then what follows that which both decodes begin
    with: with as much of the prompt's text it is the text of all tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin behind a prompt.

        Args:
            tokenizer: of the target.
            prompt_token_ids: decide how the first tokens are written. What this takes does not grow with their number,
                but for bytes at their end; and but for decoders that replace what several tokens spell, cut off the
                end of the whole text, or are not known: these are fed with all of them.
            skip_special_tokens: leave special tokens out of the text.
            end_token_ids: special tokens that are left out of it all the same.
        """
        decoding = tokenizer.decoding(skip_special_tokens, end_token_ids)
        self._names, self._own_texts = decoding.names, decoding.own_texts
        self._chain = decoding.behind(prompt_token_ids)
        # The prompt's own text that is not certain: as far as it becomes certain as it is, it is no output.
        self._of_prompt = self._chain.rest()
        self._is_plain = self._chain.is_neutral and not self._of_prompt
        self._num_certain = 0  # characters, the prompt's among them
        self._num_of_prompt = len(self._of_prompt)  # of them, or to be expected

    def copied(self) -> IncrementalDetokenizer:
        """Make a copy that goes on by itself: completions of one prompt need not read it again."""
        other = copy(self)
        other._chain = self._chain.copied()
        return other

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now certain: what `append` gives, token by token."""
        if self._is_plain and token_ids:
            texts = [self._own_texts[token] for token in token_ids]
            if all(texts):
                return self._count("".join(texts))
        return "".join([self.append(token) for token in token_ids])

    def append(self, token_id: int) -> str:
        """Add one token; returns the text that is now certain, which may be empty."""
        if self._is_plain and (own := self._own_texts[token_id]):
            return self._count(own)
        return self._pass_prompt(self._chain.feed(self._names[token_id]))

    def append_placed(self, token_id: int) -> TokenText:
        """Add one token; returns its text, as `append` does, and where its own begins."""
        if self._is_plain and (own := self._own_texts[token_id]):
            return TokenText(self._num_certain - self._num_of_prompt, self._count(own))
        names, num_kept = self._names[token_id], self._chain.num_characters()
        before, own = self._chain.feed_apart(names[0]) if names else ("", "")
        begin = self._num_certain + (len(before) if before or own else num_kept)
        text = self._pass_prompt(before + own)
        return TokenText(max(0, begin - self._num_of_prompt), text)

    def flush(self) -> str:
        """The text still held back at the end, bytes that make no character as U+FFFD. No token follows."""
        return self._pass_prompt(self._chain.rest())

    def _count(self, text: str) -> str:
        self._num_certain += len(text)
        return text

    def _pass_prompt(self, text: str) -> str:
        """What of newly certain text is output."""
        self._num_certain += len(text)
        if self._of_prompt:
            num_common = _num_common(text, self._of_prompt)
            self._of_prompt = self._of_prompt[num_common:]
            text = text[num_common:]
            if text and self._of_prompt:  # they part here
                self._num_of_prompt -= len(self._of_prompt)
                self._of_prompt = ""
        self._is_plain = not self._of_prompt and self._chain.is_neutral
        return text


def _num_common(first: str, second: str) -> int:
    """Characters that two texts begin with both."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


class _ThoughtEnd:
    """Finds where thoughts end, character by character.

    Attributes:
        is_certain: whether the text begins with thoughts, or does not.
        is_behind: no thoughts follow.
    """

    def __init__(self, begin: str, end: str) -> None:
        """Begin with a text that may begin with the mark `begin`; an empty one: it begins within thoughts."""
        self._begin, self._stop, self._state = begin, AhoCorasick([end]), ROOT
        self.is_certain, self.is_behind = not begin, False

    def pass_thoughts(self, text: str, position: int) -> int:
        """Find in a text, from `position` on, the next character that is not part of the thoughts. What may become
        their mark is asked for again."""
        if not self.is_certain:
            begun = text[position:].lstrip()
            if len(begun) < len(self._begin) and self._begin.startswith(begun):
                return position
            self.is_certain, self.is_behind = True, not begun.startswith(self._begin)
            position = position if self.is_behind else len(text) - len(begun) + len(self._begin)
        while not self.is_behind and position < len(text):
            self._state, position = self._stop.step(self._state, text[position]), position + 1
            self.is_behind = self._stop.num_whole(self._state) > 0
        return position


class CompletionText:
    """The text of one completion, and where its stop strings end it.

    The first stop string that is whole ends the text, the longest where several are with the same character: that
    depends on the text alone, and not on the tokens that it came in.

    Attributes:
        failure: why no more text can be made of its tokens, a line; None while it can. Then nothing is added.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: AhoCorasick,
        keeps_stop: bool = False,
        thoughts: tuple[str, str] | None = None,
    ) -> None:
        """Begin with no text.

        Args:
            detokenizer: behind the completion's prompt.
            stop: strings that end the text; they and what follows them are cut off. Completions may share it.
            keeps_stop: what follows them alone is cut off.
            thoughts: the marks in front of and behind thoughts, in which no stop string is looked for; an empty first
                one where the text begins within them. None where they are text as any other.
        """
        self._detokenizer = detokenizer
        self._stop = stop
        self._keeps_stop = keeps_stop
        self._state = ROOT
        self._pending = ""
        self._num_read = 0  # characters of it that brought the stop strings to their state
        self._is_over = False
        self.failure: str | None = None
        self._thoughts = None if thoughts is None else _ThoughtEnd(*thoughts)

    def copied(self) -> CompletionText:
        """Make a copy that goes on by itself."""
        other = copy(self)
        other._detokenizer = self._detokenizer.copied()
        other._thoughts = copy(self._thoughts)
        return other

    def append(self, token_id: int) -> None:
        """Add one token."""
        if not self._is_over:
            try:
                self._pending += self._detokenizer.append(token_id)
            except LibraryPanicError as panic:
                self._fail(panic)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Add tokens of a completion without stop strings; returns what `take` would."""
        assert not self._stop
        if self._is_over:
            return ""
        try:
            return self._detokenizer.extend(token_ids)
        except LibraryPanicError as panic:
            self._fail(panic)
            return ""

    def pass_stops(self) -> None:
        """Stop strings that are whole by now end nothing; one that is not may still."""
        if not self._is_behind_thoughts():
            return
        step = self._stop.step
        for character in self._pending[self._num_read :]:
            self._state = step(self._state, character)
        self._state = self._stop.pass_whole(self._state)
        self._num_read = len(self._pending)

    def _is_behind_thoughts(self) -> bool:
        """Go on behind thoughts; whether stop strings count from there on."""
        if self._thoughts is None or self._thoughts.is_behind:
            return True
        self._num_read = self._thoughts.pass_thoughts(self._pending, self._num_read)
        return self._thoughts.is_behind

    def cut_at_stop(self) -> bool:
        """Cut the text at the first stop string that is whole since the last look; whether there is one."""
        if not self._is_behind_thoughts():
            return False
        stop, state = self._stop, self._state
        for place in range(self._num_read, len(self._pending)):
            state = stop.step(state, self._pending[place])
            if length := stop.num_whole(state):
                self._pending = self._pending[: place + 1 - (0 if self._keeps_stop else length)]
                self._state, self._num_read, self._is_over = ROOT, len(self._pending), True
                return True
        self._state, self._num_read = state, len(self._pending)
        return False

    def end_tokens(self) -> None:
        """Take note that no token follows: what may have become a character is text after all."""
        if not self._is_over:
            try:
                self._pending += self._detokenizer.flush()
            except LibraryPanicError as panic:
                self._fail(panic)
            self._is_over = True

    def _fail(self, panic: LibraryPanicError) -> None:
        """A tokenizer that gives up on these tokens ends this text, and not the round in which others have theirs."""
        self.failure, self._is_over = f"the tokens cannot be made text: {panic}", True

    def take(self) -> str:
        """The text that is new since the last call and will not change, whatever follows. Where it is taken has no
        bearing on where it ends: what may become a stop string stays."""
        shown = len(self._pending) - self._stop.num_begun(self._state)
        if self._thoughts is not None and not self._thoughts.is_certain:
            shown = self._num_read
        text, self._pending = self._pending[:shown], self._pending[shown:]
        self._num_read = max(0, self._num_read - shown)
        return text

    def finish(self) -> str:
        """The rest, once no token follows: what may have become a stop string is text after all."""
        self.end_tokens()
        text, self._pending = self._pending, ""
        return text
