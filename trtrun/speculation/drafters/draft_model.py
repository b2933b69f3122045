"""The drafting method `draft_target`: a draft model on the draft ranks, in one of four ways.

Step by step: a small model of the same vocabulary runs draft_len steps ahead. Or all tokens in one forward, where the
model was trained for that: behind the row's tokens stand mask tokens, for which it has learned to say what comes there
(An et al. 2025, PARD, arXiv:2504.18583; nothing of it is the target's, so that one draft serves a family). What it says
of a position depends on the row alone, and not on the tokens that were drafted before it. The store has keys and values
of no drafted token, so that all that a row gained is fed in the next forward, in front of its masks.

Both ways also go ahead of verdicts, where the draft has devices of its own (ahead/drafter.py); and step by step in a
vocabulary of its own, where its tokenizer is not the target's (translated_model.py). It does not know the target, or
how a draft travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
from typing_extensions import override

from trtrun.configuration.drafting.drafting_methods import DraftModelSection
from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.guiding.walks import Walk
from trtrun.sampling.distributions import KeyedRanks, distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.drafters.translated_model import TranslatedDrafter
from trtrun.speculation.found_paths import with_certain_tokens
from trtrun.speculation.protocols import DraftEngine, PreparedStep, Rows
from trtrun.speculation.text_drafts import Suggestion, TextDrafts
from trtrun.tensors import cached_range, cached_tensor, inference


class DraftModelDrafter(Drafter, Generic[PreparedStep]):
    """Drafts with a model. All steps stay on the device: no host round trip between them.

    In token mode the draft draws with the same random numbers as the target will (the coupling of Daliri et al. 2024,
    arXiv:2408.07978), so that two similar distributions choose the same token most of the time. With draft_probs it
    must draw independently of the target, from a stream of its own.

    Where a draft that came with a request holds, its tokens take the place of the model's choices, and so does what
    texts say where `options` have them looked up: they are fed as these would be, so that keys and values are those of
    the proposal, and the model goes on behind them. Where nothing is left for the model they are fed all at once.
    """

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        target_vocab_size: int,
        use_logits: bool,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft with `engine`; its vocabulary may be padded differently from the target's `target_vocab_size`."""
        self._engine = engine
        self._target_vocab_size = target_vocab_size
        # Ids that only the draft's padding has could never be accepted, so they are not proposed.
        self._vocab_size = min(engine.vocab_size, target_vocab_size)
        self._stream = Stream.DRAFT if use_logits else Stream.TARGET
        self._given = TextDrafts(engine.rows, self._vocab_size, options)
        self._guides: RowGuides | None = None

    @property
    @override
    def rows(self) -> Rows:
        return self._engine.rows

    @override
    def guide(self, guides: RowGuides) -> None:
        """Choose among what may follow, so that what must follow is proposed, too."""
        self._guides = guides

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        self._given.release_rows(plan)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        self._engine.begin_round(plan)
        self._given.begin_round(plan)

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Propose as many tokens as the plan asks for: a model always has a proposal."""
        self._engine.prefill([chunk for chunk in plan.prefill if chunk.has_draft_kv])
        device, draft_len = self._engine.device, plan.draft_len
        most = [max(0, length) for length in plan.draft_lens.tolist()]
        draft_lens = cached_tensor(most, device)
        counts = plan.catch_up.tolist()
        fed = [index for index, count in enumerate(counts) if count > 0]
        row_list: list[int] = plan.decode_rows.tolist()
        all_fed = len(fed) == len(row_list)  # as in most rounds, where fewer operations are launched
        if not all_fed:
            row_list, most = ([of_row[index] for index in fed] for of_row in (row_list, most))
        rows, lacking = cached_tensor(row_list, device), [counts[index] for index in fed]
        if not fed or draft_len == 0:
            if fed:
                self._catch_up(plan, row_list, rows, lacking)
            return Draft(torch.zeros((len(counts), draft_len), dtype=torch.int64, device=device), draft_lens)
        wanted = set(probability_rows)
        picks = [place for place, index in enumerate(fed) if index in wanted]
        given = self._given.propose(plan)
        found = None if given is None else given.num_suffix_tokens
        if all_fed:
            tokens, probs = self._draft(plan, row_list, rows, lacking, most, picks, given)
            return Draft(tokens, draft_lens, probs, num_suffix_tokens=found)
        places = cached_tensor(fed, device)
        if given is not None:
            given = given.of_rows(places)
            found = None if found is None else torch.zeros_like(found).index_copy_(0, places, found[places])
        drafted, probs = self._draft(plan, row_list, rows, lacking, most, picks, given)
        tokens = torch.zeros((len(counts), draft_len), dtype=torch.int64, device=device)
        tokens[places] = drafted
        return Draft(tokens, draft_lens, probs, num_suffix_tokens=found)

    def _walk(self, row_list: list[int]) -> Walk | None:
        """What may follow rows and their drafts; None where none of them is guided."""
        return None if self._guides is None else self._guides.walk(row_list)

    def _catch_up(self, plan: RoundPlan, row_list: list[int], rows: torch.Tensor, lacking: list[int]) -> torch.Tensor:
        """Feed `rows` [R] what they lack, at most `lacking` tokens each; logits [R, vocab] after the newest."""
        return self._engine.catch_up(rows, lacking, plan.max_context)

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
        """draft_len tokens for `rows` [R], of which each needs as many as `most` says; `given` are those that take the
        place of the model's.

        Returns:
            tokens [R, draft_len] int64 and draft_probs [picks, draft_len, target vocab] float32 or None.
        """
        whole = [] if given is None or picks else given.whole_rows(most)
        if given is not None and len(whole) == len(row_list):
            self._feed_whole(plan, rows, lacking, given.tokens, most)
            return given.tokens, None
        logits = self._catch_up(plan, row_list, rows, lacking)
        walk = self._walk(row_list)  # which waits for the verdict before, while the device catches up
        state = self._engine.rows
        needs_history = state.sampling.needs_history(row_list)
        lengths = state.lengths.index_select(0, rows)
        chosen, probabilities = [], []
        positions = lengths.unsqueeze(1) + cached_range(0, plan.draft_len - 1, rows.device)
        if min(most) < plan.draft_len:
            needed = cached_range(1, plan.draft_len, rows.device) < cached_tensor(most, rows.device).unsqueeze(1)
            positions = torch.where(needed, positions, -1)
        tables = self._engine.tables(rows, plan.max_context)
        if self._engine.has_graphs and not picks and given is None and walk is None:
            chained = self._chain(row_list, lengths, positions, tables, logits)
            if chained is not None:
                return chained, None
        if given is not None and whole and plan.draft_len > 1:
            places = cached_tensor(whole, rows.device)
            self._engine.feed(given.tokens[places, :-1], positions[places], tables[places])
            positions = positions.index_fill(0, places, -1)
        batches = self._engine.prepare_steps(tables, positions) if plan.draft_len > 1 else ()
        for step in range(plan.draft_len):
            where = lengths + step
            raw = logits[:, : self._vocab_size].unsqueeze(1)
            raw = raw if walk is None else walk.masks().apply(raw)
            found = distributions_of(state.sampling, raw, row_list, where, state.token_ids, None, plan.max_context)
            token = found.choose(self._stream).squeeze(1)
            if given is not None:
                token = torch.where(given.is_given[:, step], given.tokens[:, step], token)
            chosen.append(token)
            if picks:
                probabilities.append(found.probabilities(picks, self._target_vocab_size))
            if step + 1 < plan.draft_len:
                if needs_history:
                    # Scratch behind the row's length: penalties of the next step see it; a verdict overwrites it.
                    state.token_ids[rows, where] = token.to(torch.int32)
                if walk is not None:
                    walk.tell(token)
                logits = self._engine.decode(batches[step], token)
        tokens = torch.stack(chosen, dim=1)
        return tokens, self._known_probs(torch.cat(probabilities, dim=1), tokens, picks, given) if picks else None

    def _feed_whole(
        self, plan: RoundPlan, rows: torch.Tensor, lacking: list[int], tokens: torch.Tensor, most: list[int]
    ) -> None:
        """Feed `rows` [R] what they lack, and behind it as many of their `tokens` [R, draft_len] as `most` says but the
        last, in one forward."""
        state, width = self._engine.rows, max(lacking)
        steps = cached_range(-width, plan.draft_len - 1, rows.device)
        counts, ends = (cached_tensor(one, rows.device).unsqueeze(1) for one in (lacking, [max(1, n) for n in most]))
        positions = state.lengths.index_select(0, rows).unsqueeze(1) + steps
        positions = torch.where((-steps <= counts) & (steps + 1 < ends), positions, -1).clamp(min=-1)
        own = state.token_ids[rows.unsqueeze(1), positions[:, :width].clamp(min=0)].to(torch.int64)
        fed = torch.cat((own, tokens[:, :-1]), dim=1)
        self._engine.feed(fed, positions, self._engine.tables(rows, plan.max_context))

    def _known_probs(
        self,
        probs: torch.Tensor,
        tokens: torch.Tensor,
        picks: list[int],
        given: Suggestion | None,
    ) -> torch.Tensor:
        """draft_probs [picks, draft_len, vocab], where tokens [R, draft_len] that were given are certain."""
        if given is None:
            return probs
        index = cached_tensor(picks, tokens.device)
        return with_certain_tokens(probs, tokens[index], given.is_given[index])

    def _chain(
        self,
        row_list: list[int],
        lengths: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor | None:
        """All steps behind the first choice as one graph: tokens [R, draft_len]; None where choices look at a row's
        tokens."""
        sampling = self._engine.rows.sampling
        is_greedy = not sampling.sampled_indices(row_list)
        if sampling.needs_history(row_list) or not positions.shape[1]:
            return None
        keyed = None if is_greedy else KeyedRanks.of(sampling, row_list, lengths + 1, self._stream)
        if keyed is None and not is_greedy:
            return None
        raw = logits[:, : self._vocab_size].unsqueeze(1)
        found = distributions_of(sampling, raw, row_list, lengths, self._engine.rows.token_ids)
        first = found.choose(self._stream)
        following = self._engine.rank_steps(first[:, 0], positions, tables, self._vocab_size, 1, keyed)
        return None if following is None else torch.cat((first, following[:, :, 0]), dim=1)

    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is None:
            return
        rows = cached_tensor(plan.sampled_rows, self._engine.device)
        self._engine.rows.advance(rows, verdict.num_tokens, verdict.tokens)

    @override
    def close(self) -> None:
        self._engine.close()


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

    @override
    def begin_round(self, plan: RoundPlan) -> None:
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


@DRAFTERS.register("draft_target")
def make_draft_model_drafter(context: DrafterContext) -> Drafter:
    """A drafter on the rank's draft engine."""
    assert context.draft is not None
    section = context.section
    assert isinstance(section, DraftModelSection)
    if context.translation is not None:
        return TranslatedDrafter(context.draft, context.translation, section.use_logits, section)
    if context.guess_space is not None:
        return AheadDrafter(
            context.draft,
            context.target_vocab_size,
            section.draft_len,
            section.use_logits,
            context.guess_space,
            context.guess_steps,
            context.mask_token,
            section,
        )
    if context.mask_token is not None:
        return ParallelDrafter(
            context.draft, context.target_vocab_size, section.use_logits, context.mask_token, section
        )
    return DraftModelDrafter(context.draft, context.target_vocab_size, section.use_logits, section)
