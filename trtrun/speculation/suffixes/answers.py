"""Answers of the past, in which every row is looked up: the shared tree of SuffixDecoding (Oliaro et al. 2024,
arXiv:2411.04975), bounded in requests and in tokens.

The newest answer is last, and the oldest go first. How long an answer is only the device knows, so that everything here
has one shape whatever it holds, and nothing waits for a GPU. What is in it depends on the rows that were handed in and
their order alone: ranks that hand in the same hold the same.

It knows tokens. It does not know rounds, nor what is made of what is found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtrun.speculation.suffixes.corpus import SortedCorpus, sort_places

_SEPARATOR = -1


class PastAnswers:
    """The last answers on a device."""

    def __init__(self, max_requests: int, max_tokens: int, most_matched: int, device: torch.device) -> None:
        """Keep the answers of `max_requests` requests, and `max_tokens` tokens, one more for each answer; look up at
        most `most_matched` tokens."""
        self._max_requests = max_requests
        self._most_matched = most_matched
        self._tokens = torch.full((max_tokens,), _SEPARATOR, dtype=torch.int32, device=device)
        self._places = torch.arange(max_tokens, device=device)
        self._sorted: SortedCorpus | None = None

    def add(self, token_ids: Tensor, start: int, length: Tensor) -> None:
        """Take in an answer; one that is too long without its beginning, and nothing where there is none.

        Args:
            token_ids: [columns] int32: of its row.
            start: where in the row it begins.
            length: [] int64 on the device: of the row.
        """
        size = len(self._tokens)
        count = (length - start).clamp(min=0, max=size - 1)
        # Behind the answers there are the new one and its separator; all move to the front by as much.
        moved = self._places + count + (count > 0)
        own = moved - size
        new = token_ids[(length - count + own).clamp(min=0, max=len(token_ids) - 1)]
        behind = torch.where(own < count, new, _SEPARATOR)
        tokens = torch.where(own < 0, self._tokens[moved.clamp(max=size - 1)], behind)
        # How many answers end at a place or behind it.
        newer = (tokens == _SEPARATOR).flip(0).cumsum(0).flip(0)
        self._tokens = torch.where(newer <= self._max_requests, tokens, _SEPARATOR)
        self._sorted = None

    def corpus(self) -> SortedCorpus:
        """What there is, to be looked up; sorted anew where answers have come."""
        if self._sorted is None:
            order, num_places = sort_places(self._tokens, self._most_matched)
            self._sorted = SortedCorpus(self._tokens, order, self._most_matched, num_places)
        return self._sorted
