"""Steps of a head beside what it proposes, on the device: along drafts that are known, for the states and candidates
behind each place, and from there for verdicts that are guessed.

A head goes on with states of its own, as nobody knows the target's yet. What it writes on the way is scratch: behind a
row's newest token in the row's own blocks, where the target's states are fed over it, and in blocks of guesses.

It knows rows and heads by protocol, and sampling. It does not know verdicts, or which guesses are worth making.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.keyed_ranks import KeyedRanks
from trtrun.sampling.likeliest import likeliest
from trtrun.sampling.random import Stream
from trtrun.speculation.ahead.chains import NUM_RANKED
from trtrun.speculation.ahead.guess_space import GuessSpace
from trtrun.speculation.ahead.guessing import with_scratch
from trtrun.speculation.protocols import FeatureHeads, PreparedStep
from trtrun.tensors import device_integers, kept_integers


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
        """Of `heads`, whose rows and store have `space` for guesses."""
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
        """Of each place, beside the draft's token."""
        return self._num_ranked - 1

    def warm_up(self, count: int) -> None:
        """First use of what chooses for `count` rows, and of copies; what steps run the drafter knows. What is written
        are blocks of guesses, which nobody reads before they are written again."""
        rows, nowhere = [0] * count, kept_integers([0] * count, self._device)
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
        batches, index = self._heads.prepare_steps(tables, where), kept_integers(own, self._device)
        for number in range(steps):
            if looks_back:
                self._rows.token_ids[index, where[:, number] + 1] = token.to(torch.int32)
            hidden = self._heads.step(batches[number], token, hidden.clone())
            token = self._rank(own, [start + number + 2 for start in starts], hidden)[:, 0]
            drafted.append(token)
        return first, torch.stack(drafted, dim=1)

    def _tables(self, rows: Sequence[int], context: int) -> Tensor:
        return self._heads.tables(kept_integers(rows, self._device), context)

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
