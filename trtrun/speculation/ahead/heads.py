"""An EAGLE head on a rank of its own that drafts ahead of verdicts: while the target verifies, it goes on behind the
likely ones with states of its own, and when a guess comes true, the next draft is there.

Once the target's states of the accepted tokens are here, they are fed as in every round, over what was guessed; and
from the state behind them the head goes along its draft again, for better states and candidates of the next guesses.
What it writes on the way is scratch: behind a row's newest token in the row's own blocks, where the target's states are
fed over it, and in blocks of guesses.

Source: Speculative Speculative Decoding (arXiv:2603.03251), here with a head that reads hidden states. It does not know
messages, clocks, or how heads compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.sampling.distributions import KeyedRanks, distributions_of
from trtrun.sampling.filters import likeliest
from trtrun.sampling.random import Stream
from trtrun.speculation.ahead.chains import NUM_RANKED
from trtrun.speculation.ahead.guessing import with_scratch
from trtrun.speculation.ahead.policy import CandidateBudget, GuessSpace
from trtrun.speculation.ahead.row_texts import Guess, Guesses
from trtrun.speculation.drafters.eagle import ApartEagleDrafter
from trtrun.speculation.protocols import FeatureHeads, PreparedStep
from trtrun.tensors import cached_tensor, device_integers, inference


@dataclass(frozen=True)
class Walk:
    """What a head says along the drafts of R rows.

    Attributes:
        states: [R, places, hidden]: behind the row's newest token but one, and as far as its draft goes on.
        candidates: [R, places, ranks] int64: the likeliest tokens there, best first; those of the draft come last.
    """

    states: Tensor
    candidates: Tensor


class HeadChains(Generic[PreparedStep]):
    """Runs them with one head."""

    def __init__(self, heads: FeatureHeads[PreparedStep], vocab_size: int, space: GuessSpace) -> None:
        """Run `heads`, whose rows and store have `space` for guesses."""
        self._heads = heads
        self._rows = rows = heads.rows
        self._space = space
        self._device = rows.lengths.device
        self._num_ranked = min(NUM_RANKED, vocab_size)
        self._scratch = device_integers(
            [list(space.blocks(index)) for index in range(space.most_guesses)], self._device
        )

    @property
    def num_candidates(self) -> int:
        """Candidates at each position, beside the draft's token."""
        return self._num_ranked - 1

    def warm_up(self, count: int) -> None:
        """First use of what chooses for `count` rows, and of copies; what steps run the drafter knows. What is written
        are blocks of guesses, which nobody reads before they are written again."""
        rows, nowhere = [0] * count, cached_tensor([0] * count, self._device)
        logits = self._heads.logits(
            torch.zeros((count, self._heads.hidden_size), dtype=self._heads.dtype, device=self._device)
        )
        assert logits is not None, "a head with a device of its own decides"
        likeliest(logits, self._num_ranked)  # of greedy rows, which row 0 need not be
        for keyed in KeyedRanks.kinds(self._rows.sampling, rows, nowhere, Stream.TARGET):
            keyed.rank(logits, 0, self._num_ranked, *keyed.parameters)
        taken = self._scratch[:count, 0]
        self._heads.copy_blocks(nowhere[: len(taken)], taken)

    def walk(self, rows: list[int], lengths: Sequence[int], drafts: Sequence[list[int]], hidden: Tensor) -> Walk:
        """Feed the drafts of `rows`, which have `lengths` tokens each, from their states `hidden` [R, hidden] on."""
        most = max(map(len, drafts))
        fed = [
            [*draft, *[0] * (most - len(draft))]
            + [length - 1 + step if step < len(draft) else -1 for step in range(most)]
            for length, draft in zip(lengths, drafts, strict=True)
        ]
        both = device_integers(fed, self._device)
        tokens, positions = both[:, :most], both[:, most:]
        if self._rows.sampling.needs_history(rows):
            self._rows.write_tokens(rows, lengths, drafts)
        steps = self._heads.prepare_steps(self._tables(rows, max(lengths) + most), positions) if most else ()
        states, ranked = [hidden], [self._rank(rows, lengths, hidden)]
        for number in range(most):
            hidden = self._heads.step(steps[number], tokens[:, number], hidden.clone())
            states.append(hidden)
            ranked.append(self._rank(rows, [length + number + 1 for length in lengths], hidden))
        candidates = torch.stack(ranked, dim=1)
        # Behind the draft of a row no token is its next; an id that there is none of is in nobody's way.
        nexts = torch.cat((torch.where(positions < 0, -1, tokens), tokens.new_full((len(rows), 1), -1)), dim=1)
        taken = (candidates == nexts.unsqueeze(2)).to(torch.int64)
        return Walk(torch.stack(states, dim=1), candidates.gather(2, taken.argsort(dim=2, stable=True)))

    def guess(
        self, walk: Walk, rows: list[int], places: Sequence[tuple[int, int, int]], lengths: Sequence[int], steps: int
    ) -> tuple[Tensor, Tensor]:
        """Draft `steps` tokens for guesses.

        Args:
            walk: of the real rows.
            rows: the real row of each guess.
            places: of each guess its row's place in the walk, how many draft tokens are accepted, and the rank of the
                token behind them.
            lengths: of each guess's row.
            steps: tokens of each draft, 1 at least.

        Returns:
            the tokens of the verdicts [guesses] int64, and the drafts behind them [guesses, steps].
        """
        count, size = len(rows), self._heads.block_size
        starts = [length - 1 + place[1] for length, place in zip(lengths, places, strict=True)]
        described = [(row, start // size, *place) for row, start, place in zip(rows, starts, places, strict=True)]
        real, column, at, accepted, rank = device_integers(described, self._device).unbind(1)
        token, hidden = walk.candidates[at, accepted, rank], walk.states[at, accepted]
        first, drafted = token, list[Tensor]()
        scratch, own = self._scratch[:count], self._space.rows(count)
        self._heads.copy_blocks(self._rows.block_tables[real, column], scratch[:, 0])
        tables = with_scratch(self._tables(rows, max(starts) + steps + 1), column, scratch)
        self._rows.sampling.share(rows, own)
        looks_back = self._rows.sampling.needs_history(rows)
        if looks_back:
            self._rows.share_tokens(rows, own)
        where = device_integers([list(range(start, start + steps)) for start in starts], self._device)
        batches, index = self._heads.prepare_steps(tables, where), cached_tensor(own, self._device)
        for number in range(steps):
            if looks_back:
                self._rows.token_ids[index, where[:, number] + 1] = token.to(torch.int32)
            hidden = self._heads.step(batches[number], token, hidden.clone())
            token = self._rank(own, [start + number + 2 for start in starts], hidden)[:, 0]
            drafted.append(token)
        return first, torch.stack(drafted, dim=1)

    def _tables(self, rows: Sequence[int], context: int) -> Tensor:
        return self._heads.tables(cached_tensor(rows, self._device), context)

    def _rank(self, rows: list[int], places: Sequence[int], hidden: Tensor) -> Tensor:
        """[R, ranks] int64: what `rows` would put at `places` behind states [R, hidden], best first."""
        logits, state = self._heads.logits(hidden), self._rows
        assert logits is not None, "a head with a device of its own decides"
        if not (state.sampling.sampled_indices(rows) or state.sampling.needs_history(rows)):
            return state.sampling.rank(logits, rows, None, self._num_ranked)
        where = device_integers(list(places), self._device)
        if not state.sampling.needs_history(rows):
            keyed = KeyedRanks.of(state.sampling, rows, where, Stream.TARGET)
            if keyed is not None:
                return keyed.rank(logits, 0, self._num_ranked, *keyed.parameters)
        raw = logits.unsqueeze(1)
        found = distributions_of(state.sampling, raw, rows, where, state.token_ids, None, max(places))
        return found.rank(self._num_ranked)


@dataclass(slots=True)
class HeadText:
    """One row on the host.

    Attributes:
        length: tokens of the row.
        draft: proposed behind them.
        candidates: for each number of accepted draft tokens, the likeliest tokens to follow them, best first, without
            the draft token that was rejected there; none before they are known.
    """

    length: int
    draft: list[int] = field(default_factory=list)
    candidates: list[list[int]] = field(default_factory=list)

    def advance(self, num_accepted: int, token: int) -> None:
        """Take a verdict in. Where the target verified less than was proposed, the rest may be right: it stays."""
        goes_on = num_accepted < len(self.draft) and self.draft[num_accepted] == token
        self.length += num_accepted + 1
        self.draft = self.draft[num_accepted + 1 :] if goes_on else []
        self.candidates = self.candidates[num_accepted + 1 :] if goes_on else []


class AheadEagleDrafter(ApartEagleDrafter[PreparedStep]):
    """An EAGLE head on a rank of its own that drafts ahead, too."""

    drafts_ahead = True

    def __init__(
        self,
        heads: FeatureHeads[PreparedStep],
        draft_len: int,
        options: HybridOptions,
        vocab_size: int,
        space: GuessSpace,
        guess_steps: Sequence[int] = (),
    ) -> None:
        """Draft chains of up to `draft_len` tokens, and guess verdicts in `space`; the target has `vocab_size` tokens.
        `guess_steps` are numbers of guesses that rounds may have."""
        super().__init__(heads, draft_len, None, options)
        self._space = space
        self._guess_steps = guess_steps
        self._candidate_budget = CandidateBudget(draft_len)
        self._chains = HeadChains(heads, vocab_size, space)
        self._texts: dict[int, HeadText] = {}
        self._guesses = Guesses()
        self._hits: dict[int, int] = {}

    @inference
    @override
    def warm_up(self) -> None:
        super().warm_up()
        for count in sorted({1, *self._guess_steps} - {0}, reverse=True):
            self._chains.warm_up(count)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        super().begin_round(plan)
        for row in (*plan.dropped_rows, *(admission.row for admission in plan.admissions)):
            self._texts.pop(row, None)
            self._hits.pop(row, None)
        for admission in plan.admissions:
            if admission.has_draft_kv:
                self._texts[admission.row] = HeadText(len(admission.tokens))

    @inference
    @override
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """Propose for each row a draft that was made ahead, one that is made now, or none: it is made now where so many
        rows have none that it pays (`plan.redraft_threshold`), and of rows whose request brought a draft that may go
        on."""
        rows: list[int] = plan.decode_rows.tolist()
        asked = {
            row: most
            for row, most in zip(rows, plan.draft_lens.tolist(), strict=True)
            if most > 0 and row in self._texts and row not in self._lacking
        }
        given = asked.keys() & set(plan.predicted_output_rows)
        for row, most in asked.items():
            text = self._texts[row]
            if row in given:
                text.draft, text.candidates = [], []
            elif (index := self._hits.get(row)) is not None:
                text.draft, text.candidates = self._guesses.drafts[index][:most], []
            else:
                text.draft, text.candidates = text.draft[:most], text.candidates[:most]
        self._hits.clear()
        missing = {row: most for row, most in asked.items() if not self._texts[row].draft}
        if len(missing) < plan.redraft_threshold:
            missing = {row: most for row, most in missing.items() if row in given}
        if missing:
            self._draft_now(plan, missing)
        drafts = [self._texts[row].draft if row in asked else [] for row in rows]
        width = max(map(len, drafts), default=0)
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        cache_hits = [int(bool(draft) and row not in missing) for row, draft in zip(rows, drafts, strict=True)]
        return Draft(
            torch.tensor(padded, dtype=torch.int64).view(len(rows), width),
            torch.tensor(list(map(len, drafts)), dtype=torch.int64),
            cache_hits=torch.tensor(cache_hits, dtype=torch.int64),
        )

    def _draft_now(self, plan: RoundPlan, missing: dict[int, int]) -> None:
        """Draft for rows that have no draft, up to `missing` tokens each, and wait until it is known on the host."""
        given, listed = self._given.propose(plan), list(missing)
        if given is not None:
            places = [index for index, row in enumerate(plan.decode_rows.tolist()) if row in missing]
            given = given.of_rows(cached_tensor(places, self._states.device))
            listed = [int(plan.decode_rows[index]) for index in places]
        tokens, _ = self._draft(plan, listed, [missing[row] for row in listed], given)
        for row, of_row in zip(listed, tokens.tolist(), strict=True):
            self._texts[row].draft = of_row[: missing[row]]

    @override
    def guide(self, guides: RowGuides) -> None:
        """Learn nothing: it asks no model."""

    @inference
    @override
    def draft_ahead(self, plan: RoundPlan, *, guesses: bool) -> int:
        """Draft; waits until all of it is known on the host."""
        most = min(plan.num_guesses, self._space.most_guesses) if guesses else 0
        self._guesses = Guesses()
        self._hits.clear()  # they point into the guesses of the round before
        steps = plan.draft_len or self._draft_len
        decoding = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        rows = [row for row, length in decoding if length > 0 and self._may_guess(row, steps)]
        if not most or not rows:
            return 0
        texts = [self._texts[row] for row in rows]
        hidden = self._states.index_select(0, cached_tensor(rows, self._states.device))
        walk = self._chains.walk(rows, [text.length for text in texts], [text.draft for text in texts], hidden)
        self._guess(walk, rows, texts, most, steps)
        for text, candidates in zip(texts, walk.candidates.tolist(), strict=True):
            places = candidates[: len(text.draft) + 1]
            text.candidates = [of_place[: self._chains.num_candidates] for of_place in places]
        return len(self._guesses.listed)

    def _guess(self, walk: Walk, rows: list[int], texts: Sequence[HeadText], most: int, steps: int) -> None:
        """Draft `steps` tokens behind up to `most` verdicts on the drafts of `rows`."""
        listed, places, lengths = list[Guess](), list[tuple[int, int, int]](), list[int]()
        share, more = divmod(most, len(rows))
        for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
            for accepted, count in enumerate(self._candidate_budget.allocate(len(text.draft), share + (number < more))):
                for rank in range(min(count, self._chains.num_candidates)):
                    listed.append(Guess(row, accepted, text.length + accepted))
                    places.append((number, accepted, rank))
                    lengths.append(text.length)
        if listed:
            first, drafts = self._chains.guess(walk, [guess.row for guess in listed], places, lengths, steps)
            self._guesses = Guesses(listed)
            self._guesses.settle(first.tolist(), drafts.tolist(), [[] for _ in listed])

    def _may_guess(self, row: int, steps: int) -> bool:
        """Whether guesses of so many steps fit behind a row."""
        text = self._texts.get(row)
        if text is None or row in self._lacking:
            return False
        return text.length + len(text.draft) + steps + 2 <= self._rows.token_ids.shape[1]

    @inference
    @override
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """Look for the verdict among the guesses."""
        super().observe(plan, verdict, step)
        self._hits.clear()
        if verdict is None:
            return
        counts, tokens = verdict.num_tokens.tolist(), verdict.tokens.tolist()
        for row, count, of_row in zip(plan.sampled_rows, counts, tokens, strict=True):
            text = self._texts.get(row)
            if text is not None and count:
                self._learn_row(row, text, count - 1, of_row[count - 1])

    def _learn_row(self, row: int, text: HeadText, num_accepted: int, token: int) -> None:
        drafted, candidates = len(text.draft), text.candidates[num_accepted : num_accepted + 1]
        text.advance(num_accepted, token)
        if text.draft:
            return
        if candidates and num_accepted <= drafted:
            ranked = candidates[0]
            self._candidate_budget.record(drafted, num_accepted, ranked.index(token) if token in ranked else None)
        if (index := self._guesses.find(row, num_accepted, token)) is not None:
            self._hits[row] = index

    @override
    def hit_chances(self) -> list[float]:
        return self._candidate_budget.hit_chances(self._draft_len)
