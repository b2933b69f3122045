"""A draft model and a target without any model: what follows a text is a hash of it, for both, and they often agree.

The draft's store holds tokens, and what it drafts follows from what it finds there: a wrong, old or missing one gives
other drafts. `HeldDrafter` is held against what its rows' tokens are and what was verified of its drafts.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan, Step, Verdict
from trtrun.engine.rows import RowState
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.ahead.policy import GuessSpace

CPU = torch.device("cpu")
VOCAB, MAX_ROWS, BLOCK, DRAFT_LEN, MAX_SEQ_LEN, NUM_BLOCKS, GUESSES = 24, 4, 4, 3, 60, 48, 24


@lru_cache(maxsize=1 << 16)
def ranked_behind(text: tuple[int, ...]) -> tuple[int, ...]:
    """What the draft takes for likely behind a text, best first: all ids."""
    seed = zlib.crc32(np.array(text, dtype=np.int32).tobytes())
    return tuple(np.random.default_rng(seed).permutation(VOCAB).tolist())


@lru_cache(maxsize=1 << 16)
def next_of(text: tuple[int, ...]) -> int:
    """What the target says behind a text: as a rule what the draft takes for likely."""
    drawn = zlib.crc32(np.array([*text, -7], dtype=np.int32).tobytes()) % 100
    return ranked_behind(text)[0 if drawn < 60 else 1 if drawn < 80 else 2 if drawn < 90 else drawn % VOCAB]


class TextEngine:
    """A DraftEngine whose store holds tokens, -1 where nothing was written."""

    device, vocab_size, has_graphs, most_positions, block_size = CPU, VOCAB, False, MAX_SEQ_LEN, BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.rows = RowState(MAX_ROWS, MAX_SEQ_LEN, BLOCK, DRAFT_LEN, VOCAB, CPU, GUESSES)
        self._store = np.full((num_blocks, BLOCK), -1)

    def begin_round(self, plan: RoundPlan) -> None:
        self.rows.apply(plan)

    def close(self) -> None:
        """There is nothing to give back."""

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        return self.rows.tables(rows, -(-context // BLOCK))

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        for chunk in chunks:
            places = range(chunk.start, chunk.start + chunk.length)
            tokens, table = self.rows.token_ids[chunk.row].tolist(), self.rows.block_tables[chunk.row].tolist()
            self._write(table, [tokens[place] for place in places], places)

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int = 1
    ) -> torch.Tensor:
        assert num_last == 1
        found = torch.zeros((len(tokens), VOCAB))
        for row, (of_row, where, table) in enumerate(
            zip(tokens.tolist(), positions.tolist(), tables.tolist(), strict=True)
        ):
            self._write(table, of_row, where)
            text = tuple(int(self._store[table[at // BLOCK], at % BLOCK]) for at in range(max(where) + 1))
            found[row, list(ranked_behind(text))] = torch.arange(VOCAB, 0, -1, dtype=torch.float32)
        return found

    def _write(self, table: list[int], tokens: Sequence[int], places: Sequence[int]) -> None:
        for token, place in zip(tokens, places, strict=True):
            if place >= 0:
                self._store[table[place // BLOCK], place % BLOCK] = token

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(tables, positions[:, step : step + 1]) for step in range(positions.shape[1])]

    def decode(self, step: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return self.feed(tokens.unsqueeze(1), step[1], step[0])

    def rank_steps(self, *values: Any) -> None:
        return None

    def copy_tokens(self, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor) -> None:
        self._store[target.numpy(), offset.numpy()] = self._store[source.numpy(), offset.numpy()]

    def share_states(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """It keeps none."""

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._store[target.numpy()] = self._store[source.numpy()]


class HeldDrafter(AheadDrafter[Any]):
    """A drafter whose drafts, and whose idea of what was verified, are held against the rows' tokens."""

    def __init__(self, seen: Counter[str]) -> None:
        space = GuessSpace(GUESSES, MAX_ROWS, NUM_BLOCKS, (BLOCK + DRAFT_LEN - 2) // BLOCK + 1)
        super().__init__(TextEngine(NUM_BLOCKS + space.num_blocks), VOCAB, DRAFT_LEN, False, space)
        self.seen = seen
        self.tokens: dict[int, list[int]] = {}
        self.broken: set[int] = set()

    def begin_round(self, plan: RoundPlan) -> None:
        super().begin_round(plan)
        self.broken.difference_update(plan.dropped_rows)
        self.tokens.update({one.row: one.tokens.tolist() for one in plan.admissions})

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        found = super().propose(plan, probability_rows)
        for row, draft, count in zip(
            plan.decode_rows.tolist(), found.tokens.tolist(), found.draft_lens.tolist(), strict=True
        ):
            text = list(self.tokens[row])
            if row in self.broken:
                continue
            assert row not in self._texts or self._texts[row].length == len(text)
            for token in () if row in self._has_given else draft[:count]:
                assert token == ranked_behind(tuple(text))[0], f"row {row} has something wrong in its store"
                text.append(token)
        return found

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is not None:
            gained = zip(plan.sampled_rows, verdict.num_tokens.tolist(), verdict.tokens.tolist(), strict=True)
            for row, count, tokens in gained:
                if not count:  # the row is at its end, whatever the target does with it meanwhile
                    self.broken.add(row)
                elif row in self._texts and row not in self.broken:
                    believed = self._texts[row].draft[: count - 1]
                    assert tokens[: count - 1] == believed, f"row {row}: {tokens[: count - 1]}, not {believed}"
                self.tokens[row] += tokens[:count]
        super().observe(plan, verdict, step)
