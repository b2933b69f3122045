"""A draft model whose tokenizer is not the target's, step by step.

What it drafts becomes the target's tokens in one of two ways (Timor et al. 2025, arXiv:2502.05202). It chooses among
the tokens that both have, with the row's own parameters and random numbers, as a draft of the same vocabulary does; or
it says what it likes, and the target's tokenizer makes tokens of the text, which are a proposal without probabilities.
Either way the target verifies its own tokens, and texts are its own. It knows an engine by protocol, rows of both
vocabularies and what these have in common. It does not know the target, nor how texts are spelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

import torch
from torch.nn.functional import pad
from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.found_paths import with_certain_tokens
from trtrun.speculation.protocols import DraftEngine, PreparedStep, Rows
from trtrun.speculation.text_drafts import TextDrafts
from trtrun.speculation.translated_rows import TranslatedRows, Translation
from trtrun.tensors import cached_range, cached_tensor, device_integers, inference


class TranslatedDrafter(Drafter, Generic[PreparedStep]):
    """Drafts with a model of another vocabulary. Where a draft that came with a request holds, or texts say what
    follows, that is proposed in place of what the model says."""

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        translation: Translation,
        use_logits: bool,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft with `engine`."""
        self._engine = engine
        self._translation = translation
        self._vocabularies = translation.vocabularies
        self._rows = translation.rows
        self._vocab_size = translation.target_vocab_size
        self._own = TranslatedRows(engine, translation)
        self._stream = Stream.DRAFT if use_logits else Stream.TARGET
        self._given = TextDrafts(self._rows, None, options)
        self._guides: RowGuides | None = None
        self._columns = self._find_columns().to(engine.device)

    def _find_columns(self) -> torch.Tensor:
        """[columns] int64: what of the draft's logits stands at each of the target's tokens, or the place behind them
        where the draft has no such token. Where drafts become text the other tokens that mean something to the draft
        stand behind the target's, so that its choice of common ones takes the same random numbers as the target's."""
        vocabularies, nowhere = self._vocabularies, self._engine.vocab_size
        columns = torch.full((self._vocab_size,), nowhere, dtype=torch.int64)
        for token, other in vocabularies.common.draft_of.items():
            if token < self._vocab_size and other < nowhere:
                columns[token] = other
        if not self._translation.by_text:
            return columns
        meant = {*vocabularies.draft.of_token, *vocabularies.special_of_draft} - {*columns.tolist()}
        others = sorted(token for token in meant if token < nowhere)
        return torch.cat((columns, torch.tensor(others, dtype=torch.int64)))

    @property
    @override
    def rows(self) -> Rows:
        """Rows in the target's tokens."""
        return self._rows

    @override
    def guide(self, guides: RowGuides) -> None:
        """Propose what must follow, and choose among what may."""
        self._guides = guides
        self._given.guide(guides)

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        self._given.release_rows(plan)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._rows.apply(plan)
        self._own.begin_round(plan)
        self._given.begin_round(plan)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Propose nothing for rows whose texts are not read yet, or that the draft has no room for."""
        row_list: list[int] = plan.decode_rows.tolist()
        device, draft_len = self._engine.device, plan.draft_len
        most: list[int] = plan.draft_lens.clip(min=0).tolist()
        tokens = torch.zeros((len(row_list), draft_len), dtype=torch.int64, device=device)
        lens = torch.zeros(len(row_list), dtype=torch.int64, device=device)
        if not draft_len and row_list:
            return self._finished(Draft(tokens, lens))
        self._own.settle()
        wanted = [place for place, length in enumerate(most) if length]
        beginning = [chunk.row for chunk in plan.prefill]
        ready = self._own.read_prompts([row_list[place] for place in wanted], beginning, draft_len)
        places = [wanted[place] for place in ready]
        probs = None
        if probability_rows:
            probs = torch.zeros((len(probability_rows), draft_len, self._vocab_size), device=device)
        draft = Draft(tokens, lens, probs)
        if places:
            numbers = {place: number for number, place in enumerate(probability_rows)}
            self._draft_rows(plan, places, [most[place] for place in places], numbers, draft)
        return self._finished(self._with_given(plan, draft, probability_rows))

    def _draft_rows(
        self, plan: RoundPlan, places: list[int], most: list[int], numbers: Mapping[int, int], draft: Draft
    ) -> None:
        """Draft for the plan's rows at `places`, as many tokens as `most` says, and put it into `draft`, which has
        draft_probs of some of them, at the places that `numbers` say."""
        listed = plan.decode_rows.tolist()
        rows, at = [listed[place] for place in places], cached_tensor(places, self._engine.device)
        picks = [number for number, place in enumerate(places) if place in numbers]
        chosen, found = self._draft(plan, rows, most, picks)
        if self._translation.by_text:
            draft.tokens[at], draft.draft_lens[at] = self._spell(rows, most, chosen)
        else:
            draft.tokens[at], draft.draft_lens[at] = chosen, cached_tensor(most, at.device)
        if draft.draft_probs is not None and found is not None:
            draft.draft_probs[cached_tensor([numbers[places[pick]] for pick in picks], at.device)] = found

    def _finished(self, draft: Draft) -> Draft:
        """The draft where it is asked for."""
        if self._translation.is_apart and not draft.tokens.is_cpu:
            draft.tokens, draft.draft_lens = draft.tokens.cpu(), draft.draft_lens.cpu()
            if draft.num_suffix_tokens is not None:
                draft.num_suffix_tokens = draft.num_suffix_tokens.cpu()
        return draft

    def _with_given(self, plan: RoundPlan, draft: Draft, probability_rows: Sequence[int]) -> Draft:
        """The draft, with what requests or texts say in place of a row's. Proposals without probabilities are certain
        to be proposed."""
        given = self._given.propose(plan)
        if given is None:
            return draft
        counts = given.is_given.to(torch.int64).cumprod(dim=1).sum(dim=1)
        counts = torch.minimum(counts, cached_tensor(plan.draft_lens.clip(min=0).tolist(), counts.device))
        is_own = (counts > 0).unsqueeze(1)
        tokens, probs = torch.where(is_own, given.tokens, draft.tokens), draft.draft_probs
        if probs is not None:
            index = cached_tensor(probability_rows, tokens.device)
            is_certain = is_own.expand(tokens.shape)[index]
            probs = with_certain_tokens(probs, tokens[index].clamp(0, self._vocab_size - 1), is_certain)
        lens = torch.where(counts > 0, counts, draft.draft_lens)
        return Draft(tokens, lens, probs, num_suffix_tokens=given.num_suffix_tokens)

    def _steps(self, rows: list[int], most: list[int], draft_len: int) -> Sequence[PreparedStep]:
        """What feeds `rows` the tokens of their drafts but the last, as many as `most` says."""
        if draft_len < 2:
            return ()
        device = self._engine.device
        lengths = self._own.lengths(rows)
        steps = cached_range(0, draft_len - 1, device)
        positions = device_integers(lengths, device).unsqueeze(1) + steps
        positions = torch.where(steps + 1 < cached_tensor(most, device).unsqueeze(1), positions, -1)
        tables = self._engine.tables(cached_tensor(rows, device), max(lengths) + draft_len)
        return self._engine.prepare_steps(tables, positions)

    def _draft(
        self, plan: RoundPlan, rows: list[int], most: list[int], picks: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the draft chooses for `rows`, as columns [R, draft_len] int64, which are the target's tokens and others
        behind them, and the distributions that those at `picks` were drawn from, [picks, draft_len, the target's
        vocabulary] float32."""
        logits, draft_len = self._own.catch_up(rows), plan.draft_len
        steps = self._steps(rows, most, draft_len)
        state, index = self._rows, cached_tensor(rows, self._engine.device)
        lengths = state.lengths.index_select(0, index)
        walk = None if self._guides is None or self._translation.by_text else self._guides.walk(rows)
        chosen, fed, probabilities = [], [], []
        for step in range(draft_len):
            where = lengths + step
            raw = pad(logits, (0, 1), value=-torch.inf).index_select(1, self._columns).unsqueeze(1)
            raw = raw if walk is None else walk.masks().apply(raw)
            found = distributions_of(state.sampling, raw, rows, where, state.token_ids, None, plan.max_context)
            token = found.choose(self._stream).squeeze(1)
            chosen.append(token)
            # Where nothing may be chosen it is any token, which the target does not take.
            fed.append(self._columns[token].clamp(max=self._engine.vocab_size - 1))
            if picks:
                probabilities.append(found.probabilities(picks, self._vocab_size))
            if step + 1 < draft_len:
                state.token_ids[index, where] = token.to(torch.int32)
                if walk is not None:
                    walk.tell(token)
                logits = self._engine.decode(steps[step], fed[-1])
        self._own.note_drafts(rows, [length - 1 for length in most], torch.stack(fed, dim=1))
        return torch.stack(chosen, dim=1), torch.cat(probabilities, dim=1) if picks else None

    def _spell(self, rows: list[int], most: list[int], chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was `chosen` for `rows` as text: tokens [R, draft_len] int64 of the target, and how many there are of
        each row, no more than `most`."""
        device, draft_len = self._engine.device, chosen.shape[1]
        spelled = []
        for row, length, drafted in zip(rows, most, self._columns[chosen].tolist(), strict=True):
            found = self._vocabularies.to_target(self._own.last_tokens(row), drafted[:length])[:length]
            usable = next((place for place, token in enumerate(found) if token >= self._vocab_size), len(found))
            spelled.append(found[:usable])
        tokens = [[*of_row, *[0] * (draft_len - len(of_row))] for of_row in spelled]
        return torch.tensor(tokens, device=device), torch.tensor([len(of_row) for of_row in spelled], device=device)

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is None:
            return
        device = self._engine.device
        self._own.note_verdict(plan.sampled_rows, verdict)
        rows = cached_tensor(plan.sampled_rows, device)
        self._rows.advance(rows, verdict.num_tokens.to(device), verdict.tokens.to(device))

    @override
    def close(self) -> None:
        self._engine.close()
