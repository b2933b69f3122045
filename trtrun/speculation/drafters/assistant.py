"""Assistants of Gemma 4 on the target ranks: the drafting method `gemma4_mtp`.

An assistant keeps nothing of its own. It is fed a row's newest token beside the target's hidden state of the token
before, then what it drafts beside its own states, and attends each time in what the target keeps of the row, up to that
token before: where it attends does not move on as it drafts (SinglePositionMultiTokenCandidateGenerator of
transformers). So a round asks of it nothing but drafts, and what was rejected leaves no trace.

It knows heads by protocol. It does not know files, or how an assistant computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.head_methods import AssistantSection
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters.running_heads import RunningHeadDrafter
from trtrun.speculation.protocols import PreparedStep, ReadingHeads
from trtrun.speculation.text_drafts import Suggestion
from trtrun.speculation.trees import last_nodes
from trtrun.tensors import cached_range, cached_tensor, inference


class AssistantDrafter(RunningHeadDrafter[ReadingHeads[PreparedStep]], Generic[PreparedStep]):
    """Proposes a chain for each row, step by step; nothing for a row whose hidden state it has not seen."""

    def __init__(self, heads: ReadingHeads[PreparedStep], options: HybridOptions | None = None) -> None:
        """Draft for the rows of `heads`; or where `options` have texts looked up what these say."""
        super().__init__(heads, options)
        self._known: set[int] = set()

    @inference
    @override
    def warm_up(self) -> None:
        """Run steps for numbers of rows that other kernels may serve."""
        self._heads.warm_up()
        count, most = 1, len(self._states)
        while True:
            self._heads.warm_up_rows(count)
            if count == most:
                return
            count = min(2 * count, most)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._given.begin_round(plan)
        # A row that another request has had, or that is computed anew, is known from the end of its prompt on.
        self._known.difference_update(plan.dropped_rows)
        self._known.difference_update(admission.row for admission in plan.admissions)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        device, depth = self._states.device, plan.draft_len
        listed: list[int] = plan.decode_rows.tolist()
        asked: list[int] = plan.draft_lens.clip(min=0).tolist()
        known = [length if row in self._known else 0 for row, length in zip(listed, asked, strict=True)]
        lens = cached_tensor(known, device)
        if not depth:
            self._proposed = Draft(torch.zeros((len(listed), 0), dtype=torch.int64, device=device), lens)
            return self._proposed
        given = self._given.propose(plan)
        if given is not None:
            lens = torch.maximum(lens, torch.minimum(given.is_given.sum(dim=1), cached_tensor(asked, device)))
        if given is not None and len(given.whole_rows(asked)) == len(listed):
            tokens = given.tokens
        else:
            tokens = self._draft(plan, listed, known, given)
        found = None if given is None else given.num_suffix_tokens
        self._proposed = Draft(tokens, lens, num_suffix_tokens=found)
        return self._proposed

    def _draft(self, plan: RoundPlan, listed: list[int], needed: list[int], given: Suggestion | None) -> Tensor:
        """[R, draft_len] int64 for the R rows `listed`, of which each needs as many as `needed` says; `given` are those
        that take the place of the head's."""
        rows = cached_tensor(listed, self._states.device)
        lengths = self._rows.lengths.index_select(0, rows)
        hidden, positions = self._states.index_select(0, rows), self._positions(plan, lengths, needed)
        draft = partial(self._heads.follow, rows, hidden, positions, plan.max_context)
        if given is None and (drafted := self._chain(listed, lengths, draft)) is not None:
            return drafted
        batches = self._heads.prepare_steps(self._heads.tables(rows, plan.max_context), positions)
        token, chosen = self._heads.newest(rows), list[Tensor]()
        for step, batch in enumerate(batches):
            hidden = self._heads.step(batch, token, hidden)
            token = self._choose(plan, listed, lengths + step, hidden)
            if given is not None:
                token = torch.where(given.is_given[:, step], given.tokens[:, step], token)
            chosen.append(token)
            if step + 1 < plan.draft_len:
                # Scratch behind the row's length: penalties of the next step see it; a verdict overwrites it.
                self._rows.token_ids[rows, lengths + step] = token.to(torch.int32)
        return torch.stack(chosen, dim=1)

    def _positions(self, plan: RoundPlan, lengths: Tensor, needed: list[int]) -> Tensor:
        """[R, draft_len] int64: of the last key that a step sees, which is that of the newest token but one, in rows of
        lengths [R]; -1 where a row needs no more."""
        positions = (lengths - 2).clamp(min=0).unsqueeze(1).expand(-1, plan.draft_len)
        if min(needed) == plan.draft_len:
            return positions.contiguous()
        steps = cached_range(0, plan.draft_len, lengths.device)
        return torch.where(steps < cached_tensor(needed, lengths.device).unsqueeze(1), positions, -1)

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Keep the target's state that each row's newest token was chosen from."""
        assert step is not None and step.hidden is not None
        listed: list[int] = plan.decode_rows.tolist()
        if listed:
            assert verdict is not None and self._proposed is not None
            decoded = step.hidden.decoded
            last = last_nodes(self._proposed, verdict).view(-1, 1, 1, 1)
            tapped = decoded.gather(1, last.expand(-1, 1, *decoded.shape[2:])).squeeze(1)
            self._states.index_copy_(0, cached_tensor(listed, self._states.device), self._heads.begin(tapped))
            self._known.update(listed)
        ended = [
            (chunk.row, tapped)
            for chunk, tapped in zip(plan.prefill, step.hidden.prompts, strict=True)
            if chunk.is_last
        ]
        if ended:
            rows = cached_tensor([row for row, _ in ended], self._states.device)
            self._states.index_copy_(0, rows, self._heads.begin(torch.stack([tapped[-1] for _, tapped in ended])))
            self._known.update(row for row, _ in ended)
        self._proposed = None


@DRAFTERS.register("gemma4_mtp")
def make_assistant_drafter(context: DrafterContext) -> Drafter:
    """The assistant over the target's rows."""
    section = context.section
    assert isinstance(section, AssistantSection) and context.heads is not None
    return AssistantDrafter(context.heads, section)
