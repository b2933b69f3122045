"""Which continuations to propose, by how often each followed: the rule of SuffixDecoding (Oliaro et al. 2024,
arXiv:2411.04975; Snowflake's arctic-inference).

A row's last tokens stood at some places before, and at each a part of them of some length. The places where at least so
many tokens match are a node of a suffix tree, what follows there are its subtrees, and the share of the places that go
on with some tokens is how likely these are. A short match has many places, and a long one may go on longer. Of all the
lengths of match the one counts whose continuation has most probability in all: the number of tokens that the target
would keep.

The tree is not kept: the places of each row are compared with each other, all rows at once, on the device. Whatever is
compared is whole numbers, or quotients of two that are rounded alike everywhere, and of equal values the first counts:
ranks that see the same places choose the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from trtrun.speculation.found_paths import Continuations
from trtrun.tensors import cached_range, cached_tensor

MOST_PLACES = 16
"""Places of a row that are compared with each other: those of longest match. With 32 no more tokens were accepted."""

_ORDER_BITS = 18
"""Bits for the order: of equal scores the first counts, so its order over 2**18 is taken off. Two scores that differ
are quotients by at most MOST_PLACES, and do so by 1 / 2**8 or more; there are 2**8 orders."""


class Places(NamedTuple):
    """Where the last tokens of some rows stood before.

    Attributes:
        matched: [rows, places] int64: how many of them, 0 where there is no such place; those with most come first.
        tokens: [rows, places, K] int64: what stands behind.
        counts: [rows, places] int64: how much of that there is.
    """

    matched: Tensor
    tokens: Tensor
    counts: Tensor


def join_places(first: Places, second: Places) -> Places:
    """Keep, of the places in two texts, those of longest match, of equally long ones the first text's."""
    matched = torch.cat((first.matched, second.matched), dim=1)
    total = matched.shape[1]
    order = cached_range(0, total, matched.device)
    best = (matched * total - order).topk(min(MOST_PLACES, total), dim=1).indices
    tokens = torch.cat((first.tokens, second.tokens), dim=1)
    return Places(
        matched.gather(1, best),
        tokens.gather(1, best.unsqueeze(2).expand(-1, -1, tokens.shape[2])),
        torch.cat((first.counts, second.counts), dim=1).gather(1, best),
    )


@dataclass(frozen=True)
class SuffixRule:
    """What a continuation must have to be proposed.

    Attributes:
        most_matched: of a row's last tokens that are looked for.
        spec_factor, spec_offset: a match of n tokens goes on for n * spec_factor + spec_offset tokens at most; for any
            number where spec_factor is None.
        min_token_prob: how likely a draft token must be.
    """

    most_matched: int
    spec_factor: float | None
    spec_offset: float
    min_token_prob: float

    @property
    def has_limits(self) -> bool:
        """Whether a match bounds how far it is followed."""
        return self.spec_factor is not None

    def limits(self, device: torch.device) -> Tensor:
        """[most_matched + 1] int64: for how many tokens a match of so many may be followed; none for none."""
        return cached_tensor(_limits(self), device)

    def fewest(self, num_places: int, device: torch.device) -> Tensor:
        """[num_places + 1] int64: how many of so many places must agree on a token."""
        return cached_tensor(_fewest(self, num_places), device)


@lru_cache(maxsize=8)
def _limits(rule: SuffixRule) -> tuple[int, ...]:
    assert rule.spec_factor is not None
    # A factor such as 0.1 is a little less in binary than what was written.
    found = (int(count * rule.spec_factor + rule.spec_offset + 1e-6) for count in range(1, rule.most_matched + 1))
    return (0, *(max(0, one) for one in found))


@lru_cache(maxsize=8)
def _fewest(rule: SuffixRule, num_places: int) -> tuple[int, ...]:
    counts = range(num_places + 1)
    return tuple(max(1, next(n for n in counts if n >= of * rule.min_token_prob - 1e-6)) for of in counts)


def likely_paths(places: Places, rule: SuffixRule, max_paths: int) -> Continuations:
    """The continuation of most probability in all for each row, or `max_paths` of a draft tree."""
    matched, tokens, counts = places
    num_places, draft_len = tokens.shape[1:]
    device = tokens.device
    steps = cached_range(0, draft_len, device)
    is_known = steps < counts.unsqueeze(2)
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (is_known.unsqueeze(2) & is_known.unsqueeze(1))
    # agrees[r, a, b, k]: what stands behind the places a and b is the same for more than k tokens.
    agrees = same.cumprod(dim=3, dtype=torch.float32)
    # is_in[r, m, b]: at least as much matches at place b as at place m, so that it belongs to a match of that length.
    is_in = (matched.unsqueeze(1) >= matched.unsqueeze(2)) & (matched > 0).unsqueeze(1)
    votes = is_in.to(torch.float32).bmm(agrees.flatten(2)).view(-1, num_places, num_places, draft_len)
    sizes = is_in.sum(dim=2)
    votes = votes * (votes >= rule.fewest(num_places, device)[sizes][:, :, None, None])
    # goes_on[r, m, k]: a match as long as at place m may be followed for more than k tokens.
    goes_on = (steps < rule.limits(device)[matched].unsqueeze(2)) if rule.has_limits else None
    kept = votes if goes_on is None else votes * goes_on.unsqueeze(2)
    scores = kept.sum(dim=3).to(torch.float64) * is_in / sizes.clamp(min=1).unsqueeze(2)
    order = cached_range(0, num_places * num_places, device)
    best = (scores.flatten(1) - order / 2.0**_ORDER_BITS).argmax(dim=1, keepdim=True)
    match, place = best // num_places, best % num_places
    of_match = _pick(kept, match) * _pick(is_in, match).unsqueeze(2)
    if max_paths == 1:
        return Continuations(_pick(tokens, place).unsqueeze(1), (_pick(of_match, place) > 0).sum(dim=1, keepdim=True))
    # The last place belongs to the shortest match, which has all of them: what it says comes behind what that one says.
    of_all = votes[:, -1] * is_in[:, -1:].movedim(1, 2)
    of_all = of_all if goes_on is None else of_all * goes_on
    weights = of_match * (1 + num_places * draft_len) + of_all
    return _branches(weights, agrees, tokens, max_paths)


def _branches(weights: Tensor, agrees: Tensor, tokens: Tensor, max_paths: int) -> Continuations:
    """The `max_paths` continuations of most weight together.

    Each adds most to those before it, by tokens that none of them has: no other choice has more in all, as paths of a
    tree that have parted never meet again.

    Args:
        weights: [R, S, K] float32, whole numbers: of each token of each continuation; 0 from its end on.
        agrees: [R, S, S, K] float32 of 0 and 1: how far two continuations are the same.
        tokens: [R, S, K].
    """
    num_places = tokens.shape[1]
    order = cached_range(0, num_places, tokens.device)
    chosen, counts, left = [], [], weights
    for _ in range(max_paths):
        gains = left.sum(dim=2).to(torch.float64)
        place = (gains * num_places - order).argmax(dim=1, keepdim=True)
        is_new = gains.gather(1, place) > 0
        chosen.append(_pick(tokens, place))
        counts.append((_pick(weights, place) > 0).sum(dim=1, keepdim=True) * is_new)
        left = left * (1 - _pick(agrees, place))
    return Continuations(torch.stack(chosen, dim=1), torch.cat(counts, dim=1))


def _pick(values: Tensor, place: Tensor) -> Tensor:
    """[R, …]: of values [R, n, …] that at `place` [R, 1]."""
    index = place.view(-1, *(1 for _ in values.shape[1:]))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:])).squeeze(1)
