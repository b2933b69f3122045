"""An EAGLE head on a rank of its own that drafts ahead of verdicts: while the target verifies, it goes on behind the
likely ones with states of its own, and when a guess comes true, the next draft is there.

Once the target's states of the accepted tokens are here, they are fed as in every round, over what was guessed; and
from the state behind them the head goes along its draft again, for better states and candidates of the next guesses.

Source: Speculative Speculative Decoding (arXiv:2603.03251), here with a head that reads hidden states. It knows rows'
texts on the host, verdicts and heads by protocol. It does not know messages, clocks, or how heads compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trtrun.configuration.drafting.suffix_options import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.ahead.fan_out import FanOut
from trtrun.speculation.ahead.guess_space import GuessSpace
from trtrun.speculation.ahead.head_chains import HeadChains, Walk
from trtrun.speculation.ahead.row_texts import Guess, Guesses
from trtrun.speculation.drafters.eagle_apart import ApartEagleDrafter
from trtrun.speculation.protocols import FeatureHeads, PreparedStep
from trtrun.tensors import inference, kept_integers


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
    """See ApartEagleDrafter; it foresees, too."""

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
        self._fan_out = FanOut(draft_len)
        self._chains = HeadChains(heads, vocab_size, space)
        self._texts: dict[int, HeadText] = {}
        self._guesses = Guesses()
        self._hits: dict[int, int] = {}

    @inference
    def warm_up(self) -> None:
        """See Drafter."""
        super().warm_up()
        for count in sorted({1, *self._guess_steps} - {0}, reverse=True):
            self._chains.warm_up(count)

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        super().begin_round(plan)
        for row in (*plan.dropped_rows, *(admission.row for admission in plan.admissions)):
            self._texts.pop(row, None)
            self._hits.pop(row, None)
        for admission in plan.admissions:
            if admission.followed:
                self._texts[admission.row] = HeadText(len(admission.tokens))

    @inference
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """See Drafter. A row's draft was foreseen, is made now, or there is none: it is made now where so many rows
        have none that it pays (`plan.redraft_from`), and of rows whose request brought a draft that may go on."""
        rows: list[int] = plan.decode_rows.tolist()
        asked = {
            row: most
            for row, most in zip(rows, plan.draft_lens.tolist(), strict=True)
            if most > 0 and row in self._texts and row not in self._lacking
        }
        given = asked.keys() & set(plan.given_rows)
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
        if len(missing) < plan.redraft_from:
            missing = {row: most for row, most in missing.items() if row in given}
        if missing:
            self._draft_now(plan, missing)
        drafts = [self._texts[row].draft if row in asked else [] for row in rows]
        width = max(map(len, drafts), default=0)
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        foreseen = [int(bool(draft) and row not in missing) for row, draft in zip(rows, drafts, strict=True)]
        return Draft(
            torch.tensor(padded, dtype=torch.int64).view(len(rows), width),
            torch.tensor(list(map(len, drafts)), dtype=torch.int64),
            foreseen=torch.tensor(foreseen, dtype=torch.int64),
        )

    def _draft_now(self, plan: RoundPlan, missing: dict[int, int]) -> None:
        """Draft for rows that have no draft, up to `missing` tokens each, and wait until it is known on the host."""
        given, listed = self._given.propose(plan), list(missing)
        if given is not None:
            places = [index for index, row in enumerate(plan.decode_rows.tolist()) if row in missing]
            given = given.of_rows(kept_integers(places, self._states.device))
            listed = [int(plan.decode_rows[index]) for index in places]
        tokens, _ = self._draft(plan, listed, [missing[row] for row in listed], given)
        for row, of_row in zip(listed, tokens.tolist(), strict=True):
            self._texts[row].draft = of_row[: missing[row]]

    def guide(self, guides: RowGuides) -> None:
        """See Drafter: it asks nobody."""

    @inference
    def anticipate(self, plan: RoundPlan, *, guesses: bool) -> int:
        """See Drafter; it waits until all of it is known on the host."""
        most = min(plan.num_guesses, self._space.most_guesses) if guesses else 0
        self._guesses = Guesses()
        self._hits.clear()  # they point into the guesses of the round before
        steps = plan.draft_len or self._draft_len
        decoding = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        rows = [row for row, length in decoding if length > 0 and self._may_guess(row, steps)]
        if not most or not rows:
            return 0
        texts = [self._texts[row] for row in rows]
        hidden = self._states.index_select(0, kept_integers(rows, self._states.device))
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
            for accepted, count in enumerate(self._fan_out.allocate(len(text.draft), share + (number < more))):
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
    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        """See Drafter: it looks for the verdict among its guesses."""
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
            self._fan_out.record(drafted, num_accepted, ranked.index(token) if token in ranked else None)
        if (index := self._guesses.find(row, num_accepted, token)) is not None:
            self._hits[row] = index

    def hit_chances(self) -> list[float]:
        """See Drafter."""
        return self._fan_out.hit_chances(self._draft_len)
