"""A draft model on the draft ranks that drafts all tokens of a row in one forward.

Behind the row's tokens stand mask tokens, for which the model has learned to say what comes there (An et al. 2025,
PARD, arXiv:2504.18583; nothing of it is the target's, so that one draft serves a family). What it says of a place
depends on the row alone, and not on the tokens that were drafted before it. The store has keys and values of no drafted
token, so that all that a row gained is fed in the next forward, in front of its masks.

It knows an engine by protocol and the rows' sampling parameters. It does not know the target or how its proposal
travels.
"""

from __future__ import annotations

import torch

from trtrun.configuration.drafting.suffix_options import HybridOptions
from trtrun.core.nouns import RoundPlan
from trtrun.guiding.masks import Walk
from trtrun.sampling.distributions import distributions_of
from trtrun.speculation.drafters.draft_model import DraftModelDrafter
from trtrun.speculation.protocols import DraftEngine, PreparedStep
from trtrun.speculation.text_drafts import Suggestion


class ParallelDrafter(DraftModelDrafter[PreparedStep]):
    """Drafts with one forward. Random numbers are the target's, and tokens that came with a request go first, as
    step by step."""

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        target_vocab_size: int,
        use_logits: bool,
        mask_token: int,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft with `engine`, for whose model `mask_token` stands for a token that is not known."""
        super().__init__(engine, target_vocab_size, use_logits, options)
        self._mask_token = mask_token
        self._fed: dict[int, int] = {}

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        super().begin_round(plan)
        for row in plan.dropped_rows:
            self._fed.pop(row, None)
        for admission in plan.admissions:
            self._fed[admission.row] = len(admission.tokens)

    def _unfed(self, row_list: list[int], rows: torch.Tensor, lacking: list[int]) -> list[int]:
        """Tokens to feed of each row: on a device that the host must not wait for as many as it may lack, on a CPU as
        many as it does."""
        if rows.device.type != "cpu":
            return lacking
        lengths: list[int] = self._engine.rows.lengths[rows].tolist()
        counts = [max(1, length - self._fed[row]) for row, length in zip(row_list, lengths, strict=True)]
        self._fed.update(zip(row_list, lengths, strict=True))
        return counts

    def _catch_up(self, plan: RoundPlan, row_list: list[int], rows: torch.Tensor, lacking: list[int]) -> torch.Tensor:
        return self._engine.catch_up(rows, self._unfed(row_list, rows, lacking), plan.max_context)

    def _draft(
        self,
        plan: RoundPlan,
        row_list: list[int],
        rows: torch.Tensor,
        lacking: list[int],
        most: list[int],
        picks: list[int],
        given: Suggestion | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if given is not None and not picks and len(given.whole_rows(most)) == len(row_list):
            self._catch_up(plan, row_list, rows, lacking)
            return given.tokens, None
        counts, places = self._unfed(row_list, rows, lacking), [max(1, count) for count in most]
        logits = self._engine.look_ahead(rows, counts, places, self._mask_token, plan.max_context)
        logits = logits[:, :, : self._vocab_size]
        lengths = self._engine.rows.lengths.index_select(0, rows)
        tokens, probs = self._choose(plan, row_list, rows, lengths, logits, picks, given, self._walk(row_list))
        return tokens, self._known_probs(probs, tokens, picks, given) if probs is not None else None

    def _choose(
        self,
        plan: RoundPlan,
        row_list: list[int],
        rows: torch.Tensor,
        lengths: torch.Tensor,
        logits: torch.Tensor,
        picks: list[int],
        given: Suggestion | None,
        walk: Walk | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From logits [R, draft_len, vocab] tokens [R, draft_len], and of `picks` their distributions; place by place
        where a choice looks at the tokens before it, or `walk` says what may follow."""
        state, chosen, probabilities = self._engine.rows, [], []
        needs_history = state.sampling.needs_history(row_list)
        parts = torch.split(logits, 1, dim=1) if needs_history or walk is not None else (logits,)
        for step, part in enumerate(parts):
            where = lengths + step
            part = part if walk is None else walk.masks().apply(part)
            found = distributions_of(state.sampling, part, row_list, where, state.token_ids, None, plan.max_context)
            tokens = found.choose(self._stream)
            if given is not None:
                span = slice(step, step + tokens.shape[1])
                tokens = torch.where(given.is_given[:, span], given.tokens[:, span], tokens)
            chosen.append(tokens)
            if picks:
                probabilities.append(found.probabilities(picks, self._target_vocab_size))
            if needs_history and step + 1 < len(parts):
                # Scratch behind the row's length, which a verdict overwrites.
                state.token_ids[rows, where] = tokens[:, 0].to(torch.int32)
            if walk is not None:
                walk.tell(tokens[:, 0])
        return torch.cat(chosen, dim=1), torch.cat(probabilities, dim=1) if picks else None
