"""What may follow rows that are guided while a draft is made for them, a token a row and step.

Each step is on the critical path: while the device computes the next one's logits, the host learns the tokens, has the
matchers take them, and fills one line of bits a row. Nothing is copied, cleared or allocated for it on a GPU. What was
made is kept for the round's verification, where the same places are looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from llguidance import LLMatcher

from trtrun.guiding.host_copies import HostCopies
from trtrun.guiding.masks import MaskMaker, RoundBudget
from trtrun.sampling.row_steps import TokenMasks


class MadeMasks(NamedTuple):
    """Masks along one row's draft that were made while it was.

    Attributes:
        lines: in `Walk.made_bits`, of the row's first places in order.
        last: the matcher in front of the mask of the draft's last place, which was not made; nobody else's.
    """

    lines: list[int]
    last: LLMatcher | None


class Walk:
    """Matchers of rows that go on along a draft. What it has made serves again where the draft is verified."""

    def __init__(
        self,
        maker: MaskMaker,
        num_rows: int,
        guided: Sequence[int],
        forks: Sequence[LLMatcher | None],
        device: torch.device,
        end: Callable[[int], None] = lambda line: None,
        note: Callable[[int, float], None] = lambda line, seconds: None,
        budget: RoundBudget | None = None,
    ) -> None:
        """Begin with `forks` of the rows at places `guided` of `num_rows`: nobody else's. `end` is told the index in
        `guided` of a row that holds the others up, and `note` what a mask of one took, in seconds;
        masks are made as far as `budget` goes."""
        self._maker = maker
        self._guided = guided
        self._forks = dict(enumerate(forks))
        self._device = device
        self._end, self._note, self._budget = end, note, budget or RoundBudget()
        places = torch.full((num_rows, 1), -1, dtype=torch.int32)
        places[list(guided), 0] = torch.arange(len(guided), dtype=torch.int32)
        self._places = places.to(device, non_blocking=True)
        self._bits: torch.Tensor | None = None
        self._told: HostCopies | None = None
        # Of each step: the bits on the device, the lines that were made, and what was told behind it.
        self._made: list[torch.Tensor] = []
        self._allowed: list[set[int]] = []
        self._tokens: list[list[int]] = []

    def tell(self, tokens: torch.Tensor) -> None:
        """The rows' drafts go on with `tokens` [rows] int64. Nothing waits for them here: call it before what the
        device does next."""
        self._told = HostCopies(tokens)

    def masks(self) -> TokenMasks:
        """What may come next, one position a row, once what was told is on the host: until the next call."""
        told, self._told = self._told, None
        matchers = {line: fork for line, fork in self._forks.items() if fork is not None}
        if told is not None:
            (tokens,) = told.lists()
            self._tokens.append(tokens)
            takes = [(matcher, tokens[self._guided[line]]) for line, matcher in matchers.items()]
            taken = self._maker.consume(takes, self._budget)
            # Nothing that follows a token that was refused can be accepted.
            matchers = {line: fork for (line, fork), is_taken in zip(matchers.items(), taken, strict=True) if is_taken}
        if self._bits is None or told is None or self._device.type == "cpu":
            # Filled again and again: what was told came behind the copy of what it held before.
            shape = len(self._guided), self._maker.words
            self._bits = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        allowed = self._maker.fill_next(self._bits, matchers, self._budget)
        for line, seconds in self._maker.times:
            self._note(line, seconds)
        for line in self._maker.slow_lines:
            self._end(line)
        self._forks = {line: matchers.get(line) if line in allowed else None for line in self._forks}
        self._allowed.append(allowed)
        self._made.append(self._bits.to(self._device, non_blocking=True))
        return TokenMasks(self._places, self._made[-1])

    def made_bits(self) -> torch.Tensor:
        """[lines, words] int32 on the device: all that was made, step after step."""
        return torch.cat(self._made)

    def made(self, place: int, draft: Sequence[int]) -> MadeMasks | None:
        """The masks of the row at a place of `rows` along its draft, each at most once; None where the draft is another
        one than the row was told, or one of them was not made."""
        if place not in self._guided:
            return None
        line, num_steps, count = self._guided.index(place), len(self._made), len(self._guided)
        num_told = min(len(draft), num_steps - 1)
        if len(draft) > num_steps or len(self._tokens) < num_told:
            return None
        if any(self._tokens[step][place] != draft[step] for step in range(num_told)):
            return None
        if any(line not in self._allowed[step] for step in range(num_told + 1)):
            return None
        lines = [step * count + line for step in range(num_told + 1)]
        last = self._forks.pop(line, None) if len(draft) == num_steps else None
        if last is not None and not last.try_consume_tokens([draft[-1]]):
            last = None
        return MadeMasks(lines, last)
