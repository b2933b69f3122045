"""Drafts with a model on devices of its own, ahead of the verdicts: the device side of drafting ahead.

In a round it proposes what it has drafted ahead, or drafts again, and then drafts for the likely verdicts of the round
while the target verifies (`guessing.py`). When a guess comes true, its keys and values are copied to the row's own
blocks.

Source: Speculative Speculative Decoding (arXiv:2603.03251); here a row that was guessed wrong need not hold up others.
It knows an engine by protocol, the rows' sampling parameters and verdicts. It does not know the target, messages or
clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import FIRST_WARM_UP_ROUND, Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.ahead.chains import Chains, MaskedChains
from trtrun.speculation.ahead.guessing import Guesser
from trtrun.speculation.ahead.policy import CandidateBudget, GuessSpace
from trtrun.speculation.ahead.row_texts import Guesses, HostTexts, RowText
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.found_paths import HostPredictedOutputs
from trtrun.speculation.protocols import DraftEngine, PreparedStep, Rows
from trtrun.tensors import device_integers, inference


class AheadDrafter(Drafter, Generic[PreparedStep]):
    """Proposes for the plan's decode rows, and drafts ahead. On draft ranks of their own; drafts and verdicts are on
    the host."""

    drafts_ahead = True

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        target_vocab_size: int,
        draft_len: int,
        use_logits: bool,
        space: GuessSpace,
        guess_steps: Sequence[int] = (),
        mask_token: int | None = None,
        options: HybridOptions | None = None,
    ) -> None:
        """Draft up to `draft_len` tokens with `engine`, whose vocabulary may be padded differently from the target's.

        With `use_logits` sampled rows have draft_probs. `guess_steps` are numbers of guesses that rounds may have. With
        `mask_token` all tokens of a draft, and the drafts of all guesses, come from one forward. Where `options` have
        texts looked up, what these say goes before what the model has predicted.
        """
        self._engine = engine
        self._target_vocab_size = target_vocab_size
        # Ids that only the draft's padding has could never be accepted, so they are not proposed.
        self._vocab_size = min(engine.vocab_size, target_vocab_size)
        self._chains: Chains[PreparedStep] = (
            Chains(engine, self._vocab_size, use_logits)
            if mask_token is None
            else MaskedChains(engine, self._vocab_size, use_logits, mask_token, draft_len)
        )
        self._draft_len = draft_len
        self._use_logits = use_logits
        self._space = space
        self._guess_steps = guess_steps
        self._candidate_budget = CandidateBudget(draft_len)
        self._guesser = Guesser(engine, self._chains, space, self._candidate_budget)
        self._texts: dict[int, RowText] = {}
        self._last_prompt_tokens: dict[int, int] = {}
        self._guesses = Guesses()
        self._hits: dict[int, int] = {}
        self._moves: list[tuple[int, int, int]] = []
        self._probs: dict[int, Tensor] = {}
        self._given = HostPredictedOutputs(self._vocab_size)
        self._has_given: set[int] = set()
        self._host_texts: HostTexts | None = None
        self._guides: RowGuides | None = None
        if options is not None and options.enable_suffix_decoding:
            columns = engine.rows.token_ids.shape[1]
            self._host_texts = HostTexts(space.first_row, columns, self._vocab_size, options)

    @property
    @override
    def rows(self) -> Rows:
        return self._engine.rows

    @inference
    @override
    def warm_up(self) -> None:
        """Run chains of all numbers of guesses, and a fresh draft of one row. It writes to the null block
        alone."""
        for count in sorted({1, *self._guess_steps} - {0}, reverse=True):
            self._chains.warm_up(count)

    @override
    def guide(self, guides: RowGuides) -> None:
        """Propose what a guide says must follow before what the model has predicted."""
        self._guides = guides

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        if self._host_texts is not None:
            self._host_texts.release_rows(plan)

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in admissions, drops and blocks."""
        if self._host_texts is not None:
            self._host_texts.begin_round(plan)
        self._engine.begin_round(plan)
        self._given.begin_round(plan)
        self._has_given.clear()
        for row in (*plan.dropped_rows, *(admission.row for admission in plan.admissions)):
            self._texts.pop(row, None)
            self._hits.pop(row, None)
            self._probs.pop(row, None)
        for admission in plan.admissions:
            if admission.has_draft_kv:
                self._texts[admission.row] = RowText(len(admission.tokens), admission.num_cached_tokens)
                self._last_prompt_tokens[admission.row] = int(admission.tokens[-1])

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Propose for each row a draft that was made ahead, one that is made now, or none. Tokens are on the host.

        Without draft_probs one is made now where so many rows have none that it pays (`plan.redraft_threshold`). With
        them it always is, as the tokens of a seed depend on the draft there."""
        rows, lens = plan.decode_rows.tolist(), plan.draft_lens.tolist()
        asked = {row: most for row, most in zip(rows, lens, strict=True) if most > 0 and row in self._texts}
        self._take_given(plan, asked)
        self._take_forced(asked)
        looked_up = self._take_looked_up(asked)
        self._take_hits(asked)
        missing = {row: most for row, most in asked.items() if not self._texts[row].draft}
        if missing and (self._use_logits or len(missing) >= plan.redraft_threshold):
            self._draft_now(missing)
        drafts = [self._texts[row].draft if row in asked else [] for row in rows]
        # By numpy, which takes a tenth of the time that torch takes for few numbers: the target may be waiting.
        tokens = np.zeros((len(rows), max(map(len, drafts), default=0)), dtype=np.int64)
        numbers = np.zeros((3, len(rows)), dtype=np.int64)
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            tokens[place, : len(draft)] = draft
            numbers[:, place] = len(draft), bool(draft) and row not in missing, looked_up.get(row, 0)
        counts, cache_hits, found = torch.from_numpy(numbers)
        probs = self._draft_probs(plan, probability_rows)
        return Draft(torch.from_numpy(tokens), counts, probs, cache_hits, num_suffix_tokens=found)

    def _draft_probs(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Tensor | None:
        """[rows, draft_len, target vocab] float32: the distributions that the drafts of these decode rows were drawn
        from, zeros behind a shorter draft; None without rows."""
        if not probability_rows:
            return None
        shape = (len(probability_rows), plan.draft_len, self._target_vocab_size)
        probs = torch.zeros(shape, device=self._engine.device)
        for place, index in enumerate(probability_rows):
            of_row = self._probs.get(int(plan.decode_rows[index]))
            if of_row is not None:
                count = len(self._texts[int(plan.decode_rows[index])].draft)
                probs[place, :count, : self._vocab_size] = of_row[:count]
        return probs

    @inference
    @override
    def draft_ahead(self, plan: RoundPlan, *, guesses: bool) -> int:
        """Draft, and feed the prompts of the round, too; waits until all of it is known on the host."""
        most = min(plan.num_guesses, self._space.most_guesses) if guesses else 0
        self._move()
        self._guesses = Guesses()
        self._hits.clear()  # they point into the guesses of the round before
        chunks = [chunk for chunk in plan.prefill if chunk.has_draft_kv and chunk.row in self._texts]
        self._engine.prefill(chunks)
        ended = [chunk.row for chunk in chunks if chunk.is_last]
        for row in ended:
            self._texts[row].end_prompt(self._last_prompt_tokens.pop(row))
        # What was drafted in parallel is not written yet, so that it is fed in each round, before a verdict makes it
        # part of a row whose blocks others may share.
        feeds_all = most > 0 or not self._chains.writes_drafts
        rows = self._rows_to_feed(plan, feeds_all) + (ended if most else [])
        if not rows:
            return 0
        texts = [self._texts[row] for row in rows]
        self._write_history(rows, [text.draft for text in texts])
        fed = self._chains.feed(rows, [text.take_unfed() for text in texts], [text.end for text in texts])
        after = fed.ranked[:, 0]
        # With draft_probs the tokens of a seed depend on a draft's length, so it must be a fresh draft's.
        steps = self._draft_len if self._use_logits else plan.draft_len or self._draft_len
        guessed = [row for row in rows if self._may_guess(row, steps)]
        if most and guessed:
            places = {row: place for place, row in enumerate(rows)}
            self._guesses = self._guesser.draft(self._texts, guessed, after, places, self._has_given, most, steps)
        for text, candidates in zip(texts, after.tolist(), strict=True):
            text.ranked = [*text.ranked[: len(text.draft)], candidates]
        return len(self._guesses.listed)

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Look for the verdict among the guesses."""
        if verdict is None:
            return
        counts = verdict.num_tokens.tolist()
        gained = [of_row[:count] for of_row, count in zip(verdict.tokens.tolist(), counts, strict=True)]
        self._write_history(plan.sampled_rows, gained)
        if self._host_texts is not None:
            self._host_texts.learn(plan.sampled_rows, gained)
        self._hits.clear()
        counts_for_guesses = plan.round_index < FIRST_WARM_UP_ROUND  # rows before the first request are made up
        for row, tokens in zip(plan.sampled_rows, gained, strict=True):
            text = self._texts.get(row)
            if text is not None and tokens:
                self._given.learn(row, text.length, tokens)
                self._learn_row(row, text, len(tokens) - 1, tokens[-1], counts_for_guesses)

    def _write_history(self, rows: Sequence[int], gained: Sequence[Sequence[int]]) -> None:
        """Put what rows gained, or may gain, behind their tokens on the device, where their penalties or bans look at
        them."""
        sampling = self._engine.rows.sampling
        known = [
            (row, self._texts[row].length, tokens)
            for row, tokens in zip(rows, gained, strict=True)
            if row in self._texts and tokens and sampling.needs_history([row])
        ]
        if known:
            own, lengths, tokens_of = zip(*known, strict=True)
            self._engine.rows.write_tokens(own, lengths, tokens_of)

    @override
    def guesses(self) -> npt.NDArray[np.int64] | None:
        """Take over a draft that came with a request; texts that are looked up may go before what was predicted."""
        return self._guesses.table() if self._guesses.listed and self._host_texts is None else None

    @override
    def hit_chances(self) -> list[float]:
        return self._candidate_budget.hit_chances(self._draft_len)

    @override
    def close(self) -> None:
        self._engine.close()

    def _learn_row(self, row: int, text: RowText, num_accepted: int, token: int, counts_for_guesses: bool) -> None:
        drafted = len(text.draft)
        candidates = text.ranked[num_accepted] if num_accepted < len(text.ranked) else None
        text.advance(num_accepted, token)
        if text.draft:  # the target verified less than was proposed, and the rest still holds
            if row in self._probs:
                self._probs[row] = self._probs[row][num_accepted + 1 :]
            return
        self._probs.pop(row, None)
        # Of a draft that is not the model's only the verdict on all of it has candidates: it would count, and no other.
        if counts_for_guesses and row not in self._has_given:
            if candidates:
                rank = candidates.index(token) if token in candidates else None
                self._candidate_budget.record(drafted, num_accepted, rank)
            elif drafted and not self._guesses.listed:  # all of a draft behind which nothing was to be guessed
                self._candidate_budget.record_acceptance(drafted, num_accepted)
        if (index := self._guesses.find(row, num_accepted, token)) is not None:
            self._hits[row] = index

    def _rows_to_feed(self, plan: RoundPlan, guesses: bool) -> list[int]:
        """Decode rows whose texts are written to their ends in this round: those that are guessed for, those whose
        drafts came with their requests, so that little is ever to be fed at once, those that were sat out for long, and
        those of which the store would lack more than the plan says, as others may be given their blocks."""
        planned = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), plan.catch_up.tolist(), strict=True)
        return [
            row
            for row, draft_len, count in planned
            if row in self._texts
            and (
                (guesses and draft_len > 0)
                or row in self._has_given
                or (count > 0 and (not plan.draft_len or len(self._texts[row].unfed) > 1))
            )
        ]

    def _take_given(self, plan: RoundPlan, asked: dict[int, int]) -> None:
        """Where a row's output is the start of the draft that came with its request, what follows there is its draft,
        whatever was drafted ahead."""
        for row in asked.keys() & set(plan.predicted_output_rows):
            text = self._texts[row]
            tokens = self._given.behind(row, text.length, asked[row])
            if not tokens:
                continue
            self._put_certain(row, tokens)

    def _take_forced(self, asked: dict[int, int]) -> None:
        """Where a row is guided and some tokens must follow, these are its draft, unless that begins with them or is
        their beginning and goes on with what the model says."""
        if self._guides is None:
            return
        for row, tokens in zip(asked, self._guides.forced_behind(asked), strict=True):
            hit = self._hits.get(row)
            predicted = self._texts[row].draft if hit is None else self._guesses.drafts[hit]
            if tokens and predicted[: len(tokens)] != tokens and max(tokens) < self._vocab_size:
                self._put_certain(row, tokens)

    def _put_certain(self, row: int, tokens: list[int]) -> None:
        """Tokens that are no sample are a row's draft."""
        self._put(row, tokens)
        if self._use_logits and self._engine.rows.sampling.sampled_indices([row]):
            certain = device_integers(tokens, self._engine.device)
            self._probs[row] = functional.one_hot(certain, self._vocab_size).to(torch.float32)

    def _take_looked_up(self, asked: dict[int, int]) -> dict[int, int]:
        """Draft what stood before, where that says as much as what was predicted; how many tokens, by row."""
        if self._host_texts is None:
            return {}
        taken: dict[int, int] = {}
        wanted = {row: most for row, most in asked.items() if row not in self._has_given}
        for row, tokens in self._host_texts.look_up(wanted).items():
            hit = self._hits.get(row)
            predicted = self._texts[row].draft if hit is None else self._guesses.drafts[hit]
            if len(tokens) >= min(len(predicted), asked[row]):
                self._put(row, tokens)
                taken[row] = len(tokens)
        return taken

    def _put(self, row: int, tokens: list[int]) -> None:
        """Tokens that are not the model's are a row's draft."""
        self._has_given.add(row)
        self._hits.pop(row, None)
        self._probs.pop(row, None)
        self._texts[row].propose(tokens)

    def _take_hits(self, asked: dict[int, int]) -> None:
        """Drafts of guesses that came true become the rows' own, cut to what the plan asks for, as others are."""
        moved: list[tuple[int, int, int]] = []  # row, guess and position
        for row, most in asked.items():
            text = self._texts[row]
            if (index := self._hits.get(row)) is not None:
                guesses, start = self._guesses, text.length - 1
                draft, is_written = guesses.drafts[index][:most], self._chains.writes_drafts
                text.extend(draft, _without_chosen(draft, guesses.ranked[index]), is_written=is_written)
                moved += [(row, index, start + step) for step in range(len(text.draft) if is_written else 1)]
                if guesses.probs[index] is not None:
                    self._probs[row] = guesses.probs[index]
            elif len(text.draft) > most:
                text.cut(most)
        self._hits.clear()
        self._moves = moved

    def _move(self) -> None:
        """Copy keys and values of guesses that came true to their rows' blocks, and states to the rows."""
        moved, self._moves = self._moves, []
        if not moved:
            return
        engine, size = self._engine, self._engine.block_size
        columns = []
        for row, index, position in moved:
            column = position // size
            block = self._space.blocks(index)[column - self._guesses.listed[index].start // size]
            columns.append((row, column, position % size, block))
        row_index, at, offset, source = device_integers(columns, engine.device).unbind(1)
        engine.copy_tokens(source, engine.rows.block_tables[row_index, at], offset)
        came_true = {row: index for row, index, _ in moved}
        guessed = self._space.rows(len(self._guesses.listed))
        engine.share_states([guessed[index] for index in came_true.values()], list(came_true))

    def _draft_now(self, missing: dict[int, int]) -> None:
        """Draft for rows that have no draft, up to `missing` tokens each."""
        self._move()
        rows, lens, is_written = list(missing), list(missing.values()), self._chains.writes_drafts
        texts = [self._texts[row] for row in rows]
        chosen = self._chains.draft(rows, [text.take_unfed() for text in texts], [text.length for text in texts], lens)
        tokens, ranked = chosen.tokens.tolist(), chosen.ranked.tolist()
        for text, most, of_row, candidates in zip(texts, lens, tokens, ranked, strict=True):
            text.extend(of_row[:most], _without_chosen(of_row[:most], candidates), is_written=is_written)
        if chosen.probs is not None:
            for place, index in enumerate(self._engine.rows.sampling.sampled_indices(rows)):
                self._probs[rows[index]] = chosen.probs[place]

    def _may_guess(self, row: int, steps: int) -> bool:
        """Whether guesses of so many steps fit behind a row, and are of use there: not where the draft that came with
        its request goes on."""
        end = self._texts[row].end
        return end + steps + 1 < self._engine.most_positions and not self._given.behind(row, end + 1, 1)


def _without_chosen(tokens: Sequence[int], ranked: Sequence[Sequence[int]]) -> list[list[int]]:
    """List the candidates beside the token at each position of a draft; `ranked` may have more places."""
    return [[one for one in every if one != token] for token, every in zip(tokens, ranked, strict=False)]
