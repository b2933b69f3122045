"""A budget for thoughts: where a row has thought for so many tokens, the mark that ends them is forced.

Each position is decided by the tokens before it alone, be they the row's or a draft's: nothing is kept that a rejected
draft could spoil, and nothing is read back from the device. All rows of the same marks take the same few operations. It
knows rows' tokens and logits, and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trtrun.core.token_lists import ThoughtBounds, TokenSequences

_NO_TOKEN = -2
"""Stands where the row has no token yet. No token of a mark is negative."""


class ThinkingBudget:
    """The budget of a request's rows.

    Attributes:
        budget: tokens.
        begins, ends: marks, as tokens; the first end is what is forced. Without begins the output begins within them.
        lead: tokens among which the mark in front of thoughts has to stand.
        marks: the same for budgets of the same marks.
        width: tokens of output that are looked at: behind them nothing is forced any more.
    """

    def __init__(self, bounds: ThoughtBounds) -> None:
        """Read what bounds thoughts: one end at least."""
        _, *arrays = bounds.arrays()
        self.budget, self.marks = bounds.budget, tuple(array.tobytes() for array in arrays)
        self.begins, self.ends = _listed(bounds.begins), _listed(bounds.ends)
        self.lead = bounds.lead
        self.width = self.lead + self.budget + len(self.ends[0])


def groups_of(budgets: Sequence[ThinkingBudget | None]) -> list[list[int]]:
    """Which of some rows have a budget, those of the same marks together."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for index, budget in enumerate(budgets):
        if budget is not None:
            groups.setdefault(budget.marks, []).append(index)
    return [*groups.values()]


def force_marks_(
    budgets: Sequence[ThinkingBudget],
    logits: Tensor,
    members: Tensor,
    token_ids: Tensor,
    num_prompt: Tensor,
    lengths: Tensor,
    draft_tokens: Tensor | None,
) -> Tensor:
    """Forbid, in place, all tokens but the next one of the mark where it is due, unless that one is forbidden.

    Args:
        budgets: of n rows, all of the same marks.
        logits: [R, P, V] float32, with -inf for tokens that are forbidden.
        members: [n] int64: which of the R lines are these rows'.
        token_ids: [n, W] integer tokens of the rows, valid below their lengths.
        num_prompt: [n] int64: of these; the output begins there.
        lengths: [n] int64: the positions that logits[members, 0] choose.
        draft_tokens: [n, P - 1] int64, or None when P is 1; position i stands behind i of them.
    """
    first, device = budgets[0], logits.device
    if max(first.ends[0]) >= logits.shape[-1]:  # which this engine does not know
        return logits
    output = _output(token_ids, max(budget.width for budget in budgets), num_prompt, lengths, draft_tokens)
    places = torch.arange(output.shape[1], device=device)
    start = _start(output, first)
    far = output.shape[1]
    ended = torch.where(_matches(output, first.ends) & (places >= start[:, None]), places, far).amin(1)
    of_rows = torch.tensor([budget.budget for budget in budgets], dtype=torch.int64)
    due = start + of_rows.to(device, non_blocking=True)
    mark = torch.tensor(first.ends[0], dtype=torch.int64).to(device, non_blocking=True)
    count = len(first.ends[0])
    step = lengths[:, None] - num_prompt[:, None] + torch.arange(logits.shape[1], device=device) - due[:, None]
    # What stands from `due` on has to be the mark's beginning.
    behind = (due[:, None] + torch.arange(count, device=device)).clamp(max=far - 1)
    matches = torch.ones((len(budgets), count), dtype=torch.bool, device=device)
    matches[:, 1:] = output.gather(1, behind)[:, :-1] == mark[:-1]
    within = step.clamp(0, count - 1)  # which token of the mark
    follows = matches.cumprod(1).bool().gather(1, within)
    tokens, lines = mark[within], torch.arange(logits.shape[1], device=device)
    kept = logits[members[:, None], lines, tokens]
    is_due = (step >= 0) & (step < count) & (ended >= due)[:, None] & follows & (kept > -torch.inf)
    amounts = torch.zeros_like(kept).masked_fill_(is_due, -torch.inf)
    logits.index_add_(0, members, amounts[:, :, None].expand(-1, -1, logits.shape[-1]))
    return logits.index_put_((members[:, None], lines, tokens), kept)


def _output(token_ids: Tensor, width: int, num_prompt: Tensor, lengths: Tensor, draft_tokens: Tensor | None) -> Tensor:
    """The rows' output and the draft behind it, as far as it matters: [n, N] int64, _NO_TOKEN where there is none."""
    places = num_prompt[:, None] + torch.arange(min(width, token_ids.shape[1]), device=token_ids.device)
    written = token_ids.gather(1, places.clamp(max=token_ids.shape[1] - 1)).to(torch.int64)
    output = torch.where(places < lengths[:, None], written, _NO_TOKEN)
    if draft_tokens is None or not draft_tokens.shape[1]:
        return output
    behind = places - lengths[:, None]
    drafted = draft_tokens.gather(1, behind.clamp(0, draft_tokens.shape[1] - 1))
    return torch.where((behind >= 0) & (behind < draft_tokens.shape[1]), drafted, output)


def _start(output: Tensor, budget: ThinkingBudget) -> Tensor:
    """[n] int64: where the first token of thoughts stands; behind all tokens where there are none."""
    if not budget.begins:
        return torch.zeros(len(output), dtype=torch.int64, device=output.device)
    places = torch.arange(output.shape[1], device=output.device)
    begun = _matches(output, budget.begins) & (places < budget.lead)
    return torch.where(begun, places + 1, 2 * output.shape[1]).amin(1)


def _matches(output: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[n, N] bool: behind which tokens one of the sequences is whole."""
    found = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
    for sequence in sequences:
        num_places = output.shape[1] - len(sequence) + 1
        if num_places > 0:
            whole = output[:, :num_places] == sequence[0]
            for place, token in enumerate(sequence[1:], start=1):
                whole &= output[:, place : place + num_places] == token
            found[:, len(sequence) - 1 :] |= whole
    return found


def _listed(sequences: TokenSequences) -> list[list[int]]:
    parts = np.split(sequences.tokens, np.cumsum(sequences.lengths)[:-1]) if len(sequences) else []
    return [part.tolist() for part in parts]
