"""An EAGLE head on a rank of its own: it keeps the rows by verdicts, and is told the hidden states that it is fed.

These come beside each verdict, of the tokens that rows have gained, and of chunks of prompts as the target reads them.
So it feeds them as on the target's ranks, and drafts the same. Where those of a round did not come, as the target does
not wait for a rank that is far behind, the head lacks a part of their rows, and proposes nothing for them any more;
that blocks of theirs are reused all the same costs acceptance alone.

It knows verdicts and hidden states. It does not know how these travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.speculation.protocols import PreparedStep
from trtrun.tensors import inference, kept_integers


class ApartEagleDrafter(EagleDrafter[PreparedStep]):
    """See EagleDrafter; drafts and verdicts are on the host."""

    _lacking: frozenset[int] = frozenset()

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._lacking -= {*plan.dropped_rows, *(admission.row for admission in plan.admissions)}
        super().begin_round(plan)

    @inference
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """See Drafter: on the host, as it travels as a message."""
        draft = super().propose(plan, probability_rows)
        # What the target tells of a tree is that of the accepted path alone.
        self._proposed = None
        lens = [
            0 if row in self._lacking else max(0, length)
            for row, length in zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        ]
        found = draft.num_suffix_tokens
        return replace(
            draft,
            tokens=draft.tokens.cpu(),
            draft_lens=torch.tensor(lens, dtype=torch.int64),
            paths=None if draft.paths is None else draft.paths.cpu(),
            num_suffix_tokens=None if found is None else found.cpu(),
        )

    @inference
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """See Drafter: its rows move on, and are fed what came of them."""
        self._proposed = None
        if verdict is not None:
            device = self._states.device
            counts, tokens = (part.to(device, non_blocking=True) for part in (verdict.num_tokens, verdict.tokens))
            verdict = Verdict(counts, tokens)
            self._rows.advance(kept_integers(plan.sampled_rows, device), verdict.num_tokens, verdict.tokens)
        if step is None:
            self._lacking |= fed_rows(plan)
        elif fed_rows(plan):
            super().observe(plan, verdict, step)


def fed_rows(plan: RoundPlan) -> frozenset[int]:
    """Rows that a round feeds to heads: those that something is drafted for in any round."""
    decoding = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
    return frozenset(
        [row for row, length in decoding if length >= 0] + [chunk.row for chunk in plan.prefill if chunk.followed]
    )
