"""Changes to the logits that depend on a row's tokens so far: penalties and min_tokens; and logit_bias. Bad words are
`bad_words.py`'s.

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
