"""Chains of a draft model that drafts all tokens of a row in one forward (see drafters/parallel_model.py): what takes
steps elsewhere takes one here, for all guesses of a round together.

It knows an engine by protocol and sampling. It does not know which rows are guesses, verdicts or drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtrun.speculation.ahead.chains import Chains, Chosen
from trtrun.speculation.protocols import DraftEngine, PreparedStep
from trtrun.tensors import device_integers


class MaskedChains(Chains[PreparedStep]):
    """Runs them on one engine: keys and values of drafted tokens are never written."""

    writes_drafts = False

    def __init__(
        self,
        engine: DraftEngine[PreparedStep],
        vocab_size: int,
        use_logits: bool,
        mask_token: int,
        most_drafted: int,
    ) -> None:
        """As Chains; `mask_token` stands for a token that is not known, and `most_drafted` tokens are drafted at
        most."""
        super().__init__(engine, vocab_size, use_logits)
        self._mask_token = mask_token
        self._most_drafted = most_drafted

    def warm_up(self, count: int) -> None:
        """Run a draft of `count` rows that writes nowhere."""
        engine = self._engine
        nowhere = torch.full((count, self._most_drafted), -1, dtype=torch.int64, device=engine.device)
        tables = torch.zeros_like(engine.tables(self._index([0] * count), 1))
        engine.feed(torch.zeros_like(nowhere), nowhere, tables, self._most_drafted)

    def draft(
        self, rows: list[int], tokens: Sequence[Sequence[int]], ends: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
        """See Chains."""
        if max(map(len, tokens)) > self._most_drafted + 1:
            self.feed(rows, tokens, ends)
            tokens = [of_row[-1:] for of_row in tokens]
        engine, width, places = self._engine, max(map(len, tokens)), max(lens)
        packed = []
        for of_row, end, length in zip(tokens, ends, lens, strict=True):
            before, behind = width - len(of_row), places - length
            masks = [self._mask_token] * (length - 1)
            positions = range(end - len(of_row), end + length - 1)
            packed.append([*[0] * before, *of_row, *masks, *[0] * behind, *[-1] * before, *positions, *[-1] * behind])
        fed, where = device_integers(packed, engine.device).chunk(2, dim=1)
        tables = engine.tables(self._index(rows), max(ends) + places)
        logits = engine.feed(fed, where, tables, places)
        return self._choose_all(logits.view(len(rows), places, -1), rows, ends)

    def step(
        self, rows: list[int], tables: Tensor, first: Tensor, starts: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
        """See Chains: the first tokens are fed, and masks behind them."""
        engine, places = self._engine, max(lens)
        positions = [
            [start + step if step < length else -1 for step in range(places)]
            for start, length in zip(starts, lens, strict=True)
        ]
        where = device_integers(positions, engine.device)
        fed = torch.cat((first.unsqueeze(1), torch.full_like(where[:, 1:], self._mask_token)), dim=1)
        self._note(rows, first, starts)
        logits = engine.feed(fed, where, tables, places)
        return self._choose_all(logits.view(len(rows), places, -1), rows, [start + 1 for start in starts])

    def _take_as_one(
        self, rows: list[int], first: Tensor, positions: Tensor, tables: Tensor, places: Sequence[int]
    ) -> Chosen | None:
        """Nothing takes several steps here, so that nothing is made ready for them."""
        return None

    def _choose_all(self, logits: Tensor, rows: list[int], places: Sequence[int]) -> Chosen:
        """From logits [R, P, V] tokens for the positions from `places` on; one by one where a choice looks at the
        tokens before it."""
        count = logits.shape[1]
        if not self._engine.rows.sampling.needs_history(rows):
            repeated = [row for row in rows for _ in range(count)]
            every = [place + step for place in places for step in range(count)]
            tokens, ranked, probs = self._choose(logits.flatten(0, 1), repeated, every)
            of_places = None if probs is None else probs.view(-1, count, probs.shape[-1])
            return Chosen(tokens.view(-1, count), ranked.view(len(rows), count, -1), of_places)
        chosen = []
        for step in range(count):
            where = [place + step for place in places]
            chosen.append(self._choose(logits[:, step], rows, where))
            self._note(rows, chosen[-1][0], where)
        tokens_, ranked_, probs_ = zip(*chosen, strict=True)
        kept = [one for one in probs_ if one is not None]
        return Chosen(torch.stack(tokens_, 1), torch.stack(ranked_, 1), torch.stack(kept, 1) if kept else None)

    def _note(self, rows: list[int], tokens: Tensor, places: Sequence[int]) -> None:
        """Put tokens [R] where choices look for them, if any does."""
        state = self._engine.rows
        if state.sampling.needs_history(rows):
            state.token_ids[self._index(rows), device_integers(list(places), tokens.device)] = tokens.to(torch.int32)
