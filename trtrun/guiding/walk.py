"""What may follow rows that are guided while a draft is made, a token a row and step.

Each step is on the critical path of drafting: while the device computes the next one's logits, the host learns the
tokens, has the matchers take them, and fills one line of bits a row. Nothing is copied, cleared or allocated for it.

It knows matchers and bits. It does not know how drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from llguidance import LLMatcher

from trtrun.guiding.host_copies import HostCopies
from trtrun.guiding.masks import MaskMaker
from trtrun.guiding.round_budget import RoundBudget
from trtrun.sampling.row_steps import TokenMasks


class Walk:
    """Matchers of rows that go on along a draft."""

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
            takes = [(matcher, tokens[self._guided[line]]) for line, matcher in matchers.items()]
            taken = self._maker.consume(takes, self._budget)
            # Nothing that follows a token that was refused can be accepted.
            matchers = {line: fork for (line, fork), is_taken in zip(matchers.items(), taken, strict=True) if is_taken}
        if self._bits is None or told is None:
            # Filled again and again: what was told came behind the copy of what it held before.
            shape = len(self._guided), self._maker.words
            self._bits = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        allowed = self._maker.fill_next(self._bits, matchers, self._budget)
        for line, seconds in self._maker.times:
            self._note(line, seconds)
        for line in self._maker.slow_lines:
            self._end(line)
        self._forks = {line: matchers.get(line) if line in allowed else None for line in self._forks}
        return TokenMasks(self._places, self._bits.to(self._device, non_blocking=True))
