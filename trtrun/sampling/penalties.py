"""Changes to the logits that depend on a row's tokens so far: penalties, min_tokens and bad words; and logit_bias.

Functions of one or more rows' logits at P consecutive positions: position i is chosen after the row's tokens and draft
tokens 0 .. i-1, which count as output there. Nothing is read back from the device. Counts are made anew from the row's
tokens each time: there is no state that a rejected draft could spoil.

Bad words are sequences of tokens whose last one is masked where the others stand before it. What that takes does not
grow with the number of words times the longest. On the CPU the beginnings of words are sorted by their tokens from the
last to the first, and one binary search a position finds those that the text ends with: of what sorts no higher than
the text, all that it ends with are beginnings' own endings, one of the other. Elsewhere each token of each beginning is
compared at each position, in a fixed number of operations whatever the text. Both give the same.
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


def count_tokens(
    token_ids: Tensor,
    start: Tensor | None,
    lengths: Tensor,
    draft_tokens: Tensor | None,
    positions: int,
    vocabulary: int,
) -> Tensor:
    """How often each token occurs before each of the positions.

    Args:
        token_ids: [n, W] integer tokens, valid below `lengths`.
        start: [n] int64, the first position that counts; None counts from 0.
        lengths: [n] int64, tokens in the row.
        draft_tokens: [n, positions - 1] int64, or None when positions is 1.
        positions: P.
        vocabulary: V; tokens outside [0, V) are not counted (another engine's vocabulary may be wider).

    Returns:
        [n, P, V] float32.
    """
    rows, width = token_ids.shape
    places = torch.arange(width, device=token_ids.device)
    valid = places < lengths[:, None]
    if start is not None:
        valid &= places >= start[:, None]
    # Bin V takes whatever does not count: shapes stay static and nothing is read back.
    bins = _bins(token_ids.to(torch.int64), valid, vocabulary)
    counts = torch.zeros((rows, vocabulary + 1), dtype=torch.float32, device=token_ids.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=torch.float32))
    if positions == 1 or draft_tokens is None:
        return counts[:, None, :vocabulary].expand(rows, positions, vocabulary)
    steps = torch.arange(positions, device=token_ids.device)
    earlier = steps[None, :-1] < steps[:, None]  # [P, P - 1]: draft token j lies before position i
    bins = _bins(draft_tokens[:, None, :].expand(rows, positions, positions - 1), earlier, vocabulary)
    counts = counts[:, None, :].repeat(1, positions, 1)
    counts.scatter_add_(2, bins, torch.ones_like(bins, dtype=torch.float32))
    return counts[:, :, :vocabulary]


def _bins(tokens: Tensor, valid: Tensor, vocabulary: int) -> Tensor:
    return torch.where(valid & (tokens >= 0) & (tokens < vocabulary), tokens, vocabulary)


def apply_repetition_penalty(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of tokens that occurred (CTRL, Keskar et al. 2019,
    arXiv:1909.05858).

    Args:
        logits: [n, P, V] float32.
        counts: [n, P, V] float32 over prompt and output.
        penalties: [n] float32 above 0; 1 is off.

    Returns:
        [n, P, V] float32, a new tensor.
    """
    penalty = penalties[:, None, None]
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(counts > 0, penalised, logits)


def apply_output_penalties_(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Subtract, in place, `presence` once and `frequency` for each occurrence (as the OpenAI API defines them).

    Args:
        logits: [n, P, V] float32.
        counts: [n, P, V] float32 over the output alone.
        presence, frequency: [n] float32; 0 is off.
    """
    logits.sub_(counts * frequency[:, None, None])
    return logits.sub_((counts > 0) * presence[:, None, None])


def add_logit_bias_(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add `values` [b] float32 to the logits [P, V] of distinct `token_ids` [b] int64 at all positions, in place."""
    return logits.index_add_(1, token_ids, values.expand(logits.shape[0], -1))


def ban_stop_tokens_(logits: Tensor, stop_ids: Tensor, length: Tensor, first_allowed: Tensor) -> Tensor:
    """Mask, in place, the tokens that end a request at positions below `first_allowed`.

    Args:
        logits: [P, V] float32 of one row.
        stop_ids: [b] int64, in [0, V).
        length: [] int64, the position that logits[0] chooses.
        first_allowed: [] int64, num_prompt_tokens + min_tokens.
    """
    positions = length + torch.arange(logits.shape[0], device=logits.device)
    # Adding -inf needs no index of the true places, which would be read back.
    amounts = torch.zeros(positions.shape, dtype=logits.dtype, device=logits.device)
    amounts.masked_fill_(positions < first_allowed, -torch.inf)
    return logits.index_add_(1, stop_ids, amounts[:, None].expand(-1, stop_ids.numel()))


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
    """Prepare words that begin at `starts` [b] of `tokens` and end at `lasts` [b]."""
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
    """Prepare words that begin at `starts` [b] of `tokens` and end at `lasts` [b]."""
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
