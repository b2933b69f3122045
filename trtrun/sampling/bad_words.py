"""Words that must not be generated: sequences of tokens whose last one is masked where the others stand before it.

What that takes does not grow with the number of words times the longest. On the CPU the beginnings of words are sorted
by their tokens from the last to the first, and one binary search a position finds those that the text ends with: of
what sorts no higher than the text, all that it ends with are beginnings' own endings, one of the other. Elsewhere each
token of each beginning is compared at each position, in a fixed number of operations whatever the text. Both give the
same. They know one row's tokens and logits, and no request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trtrun.core.token_lists import TokenSequences

_TOKEN = np.dtype(">i4")
"""Bytes of such numbers sort as the numbers do, as long as these are not negative; equal ones are equal anyway."""

_NO_TOKEN = -2
"""Stands before the row's first token. No token of a word is negative."""


class BadWords:
    """The bad words of a request, for rows on one device.

    Args:
        sequences: those that a text may hold; whose last token is outside the vocabulary cannot be generated.
        vocabulary: V.
        device: where logits live.
    """

    def __init__(self, sequences: TokenSequences, vocabulary: int, device: torch.device) -> None:
        ends = sequences.starts + sequences.lengths
        kept = sequences.tokens[ends - 1] < vocabulary
        self._tokens = sequences.tokens
        self._starts, self._lasts = sequences.starts[kept], ends[kept] - 1
        self._device = device
        self.longest_prefix = int((self._lasts - self._starts).max(initial=0))

    def __bool__(self) -> bool:
        """Whether any word can be generated."""
        return len(self._lasts) > 0

    def ban_(self, logits: Tensor, token_ids: Tensor, length: Tensor, draft_tokens: Tensor | None) -> Tensor:
        """Mask, in place, the last token of each word wherever the tokens before the position are its beginning.

        Prompt tokens can begin a word, as in transformers' NoBadWordsLogitsProcessor.

        Args:
            logits: [P, V] float32 of one row.
            token_ids: [W] integer tokens of the row, valid below `length`.
            length: [] int64, the position that logits[0] chooses.
            draft_tokens: [P - 1] int64, or None when P is 1; position i stands behind i of them.
        """
        if logits.device.type == "cpu":
            return self._ban_by_search_(logits, token_ids, length, draft_tokens)
        return self._ban_by_comparing_(logits, token_ids, length, draft_tokens)

    @cached_property
    def _sorted(self) -> _SortedPrefixes:
        return _sort_prefixes(self._tokens, self._starts, self._lasts)

    def _ban_by_search_(self, logits: Tensor, token_ids: Tensor, length: Tensor, draft_tokens: Tensor | None) -> Tensor:
        prefixes, end = self._sorted, int(length)
        if prefixes.banned_anywhere is not None:
            logits.index_fill_(1, prefixes.banned_anywhere, -torch.inf)
        if not prefixes.reversed_bytes:
            return logits
        before = token_ids[max(0, end - self.longest_prefix) : end].numpy()
        if draft_tokens is not None:  # what is behind a row's drafts may be any number
            before = np.concatenate((before, draft_tokens.clamp(_NO_TOKEN, 2**31 - 1).numpy()))
        text = before[::-1].astype(_TOKEN).tobytes()
        width = self.longest_prefix * _TOKEN.itemsize
        for position in range(logits.shape[0]):
            begin = (logits.shape[0] - 1 - position) * _TOKEN.itemsize
            banned = prefixes.find(text[begin : begin + width])
            if banned:
                logits[position].index_fill_(0, torch.tensor(banned), -torch.inf)
        return logits

    @cached_property
    def _compared(self) -> _ComparedPrefixes:
        return _compare_prefixes(self._tokens, self._starts, self._lasts, self._device)

    def _ban_by_comparing_(
        self, logits: Tensor, token_ids: Tensor, length: Tensor, draft_tokens: Tensor | None
    ) -> Tensor:
        table, width = self._compared, max(1, self.longest_prefix)
        places = length + torch.arange(-width, 0, device=logits.device)
        tail = token_ids.gather(0, places.clamp(min=0)).to(torch.int64)
        text = torch.where(places >= 0, tail, _NO_TOKEN)
        if draft_tokens is not None:
            text = torch.cat([text, draft_tokens])
        before = text.unfold(0, width, 1)  # [P, width]: the tokens before each position
        differ = before.index_select(1, width - table.distances) != table.tokens
        sums = torch.nn.functional.pad(differ.cumsum(1, dtype=torch.int32), (1, 0))
        matches = sums.index_select(1, table.ends) == sums.index_select(1, table.starts)
        # Adding -inf needs no index of the true places (which would be read back), and repeated ids do no harm.
        amounts = torch.zeros(matches.shape, dtype=logits.dtype, device=logits.device)
        amounts.masked_fill_(matches, -torch.inf)
        return logits.scatter_add_(1, table.last_tokens.expand(matches.shape), amounts)


