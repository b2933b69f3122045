"""Changes to the logits that depend on a row's tokens so far: penalties, bad words, min_tokens; and logit_bias.

Pure functions on one or more rows' logits at P consecutive positions: position i is chosen after the row's tokens and
draft tokens 0 .. i-1, which count as output there. They know no admission and no seed. Nothing is read back from the
device. Counts are made anew from the row's tokens each time: there is no state that a rejected draft could spoil.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def _ban_(logits: Tensor, token_ids: Tensor, banned: Tensor) -> Tensor:
    """Set logits [P, V] of `token_ids` [b] to -inf where `banned` [P, b], in place. Adding -inf needs no index of the
    true places (which would be read back), and repeated ids do no harm."""
    amounts = torch.zeros(banned.shape, dtype=logits.dtype, device=logits.device).masked_fill_(banned, -torch.inf)
    return logits.scatter_add_(1, token_ids.expand(banned.shape), amounts)


def ban_stop_tokens_(logits: Tensor, stop_ids: Tensor, length: Tensor, first_allowed: Tensor) -> Tensor:
    """Mask, in place, the tokens that end a request at positions below `first_allowed`.

    Args:
        logits: [P, V] float32 of one row.
        stop_ids: [b] int64, in [0, V).
        length: [] int64, the position that logits[0] chooses.
        first_allowed: [] int64, num_prompt_tokens + min_tokens.
    """
    positions = length + torch.arange(logits.shape[0], device=logits.device)
    return _ban_(logits, stop_ids, (positions < first_allowed)[:, None].expand(-1, stop_ids.numel()))


# In a table of prefixes: matches every token. No token, real or padding (-1), is smaller than _NO_TOKEN.
_ANY_TOKEN = -3
_NO_TOKEN = -2


def bad_word_table(sequences: tuple[tuple[int, ...], ...], vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prefixes, right-aligned and padded on the left, and last tokens of the sequences that must not be generated.

    Sequences whose last token is outside the vocabulary are left out: they cannot be generated.

    Returns:
        prefixes [b][m] with m at least 1, and last tokens [b].
    """
    kept = [sequence for sequence in sequences if 0 <= sequence[-1] < vocabulary]
    width = max([1, *(len(sequence) - 1 for sequence in kept)])
    prefixes = [[_ANY_TOKEN] * (width - len(sequence) + 1) + list(sequence[:-1]) for sequence in kept]
    return prefixes, [sequence[-1] for sequence in kept]


def ban_bad_words_(
    logits: Tensor,
    prefixes: Tensor,
    last_tokens: Tensor,
    token_ids: Tensor,
    length: Tensor,
    draft_tokens: Tensor | None,
) -> Tensor:
    """Mask, in place, the last token of each sequence wherever the tokens before the position are its prefix.

    Prompt tokens can begin a sequence, as in transformers' NoBadWordsLogitsProcessor.

    Args:
        logits: [P, V] float32 of one row.
        prefixes: [b, m] int64 from bad_word_table.
        last_tokens: [b] int64.
        token_ids: [W] integer tokens of the row, valid below `length`.
        length: [] int64.
        draft_tokens: [P - 1] int64, or None when P is 1.
    """
    width = prefixes.shape[1]
    places = length + torch.arange(-width, 0, device=logits.device)
    tail = token_ids.gather(0, places.clamp(min=0)).to(torch.int64)
    tokens = torch.where(places >= 0, tail, _NO_TOKEN)
    if draft_tokens is not None:
        tokens = torch.cat([tokens, draft_tokens])
    before = tokens.unfold(0, width, 1)  # [P, m]: the m tokens before each position
    matches = (before[:, None, :] == prefixes) | (prefixes == _ANY_TOKEN)
    return _ban_(logits, last_tokens, matches.all(-1))
