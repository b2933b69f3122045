"""The drafting methods `dflash` and `dspark`: heads on the target ranks that draft all tokens of a row in one forward
(DFlash: arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

Like an EAGLE head (eagle.py) they keep keys and values of every position, made of what the target computed there, and
are fed in every round what it has just read. They keep no state of a row beside: a draft begins with the row's newest
token, and has mask tokens behind it. All its tokens are said at once, but where what is said of a place depends on the
token before (DSpark's Markov head), or a row's parameters do.

It knows rows, the target's step, and heads by protocol. It does not know files, or how heads compute.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.head_methods import DFlashSection
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import RoundPlan
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.speculation.protocols import MaskedHeads, PreparedStep
from trtrun.speculation.text_drafts import Suggestion
from trtrun.tensors import cached_tensor, inference


@DRAFTERS.register("dflash")
@DRAFTERS.register("dspark")
def make_dflash_drafter(context: DrafterContext) -> Drafter:
    """The head over the target's rows."""
    section = context.section
    assert isinstance(section, DFlashSection) and context.heads is not None
    return DFlashDrafter(context.heads, section.draft_len, section)


class DFlashDrafter(EagleDrafter[PreparedStep]):
    """Proposes a chain for each row. It is no sample, so it has no draft_probs: the target chooses its own token at
    every position."""

    def __init__(self, heads: MaskedHeads[PreparedStep], draft_len: int, options: HybridOptions | None = None) -> None:
        """Draft up to `draft_len` tokens for each of the rows of `heads`; where `options` have texts looked up, what
        these say."""
        super().__init__(heads, draft_len, None, options)
        self._masked = heads

    @inference
    @override
    def warm_up(self) -> None:
        """Run the kernels of numbers of rows that other kernels may serve."""
        count, most = 1, len(self._states)
        while True:
            self._masked.warm_up_rows(count, self._draft_len)
            if count == most:
                return
            count = min(2 * count, most)

    def _draft(
        self, plan: RoundPlan, listed: list[int], asked: list[int], given: Suggestion | None
    ) -> tuple[Tensor, Tensor | None]:
        if given is not None and len(given.whole_rows(asked)) == len(listed):
            return given.tokens, None
        rows = cached_tensor(listed, self._states.device)
        lengths = self._rows.lengths.index_select(0, rows)
        states = self._masked.guess(rows, asked, plan.draft_len, plan.max_context)
        has_history = self._rows.sampling.needs_history(listed)
        width = 1 if has_history or self._masked.looks_back else plan.draft_len
        before = self._rows.token_ids[rows, lengths - 1].to(torch.int64)
        chosen = list[Tensor]()
        for start in range(0, plan.draft_len, width):
            span, where = slice(start, start + width), lengths + start
            tokens = self._choose_places(plan, listed, where, states[:, span], before)
            if given is not None:
                tokens = torch.where(given.is_given[:, span], given.tokens[:, span], tokens)
            chosen.append(tokens)
            before = tokens[:, -1]
            if has_history and start + width < plan.draft_len:
                # Scratch behind the row's length: penalties of the next step see it; a verdict overwrites it.
                self._rows.token_ids[rows, where] = before.to(torch.int32)
        return torch.cat(chosen, dim=1), None

    def _choose_places(
        self, plan: RoundPlan, listed: list[int], where: Tensor, states: Tensor, before: Tensor
    ) -> Tensor:
        """[R, n] int64 on all ranks: what the head puts from places `where` [R] of the rows on, by states
        [R, n, hidden], behind tokens `before` [R]."""
        count, width = states.shape[:2]
        logits = self._masked.logits_behind(states.flatten(0, 1), before if self._masked.looks_back else None)
        if logits is None:
            return self._heads.share(where.new_empty((count, width)))
        state = self._rows
        raw = logits.view(count, width, -1)
        found = distributions_of(state.sampling, raw, listed, where, state.token_ids, None, plan.max_context)
        return self._heads.share(found.choose(Stream.TARGET))
