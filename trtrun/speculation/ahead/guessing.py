"""Drafts behind the likely verdicts of a round, made while the target verifies it.

A guess is a row of its own to the engine: it shares the blocks of the real row's front, has a copy of the last, partly
filled one, and writes into blocks that only the draft's store has. It knows an engine by protocol and rows' texts. It
does not know plans, verdicts or which guesses came true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Generic, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trtrun.speculation.ahead.chains import Chains, Chosen
from trtrun.speculation.ahead.policy import MOST_RANKS, CandidateBudget, GuessSpace
from trtrun.speculation.ahead.row_texts import Guess, Guesses, RowText
from trtrun.speculation.protocols import DraftEngine, PreparedStep
from trtrun.tensors import device_integers

_ON_DEVICE = -1
"""Stands for a token that only the device knows."""


class _Wanted(NamedTuple):
    """A guess to draft for: the token of its verdict, or where only the device knows it, its rank there."""

    guess: Guess
    token: int
    rank: int


class Guesser(Generic[PreparedStep]):
    """Makes the guesses of rounds, and their drafts, in rows and blocks of their own."""

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        chains: Chains[PreparedStep],
        space: GuessSpace,
        candidate_budget: CandidateBudget,
    ) -> None:
        """Guess as many as `space` holds, shared out by `candidate_budget`; `chains` are of the same engine."""
        self._engine = engine
        self._chains = chains
        self._space = space
        self._candidate_budget = candidate_budget
        blocks = [list(space.blocks(index)) for index in range(space.most_guesses)]
        self._scratch = device_integers(blocks, engine.device)

    def draft(
        self,
        texts: Mapping[int, RowText],
        rows: Sequence[int],
        after: Tensor,
        place_in_after: Mapping[int, int],
        whole: Set[int],
        most: int,
        steps: int,
    ) -> Guesses:
        """Draft `steps` tokens for the likeliest verdicts of rows, and wait until they are known on the host.

        Args:
            texts: of the rows; all that is on them has been fed.
            rows: to guess for, one at least.
            after: [places, ranks] int64 on the device: the likeliest tokens behind texts.
            place_in_after: of each row, whose text that is.
            whole: those of which only verdicts that accept a whole draft are guessed: no other place has candidates.
            most: guesses, at most.
            steps: tokens of each draft.
        """
        wanted = self._list_guesses(texts, rows, whole, most)
        if not wanted:
            return Guesses()
        guesses = Guesses([one.guess for one in wanted])
        own_rows = self._space.rows(len(wanted))
        first, chosen = self._launch(wanted, own_rows, after, place_in_after, steps)
        tokens = torch.cat((first.unsqueeze(1), chosen.tokens), dim=1).tolist()
        ranked = chosen.ranked.tolist()
        guesses.settle([of_guess[0] for of_guess in tokens], [of_guess[1:] for of_guess in tokens], ranked)
        if chosen.probs is not None:
            for place, index in enumerate(self._engine.rows.sampling.sampled_indices(own_rows)):
                guesses.probs[index] = chosen.probs[place]
        return guesses

    def _launch(
        self,
        wanted: Sequence[_Wanted],
        own_rows: list[int],
        after: Tensor,
        place_in_after: Mapping[int, int],
        steps: int,
    ) -> tuple[Tensor, Chosen]:
        """Start the chains of all guesses; returns the tokens of their verdicts [guesses] int64 and what follows."""
        engine = self._engine
        starts = [one.guess.start for one in wanted]
        described = device_integers(
            [
                (guess.row, guess.start // engine.block_size, token, place_in_after[guess.row], rank)
                for guess, token, rank in wanted
            ],
            engine.device,
        )
        real, column, token, place, rank = described.unbind(1)
        first = torch.where(token < 0, after[place, rank], token)
        scratch = self._scratch[: len(wanted)]
        engine.copy_blocks(engine.rows.block_tables[real, column], scratch[:, 0])
        tables = with_scratch(engine.tables(real, max(starts) + steps), column, scratch)
        self._share([one.guess.row for one in wanted], own_rows)
        return first, self._chains.step(own_rows, tables, first, starts, [steps] * len(wanted))

    def _share(self, rows: list[int], own_rows: list[int]) -> None:
        """Give the guesses' rows the parameters and states of the real ones, and their tokens where any of them looks
        at these."""
        state = self._engine.rows
        self._engine.share_states(rows, own_rows)
        state.sampling.share(rows, own_rows)
        if state.sampling.needs_history(rows):
            state.share_tokens(rows, own_rows)

    def _list_guesses(
        self, texts: Mapping[int, RowText], rows: Sequence[int], whole: Set[int], most: int
    ) -> list[_Wanted]:
        wanted: list[_Wanted] = []
        share, more = divmod(most, len(rows))
        for number, row in enumerate(rows):
            text = texts[row]
            budget = share + (number < more)
            if row in whole:
                counts = [0] * len(text.draft) + [min(budget, MOST_RANKS)]
            else:
                counts = self._candidate_budget.allocate(len(text.draft), budget)
            for num_accepted, count in enumerate(counts):
                on_host = num_accepted < len(text.draft)
                for rank in range(min(count, len(text.ranked[num_accepted])) if on_host else count):
                    token = text.ranked[num_accepted][rank] if on_host else _ON_DEVICE
                    wanted.append(_Wanted(Guess(row, num_accepted, text.length + num_accepted), token, rank))
        return wanted


def with_scratch(tables: Tensor, column: Tensor, scratch: Tensor) -> Tensor:
    """Block tables [guesses, blocks] with `scratch` [guesses, blocks of one] from `column` [guesses] on."""
    width = tables.shape[1]
    wide = functional.pad(tables, (0, scratch.shape[1]))
    columns = column.unsqueeze(1) + torch.arange(scratch.shape[1], device=tables.device)
    return wide.scatter_(1, columns, scratch)[:, :width].contiguous()
