"""A budget for thoughts: where a row has thought for so many tokens, the mark that ends them is forced.

Each position is decided by the tokens before it alone, be they the row's or a draft's: nothing is kept that a rejected
draft could spoil, and nothing is read back from the device. It knows one row's tokens and logits, and no text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trtrun.core.token_lists import ThoughtBounds, TokenSequences

_NO_TOKEN = -2
"""Stands where the row has no token yet. No token of a mark is negative."""

_MOST_BLANKS = 4
"""Tokens in front of the mark that thoughts begin with."""


class ThinkingBudget:
    """The budget of a request's rows, on one device.

    Args:
        bounds: whose ends have one sequence at least.
        vocabulary: V; a mark with a token outside of it is never seen, and never forced.
        device: where logits live.
    """

    def __init__(self, bounds: ThoughtBounds, vocabulary: int, device: torch.device) -> None:
        self._budget = bounds.budget
        self._begins, self._ends = _listed(bounds.begins), _listed(bounds.ends)
        self._within = not self._begins
        forced = self._ends[0]
        self._can_force = max(forced) < vocabulary
        self._forced = torch.tensor(forced, dtype=torch.int64).to(device, non_blocking=True)
        # Behind so many tokens of output nothing is forced any more, and nothing before is looked at.
        lead = 0 if self._within else _MOST_BLANKS + max(map(len, self._begins))
        self._width = lead + self._budget + len(forced)

    def force_(
        self, logits: Tensor, token_ids: Tensor, num_prompt: int, length: Tensor, draft_tokens: Tensor | None
    ) -> Tensor:
        """Mask, in place, all tokens but the next one of the mark where it is due, unless that one is forbidden.

        Args:
            logits: [P, V] float32 of one row, with -inf for tokens that are forbidden.
            token_ids: [W] integer tokens of the row, valid below `length`.
            num_prompt: of them; the output begins there.
            length: [] int64, the position that logits[0] chooses.
            draft_tokens: [P - 1] int64, or None when P is 1; position i stands behind i of them.
        """
        if not self._can_force or len(token_ids) <= num_prompt:
            return logits
        output = self._output(token_ids, num_prompt, length, draft_tokens)
        start = self._start(output)
        places = torch.arange(len(output), device=output.device)
        first_end = torch.where(self._matches(output, self._ends) & (places >= start), places, len(output)).min()
        due = start + self._budget
        positions = length - num_prompt + torch.arange(logits.shape[0], device=output.device)
        step = positions - due  # which token of the mark
        count = len(self._forced)
        # What stands from `due` on has to be the mark's beginning.
        written = output.gather(0, (due + torch.arange(count, device=output.device)).clamp(max=len(output) - 1))
        follows = torch.cat([torch.ones_like(step[:1], dtype=torch.bool), (written == self._forced)[:-1]]).cumprod(0)
        within = step.clamp(0, count - 1)
        is_due = (step >= 0) & (step < count) & (first_end >= due) & follows.bool()[within]
        tokens = self._forced[within]
        is_due &= logits.gather(1, tokens[:, None])[:, 0] > -torch.inf
        others = torch.arange(logits.shape[1], device=logits.device) != tokens[:, None]
        return logits.masked_fill_(is_due[:, None] & others, -torch.inf)

    def _output(self, token_ids: Tensor, num_prompt: int, length: Tensor, draft_tokens: Tensor | None) -> Tensor:
        """The row's output and the draft behind it, as far as it matters: [N] int64, _NO_TOKEN where there is none."""
        places = num_prompt + torch.arange(min(self._width, len(token_ids) - num_prompt), device=token_ids.device)
        output = torch.where(places < length, token_ids[places].to(torch.int64), _NO_TOKEN)
        if draft_tokens is None or not len(draft_tokens):
            return output
        behind = places - length
        drafted = draft_tokens[behind.clamp(0, len(draft_tokens) - 1)]
        return torch.where((behind >= 0) & (behind < len(draft_tokens)), drafted, output)

    def _start(self, output: Tensor) -> Tensor:
        """[] int64: where the first token of thoughts stands; behind all tokens where there are none."""
        if self._within:
            return torch.zeros((), dtype=torch.int64, device=output.device)
        far = 2 * self._width
        places = torch.arange(len(output), device=output.device)
        lead = self._width - self._budget - len(self._forced)
        begun = self._matches(output, self._begins) & (places < lead)
        return torch.where(begun, places + 1, far).min()

    @staticmethod
    def _matches(output: Tensor, sequences: list[list[int]]) -> Tensor:
        """[N] bool: behind which tokens one of the sequences is whole."""
        found = torch.zeros(len(output), dtype=torch.bool, device=output.device)
        for sequence in sequences:
            if len(sequence) <= len(output):
                whole = torch.ones(len(output) - len(sequence) + 1, dtype=torch.bool, device=output.device)
                for place, token in enumerate(sequence):
                    whole &= output[place : place + len(whole)] == token
                found[len(sequence) - 1 :] |= whole
        return found


def _listed(sequences: TokenSequences) -> list[list[int]]:
    parts = np.split(sequences.tokens, np.cumsum(sequences.lengths)[:-1]) if len(sequences) else []
    return [part.tolist() for part in parts]
