"""Chains of forwards on a draft engine: feed what is missing, then step by step the tokens that it would choose.

Rows of a chain are real ones or guesses; both have block tables and sampling parameters. All stays on the device. Where
the model drafts all tokens of a row in one forward (drafters/draft_model.py), what takes steps elsewhere takes one
here, for all guesses of a round together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.sampling.distributions import KeyedRanks, distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation.ahead.policy import MOST_RANKS
from trtrun.speculation.protocols import DraftEngine, PreparedStep
from trtrun.tensors import cached_tensor, device_integers

NUM_RANKED = MOST_RANKS + 1
"""Tokens that are ranked at a place: the one that the draft chooses, and candidates beside it."""

_MIDDLE_CONTEXT = 1000
"""Neither a short one nor a long one: there may be graphs for each."""


@dataclass(frozen=True)
class Chosen:
    """What a chain of steps gave.

    Attributes:
        tokens: [rows, steps] int64 on the device: what the draft chose.
        ranked: [rows, steps, NUM_RANKED] int64 on the device: the likeliest tokens at the same places, best first.
        probs: [sampled rows, steps, vocab] float32, the distributions that their tokens were drawn from; else None.
    """

    tokens: Tensor
    ranked: Tensor
    probs: Tensor | None


class Chains(Generic[PreparedStep]):
    """Runs them on one engine.

    Attributes:
        writes_drafts: whether the keys and values of drafted tokens are written, but for the last one's.
    """

    writes_drafts = True

    def __init__(self, engine: DraftEngine[PreparedStep], vocab_size: int, use_logits: bool) -> None:
        """Choose among the first `vocab_size` ids; with `use_logits` from a stream of the draft's own, with
        distributions."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_ranked = min(NUM_RANKED, vocab_size)
        self._use_logits = use_logits

    def warm_up(self, count: int) -> None:
        """Run steps of `count` rows that write nowhere: one for each graph where there are graphs."""
        engine = self._engine
        nowhere = torch.full((count, 1), -1, dtype=torch.int64, device=engine.device)
        first = torch.zeros(count, dtype=torch.int64, device=engine.device)
        sampling, rows = engine.rows.sampling, [0] * count
        for context in (1, _MIDDLE_CONTEXT, engine.most_positions):
            tables = torch.zeros_like(engine.tables(self._index(rows), min(context, engine.most_positions)))
            kinds = KeyedRanks.kinds(sampling, rows, first, Stream.TARGET) if engine.has_graphs else []
            for keyed in (*(() if self._use_logits else kinds), None):
                found = engine.rank_steps(first, nowhere, tables, self._vocab_size, self._num_ranked, keyed)
                if found is None:
                    engine.decode(engine.prepare_steps(tables, nowhere)[0], first)
                    return

    def feed(self, rows: list[int], tokens: Sequence[Sequence[int]], ends: Sequence[int]) -> Chosen:
        """Feed each row tokens that end before position `ends`, and choose what follows them: chains of one step.

        Args:
            rows: of the engine.
            tokens: of each row, at least one.
            ends: of each row, the position behind the last of them.
        """
        engine = self._engine
        width = 1 << (max(map(len, tokens)) - 1).bit_length()
        packed = []
        for of_row, end in zip(tokens, ends, strict=True):
            padding = width - len(of_row)
            packed.append([*[0] * padding, *of_row, *[-1] * padding, *range(end - len(of_row), end)])
        both = device_integers(packed, engine.device)
        tables = engine.tables(self._index(rows), max(ends))
        if width == 1 and (chosen := self._take_as_one(rows, both[:, 0], both[:, 1:], tables, ends)) is not None:
            return chosen
        logits = engine.feed(both[:, :width], both[:, width:], tables)
        tokens_, ranked, probs = self._choose(logits, rows, ends)
        return Chosen(tokens_.unsqueeze(1), ranked.unsqueeze(1), probs.unsqueeze(1) if probs is not None else None)

    def draft(
        self, rows: list[int], tokens: Sequence[Sequence[int]], ends: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
        """Feed each row tokens that end before position `ends`, and draft `lens` tokens behind them, 1 at least."""
        fed = self.feed(rows, tokens, ends)
        tables = self._engine.tables(self._index(rows), max(ends) + max(lens))
        behind = self.step(rows, tables, fed.tokens[:, 0], ends, [length - 1 for length in lens])
        probs = [part for part in (fed.probs, behind.probs) if part is not None]
        return Chosen(
            torch.cat((fed.tokens, behind.tokens), dim=1),
            torch.cat((fed.ranked, behind.ranked), dim=1),
            torch.cat(probs, dim=1) if probs else None,
        )

    def step(
        self, rows: list[int], tables: Tensor, first: Tensor, starts: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
        """Feed a token, choose the next, feed that, and so on.

        Args:
            rows: of the engine, for their sampling parameters and token ids.
            tables: [rows, blocks] int64 on the device: where they write.
            first: [rows] int64 on the device: their first tokens.
            starts: the positions of these.
            lens: steps of each row, at least 0; what is chosen behind a row's last step has no meaning.
        """
        engine, count = self._engine, max(lens)
        if not count:
            return Chosen(first.new_empty((len(rows), 0)), first.new_empty((len(rows), 0, self._num_ranked)), None)
        positions = [
            [start + step if step < length else -1 for step in range(count)]
            for start, length in zip(starts, lens, strict=True)
        ]
        where = device_integers(positions, engine.device)
        behind = [start + 1 for start in starts]
        if (taken := self._take_as_one(rows, first, where, tables, behind)) is not None:
            return taken
        state, index = engine.rows, self._index(rows)
        has_history = state.sampling.needs_history(rows)
        steps = engine.prepare_steps(tables, where)
        token, chosen = first, []
        for number in range(count):
            if has_history:
                where = device_integers([start + number for start in starts], engine.device)
                state.token_ids[index, where] = token.to(torch.int32)
            logits = engine.decode(steps[number], token)
            chosen.append(self._choose(logits, rows, [start + number + 1 for start in starts]))
            token = chosen[-1][0]
        tokens, ranked, probs = zip(*chosen, strict=True)
        kept = [one for one in probs if one is not None]
        return Chosen(torch.stack(tokens, 1), torch.stack(ranked, 1), torch.stack(kept, 1) if kept else None)

    def _choose(self, logits: Tensor, rows: list[int], places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """From logits [R, V] of `rows` the tokens [R] for positions `places`, ranked [R, NUM_RANKED], and the
        distributions of sampled rows [S, vocab]."""
        sampling = self._engine.rows.sampling
        raw = logits[:, : self._vocab_size].unsqueeze(1)
        sampled = sampling.sampled_indices(rows)
        where = device_integers(list(places), logits.device) if sampled or sampling.needs_history(rows) else None
        if where is None:
            ranked = sampling.rank(raw[:, 0], rows, None, self._num_ranked)
            return ranked[:, 0], ranked, None
        found = distributions_of(sampling, raw, rows, where, self._engine.rows.token_ids, None, max(places))
        ranked = found.rank(self._num_ranked)
        if not (self._use_logits and sampled):
            return ranked[:, 0], ranked, None
        tokens = found.choose(Stream.DRAFT)[:, 0]
        return tokens, ranked, found.probabilities(sampled, self._vocab_size)[:, 0]

    def _take_as_one(
        self, rows: list[int], first: Tensor, positions: Tensor, tables: Tensor, places: Sequence[int]
    ) -> Chosen | None:
        """A chain as one piece of work, where no choice of `rows` looks at their tokens or needs distributions, and the
        engine can do that; else None. `places` are the positions that the first step chooses."""
        sampling = self._engine.rows.sampling
        keyed = None
        if sampling.needs_history(rows):
            return None
        if sampling.sampled_indices(rows):
            where = device_integers(list(places), first.device)
            keyed = None if self._use_logits else KeyedRanks.of(sampling, rows, where, Stream.TARGET)
            if keyed is None:
                return None
        ranked = self._engine.rank_steps(first, positions, tables, self._vocab_size, self._num_ranked, keyed)
        if ranked is None:
            return None
        ranked = ranked.clone()
        return Chosen(ranked[:, :, 0], ranked, None)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return cached_tensor(rows, self._engine.device)


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
        """Run chains; `mask_token` stands for a token that is not known, and `most_drafted` tokens are drafted at
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

    @override
    def draft(
        self, rows: list[int], tokens: Sequence[Sequence[int]], ends: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
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

    @override
    def step(
        self, rows: list[int], tables: Tensor, first: Tensor, starts: Sequence[int], lens: Sequence[int]
    ) -> Chosen:
        """Feed the first tokens, and masks behind them."""
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
