"""Texts that all rows share, in which a row's last tokens are looked up: a corpus, and answers of the past.

A corpus (REST, He et al. 2023, arXiv:2311.08252) is a suffix array (Manber and Myers 1990) of its texts read backwards:
its places in the order of what stands before them. A row's last tokens have a place in that order, and the places of
longest match are its neighbours. The place is found by looking at many places at a time, the same for all rows, so that
a search takes few operations of the device.

Past answers are the shared tree of SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), bounded in requests and in
tokens: the newest answer is last, and the oldest go first. How long an answer is only the device knows, so that
everything there has one shape whatever it holds, and nothing waits for a GPU. What is in it depends on the rows that
were added and their order alone: ranks that add the same hold the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtrun.speculation.suffixes.continuations import MOST_PLACES, Places
from trtrun.tensors import cached_range

_BRANCHES = 128
"""Places that are looked at in one step of a search."""

_RANK_BITS = 31
"""Bits of a token's rank, and of a place's in a text of so many."""

_NO_TOKEN = -2
"""Stands before the corpus: less than the separator of its texts (-1), and than every token."""


def sort_places(tokens: Tensor, most_matched: int) -> tuple[Tensor, Tensor]:
    """The places behind which a text goes on, in the order of what stands before them.

    By doubling: what is known of all places up to some tokens back gives it for twice as many. Nothing of it waits for
    a GPU.

    Args:
        tokens: [n] int32: texts, a separator (-1) behind each.
        most_matched: tokens before a place that count for its order, at least.

    Returns:
        order [n] int32, and how many of it are such places, [] int64; behind them are the others.
    """
    # In front of everything stands what is less than all: 0.
    ranks, width = tokens.to(torch.int64) + 2, 1
    while True:
        keys, order = _behind(ranks, width).sort(stable=True)
        width *= 2
        if width >= most_matched:
            break
        is_new = torch.ones_like(keys)
        is_new[1:] = keys[1:] != keys[:-1]
        if tokens.device.type == "cpu" and bool(is_new.all()):
            break
        ranks = torch.empty_like(ranks).scatter_(0, order, is_new.cumsum(0))
    goes_on = (tokens >= 0) & torch.cat((tokens[1:] >= 0, tokens.new_zeros(1, dtype=torch.bool)))
    goes_on = goes_on[order]
    num_places = goes_on.sum()
    behind = torch.where(goes_on, goes_on.cumsum(0), num_places + (~goes_on).cumsum(0)) - 1
    return torch.empty_like(tokens).scatter_(0, behind, order.to(torch.int32)), num_places


def _behind(ranks: Tensor, width: int) -> Tensor:
    """[n] int64: by a place's rank, and of equal ones by that of the place `width` before it."""
    keys = ranks << _RANK_BITS
    keys[width:] |= ranks[: max(0, len(ranks) - width)]
    return keys


class SortedCorpus:
    """A corpus on a device."""

    def __init__(self, tokens: Tensor, order: Tensor, most_matched: int, num_places: Tensor | None = None) -> None:
        """Look up at most `most_matched` tokens.

        Args:
            tokens: [n] int32: texts, a separator (-1) behind each.
            order: [places] int32: what `sort_places` says of them, for as many tokens at least.
            most_matched: tokens that are looked up.
            num_places: [] int64 on the device: how many of the order there are; None for all.
        """
        front = tokens.new_full((most_matched,), _NO_TOKEN)
        self._tokens = torch.cat((front, tokens))
        self._order = order
        self._num_places = len(order) if num_places is None else num_places
        self._most = most_matched
        self._spans = [-(-len(order) // _BRANCHES)]
        while self._spans[-1] > 1:
            self._spans.append(-(-self._spans[-1] // _BRANCHES))

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the device."""
        return self._tokens.nbytes + self._order.nbytes

    def find(self, wanted: Tensor, draft_len: int) -> Places:
        """The places of longest match for each row, of equally long ones the nearest before or behind it in the order.

        Args:
            wanted: [R, most_matched] int32: the rows' last tokens, as `last_tokens` has them.
            draft_len: K, tokens behind each.
        """
        device = wanted.device
        start = torch.zeros((len(wanted), 1), dtype=torch.int64, device=device)
        for span in self._spans:
            probes = start + span * cached_range(1, _BRANCHES + 1, device) - 1
            start = start + span * self._is_less(probes, wanted).sum(dim=1, keepdim=True)
        near = start + cached_range(-MOST_PLACES, MOST_PLACES, device)
        exists = (near >= 0) & (near < self._num_places)
        places = self._places(near)
        matched = torch.where(exists, self._match(places, wanted)[0], 0)
        # Of equal ones the nearer first: 0, -1, 1, -2, …
        distance = cached_range(-MOST_PLACES, MOST_PLACES, device)
        distance = torch.where(distance < 0, -2 * distance - 1, 2 * distance)
        best = (matched * 2 * MOST_PLACES - distance).topk(MOST_PLACES, dim=1).indices
        matched, places = matched.gather(1, best), places.gather(1, best)
        behind = places.unsqueeze(2) + cached_range(1, draft_len + 1, device) + self._most
        exists = behind < len(self._tokens)
        tokens = self._tokens[behind.clamp(max=len(self._tokens) - 1)].to(torch.int64)
        counts = ((tokens >= 0) & exists).cumprod(dim=2).sum(dim=2)
        return Places(matched, tokens.clamp(min=0), counts)

    def _places(self, indexes: Tensor) -> Tensor:
        """Places in the corpus of indexes [R, n] in the order, whether they exist or not."""
        return self._order[indexes.clamp(min=0, max=len(self._order) - 1)].to(torch.int64)

    def _match(self, places: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """[R, n] int64: how many tokens up to `places` [R, n] are a row's last ones; and [R, n, most] int32 those that
        stand there."""
        back = cached_range(1, self._most + 1, places.device)
        before = self._tokens[places.unsqueeze(2) + back]
        # The nearer to the newest token, the more: what is most is where the first other token stands.
        nearest = ((before != wanted.unsqueeze(1)) * back.to(torch.uint8)).amax(dim=2)
        return self._most - nearest.to(torch.int64), before

    def _is_less(self, indexes: Tensor, wanted: Tensor) -> Tensor:
        """[R, n] bool: whether the places at `indexes` [R, n] of the order are there and stand before the rows' own."""
        matched, before = self._match(self._places(indexes), wanted)
        other = (self._most - 1 - matched).clamp(min=0)
        stands = before.gather(2, other.unsqueeze(2)).squeeze(2)
        return (stands < wanted.gather(1, other)) & (indexes < self._num_places)


def bytes_of_corpus(num_tokens: int, most_matched: int) -> int:
    """Bytes that a corpus of so many tokens takes on a device at most, where each has a place in the order."""
    return 4 * (2 * num_tokens + most_matched)


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