class _SortedPrefixes(NamedTuple):
    """The distinct beginnings of words that have any, each with its tokens from the last to the first.

    Attributes:
        reversed_bytes: of each beginning, ascending.
        parents: of each, the longest other one that it ends with, or -1.
        banned: of each, the last tokens of its words.
        banned_anywhere: [b] int64: words of one token; None without any.
    """

    reversed_bytes: list[bytes]
    parents: list[int]
    banned: list[list[int]]
    banned_anywhere: Tensor | None

    def find(self, text: bytes) -> list[int]:
        """The tokens that must not follow a text, whose tokens come from the last to the first."""
        place = bisect_right(self.reversed_bytes, text) - 1
        while place >= 0 and not text.startswith(self.reversed_bytes[place]):
            place = self.parents[place]
        found: list[int] = []
        while place >= 0:
            found += self.banned[place]
            place = self.parents[place]
        return found


def _sort_prefixes(tokens: np.ndarray, starts: np.ndarray, lasts: np.ndarray) -> _SortedPrefixes:
    """Of words that begin at `starts` [b] of `tokens` and end at `lasts` [b]."""
    backwards, size, count = tokens[::-1].astype(_TOKEN).tobytes(), _TOKEN.itemsize, len(tokens)
    anywhere: set[int] = set()
    of_each: defaultdict[bytes, list[int]] = defaultdict(list)
    for start, last, token in zip(starts.tolist(), lasts.tolist(), tokens[lasts].tolist(), strict=True):
        if start == last:
            anywhere.add(token)
        else:
            of_each[backwards[(count - last) * size : (count - start) * size]].append(token)
    ordered = sorted(of_each)
    parents: list[int] = []
    for place, prefix in enumerate(ordered):
        parent = place - 1
        while parent >= 0 and not prefix.startswith(ordered[parent]):
            parent = parents[parent]
        parents.append(parent)
    banned_anywhere = torch.tensor(sorted(anywhere)) if anywhere else None
    return _SortedPrefixes(ordered, parents, [of_each[prefix] for prefix in ordered], banned_anywhere)


class _ComparedPrefixes(NamedTuple):
    """The beginnings of words behind each other, on the device.

    Attributes:
        tokens: [sum of lengths] int64.
        distances: [sum of lengths] int64: how far before the position each of them has to stand, 1 or more.
        starts, ends: [b] int64: where each beginning starts and ends in `tokens`; the same for words of one token.
        last_tokens: [b] int64.
    """

    tokens: Tensor
    distances: Tensor
    starts: Tensor
    ends: Tensor
    last_tokens: Tensor


def _compare_prefixes(
    tokens: np.ndarray, starts: np.ndarray, lasts: np.ndarray, device: torch.device
) -> _ComparedPrefixes:
    """Of words that begin at `starts` [b] of `tokens` and end at `lasts` [b]."""
    lengths = lasts - starts
    ends = np.cumsum(lengths)
    within = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    arrays = (
        tokens[np.repeat(starts, lengths) + within],
        np.repeat(lengths, lengths) - within,
        ends - lengths,
        ends,
        tokens[lasts],
    )
    return _ComparedPrefixes(
        *(torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True) for array in arrays)
    )
