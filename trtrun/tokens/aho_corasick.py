"""Many sequences looked for at once in one that grows: an Aho-Corasick automaton, made as far as it is walked.

A state is the longest end of what came so far that begins a sequence. What a step costs depends neither on how many
sequences there are nor on how long they are, but for a search among them where a state is reached for the first time;
so the automaton of a request is made at once, and its completions share it. It knows symbols (characters of strings,
tokens of tuples), and neither texts nor tokenizers.

Source: A. V. Aho, M. J. Corasick, "Efficient string matching: an aid to bibliographic search", 1975.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

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
