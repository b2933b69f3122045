"""Rows of a draft engine whose vocabulary is not the target's: their texts in the draft's tokens, and where these have
keys and values.

The target's tokens say how far a row is, and the draft's how long its text is there: another number, and behind a
verdict the last ones may be others than before. So the engine's rows and blocks are kept here, on the host, and plans
say nothing of them. What a store holds of a row is a text's front and what was drafted behind it; as much of that as is
still the row's text stays, and the rest is fed anew. It knows an engine by protocol, texts and blocks. It does not know
how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trtrun.core.nouns import PrefillChunk, RoundPlan, RowAdmission, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.guiding.host_copies import HostCopies
from trtrun.kvcache.block_table import BlockTable
from trtrun.kvcache.blocks import BlockPool
from trtrun.kvcache.prefix_cache import PrefixCache
from trtrun.speculation.protocols import DraftEngine, KeptRows, PreparedStep
from trtrun.tensors import cached_tensor, device_integers
from trtrun.tokens.translation import TranslatedText, Vocabularies

_FED_AT_ONCE = 32
"""Tokens of a row that are fed in front of a draft, at most; of more the front is read like a prompt."""

_KEPT_TOKENS = 16
"""A row's last tokens, of the target, behind which drafts are spelled."""

_UNFED_BEHIND_DRAFTS = 2
"""Tokens that a row lacks as a rule when it is drafted for."""

_SAMPLING = SamplingParams(seed=0)
"""Sampling parameters of an engine's rows, which choose nothing."""

_MOST_TOLD = 64
"""Verdicts that are kept before somebody needs them."""


@dataclass(frozen=True)
class Translation:
    """What a draft engine with another vocabulary needs.

    Attributes:
        vocabularies: the target's and its own.
        rows: of the target's tokens, kept beside the engine's.
        target_vocab_size: padding included.
        num_blocks: of the engine's store, the null block among them, which may be all.
        most_tokens: of prompts that are read in a round.
        reuses_blocks: whether rows share blocks.
        by_text: whether drafts become the target's tokens as text; else as tokens that both have.
        is_apart: whether drafts travel from the host.
    """

    vocabularies: Vocabularies
    rows: KeptRows
    target_vocab_size: int
    num_blocks: int
    most_tokens: int
    reuses_blocks: bool
    by_text: bool
    is_apart: bool


@dataclass(slots=True)
class _Row:
    """One row.

    Attributes:
        text: in the draft's tokens.
        table: its blocks; None where the store has none.
        adapter_slot: of the adapter that it is computed with; 0 for none.
        gained: tokens of the target that are not in the text yet.
        last: the target's last tokens of the text.
        fed: tokens whose keys and values are in the blocks: the text's front, and drafts behind it.
        is_new: whether the engine knows nothing of it.
        is_made_up: whether it is there to be measured, and stands for as many tokens of the draft.
    """

    text: TranslatedText
    table: BlockTable | None
    gained: list[int]
    is_made_up: bool
    adapter_slot: int
    has_salt: bool
    last: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    is_new: bool = True

    @property
    def shares_blocks(self) -> bool:
        """Whether others may begin with its blocks, and it with theirs: a slot's adapter may be another later."""
        return not self.is_made_up and not self.adapter_slot and not self.has_salt

    @property
    def num_unfed(self) -> int:
        """Tokens of the text that are still to be fed; the last one is again where all were, for what follows it."""
        return len(self.text.tokens) - len(self.fed)


class TranslatedRows:
    """The rows of one draft engine."""

    def __init__(self, engine: DraftEngine[PreparedStep], translation: Translation) -> None:
        """Keep those of `engine`, whose blocks are nobody else's."""
        self._engine = engine
        self._translation = translation
        self._vocabularies = translation.vocabularies
        self._kept = translation.vocabularies.kept(texts=not translation.by_text)
        self._pool = BlockPool(translation.num_blocks) if translation.num_blocks > 1 else None
        self._cache = PrefixCache(self._pool, translation.reuses_blocks) if self._pool is not None else None
        self._rows: dict[int, _Row] = {}
        self._told: list[tuple[Sequence[int], HostCopies]] = []
        self._drafted: tuple[list[int], list[int], HostCopies] | None = None

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        if plan.dropped_rows or plan.admissions:
            self.settle()
        for row in plan.dropped_rows:
            self._drop(row)
        for admission in plan.admissions:
            self._drop(admission.row)
            if admission.sampling.draft_len == 0:  # nothing is ever drafted for it
                continue
            text = TranslatedText(self._vocabularies, self._kept)
            tokens, slot = admission.tokens.tolist(), admission.adapter_slot
            has_salt = admission.sampling.cache_salt is not None
            self._rows[admission.row] = _Row(text, self._new_table(), tokens, plan.is_warm_up, slot, has_salt)

    def note_verdict(self, rows: Sequence[int], verdict: Verdict) -> None:
        """Each of `rows` gains what the verdict says: it is waited for once somebody drafts."""
        if len(self._told) >= _MOST_TOLD:
            self.settle()
        self._told.append((rows, HostCopies(verdict.num_tokens, verdict.tokens)))

    def note_drafts(self, rows: list[int], counts: list[int], tokens: torch.Tensor) -> None:
        """Behind the texts of `rows` the first ones of tokens [R, steps] int64 of the draft were fed, as many as
        `counts` says."""
        self._drafted = rows, counts, HostCopies(tokens)

    def settle(self) -> None:
        """Take in what was drafted, and verdicts, once they are on the host."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            rows, counts, copies = drafted
            for row, count, tokens in zip(rows, counts, copies.lists()[0], strict=True):
                self._rows[row].fed += tokens[:count]
        told, self._told = self._told, []
        for of_verdict, copies in told:
            counts, gained = copies.lists()
            for row, count, tokens in zip(of_verdict, counts, gained, strict=True):
                if row in self._rows:
                    self._rows[row].gained += tokens[:count]

    def last_tokens(self, row: int) -> list[int]:
        """The target's last tokens of a row."""
        return self._rows[row].last

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Tokens of the draft that the texts of `rows` have."""
        return [len(self._rows[row].text.tokens) for row in rows]

    def read_prompts(self, rows: Sequence[int], beginning: Sequence[int], draft_len: int) -> list[int]:
        """Have the engine read what it lacks of texts, as far as the round may, and say which rows can be drafted for.

        Args:
            rows: that are to be drafted for.
            beginning: others whose texts may be read, if there is room in the round.
            draft_len: tokens that will be fed behind texts, at most.

        Returns:
            Places within `rows`.
        """
        updates: list[tuple[int, int, int]] = []
        asked = [row for row in (*rows, *beginning) if row in self._rows]
        known = [row for row in asked if self._update(row, draft_len, updates, is_drafted=row in rows)]
        self._announce(updates, [row for row in known if self._rows[row].is_new])
        self._write(known)
        left, chunks = self._translation.most_tokens, list[PrefillChunk]()
        for row in known:
            entry = self._rows[row]
            count = min(left, entry.num_unfed - 1)
            if entry.num_unfed > _FED_AT_ONCE and count > 0:
                start = len(entry.fed)
                chunks.append(PrefillChunk(row, start, count, is_last=False, has_draft_kv=True))
                entry.fed += entry.text.tokens[start : start + count]
                left -= count
        if chunks:
            self._engine.prefill(chunks)
        ready = {row for row in known if self._rows[row].num_unfed <= _FED_AT_ONCE}
        return [place for place, row in enumerate(rows) if row in ready]

    def catch_up(self, rows: list[int]) -> torch.Tensor:
        """Feed `rows` what they lack; [R, the draft's vocabulary] float32 after their last tokens."""
        counts = [self._rows[row].num_unfed for row in rows]
        context = max(self.lengths(rows)) + 1
        logits = self._engine.catch_up(cached_tensor(rows, self._engine.device), counts, context)
        for row in rows:
            entry = self._rows[row]
            entry.fed += entry.text.tokens[len(entry.fed) :]
            if entry.table is not None and entry.shares_blocks:
                # What is fed once more is written once more, with the same numbers.
                entry.table.commit(entry.text.tokens, min(entry.text.num_final, len(entry.fed) - 2))
        return logits

    def _new_table(self) -> BlockTable | None:
        if self._pool is None or self._cache is None:
            return None
        return BlockTable(self._pool, self._cache, self._engine.block_size)

    def _drop(self, row: int) -> None:
        entry = self._rows.pop(row, None)
        if entry is not None and entry.table is not None:
            entry.table.release()

    def _update(self, row: int, draft_len: int, updates: list[tuple[int, int, int]], *, is_drafted: bool) -> bool:
        """Bring a row's text up to date, and have blocks for it and a draft; those that are new are added to `updates`.
        False where nothing can be drafted for it in this round. A made-up row that `is_drafted` counts as read, so that
        its first round is like those of others."""
        entry = self._rows[row]
        text = entry.text
        if entry.is_new and entry.is_made_up:
            text.begin_with([min(token, self._engine.vocab_size - 1) for token in entry.gained])
            entry.fed = text.tokens[:-_UNFED_BEHIND_DRAFTS] if is_drafted else []
        else:
            text.extend(entry.gained)
        entry.last, entry.gained = [*entry.last, *entry.gained][-_KEPT_TOKENS:], []
        place = min(len(entry.fed), text.first_changed)
        while place < min(len(entry.fed), len(text.tokens) - 1) and entry.fed[place] == text.tokens[place]:
            place += 1
        del entry.fed[min(place, max(0, len(text.tokens) - 1)) :]
        length = len(text.tokens) + draft_len
        if not text.tokens or length > self._engine.most_positions:
            return False
        table = entry.table
        if table is None:
            return True
        if entry.is_new and not table.blocks and entry.shares_blocks:
            found = table.match_prefix(text.tokens[: text.num_final + 1])
            table.adopt(found)
            entry.fed = text.tokens[: len(found) * self._engine.block_size]
        missing = -(-length // self._engine.block_size) - len(table.blocks)
        if self._pool is not None and missing > self._pool.num_available:
            return False
        first = table.reserve(length)
        updates += [(row, index, table.blocks[index]) for index in range(first, len(table.blocks))]
        return True

    def _announce(self, updates: list[tuple[int, int, int]], new: Sequence[int]) -> None:
        """Tell the engine of rows and blocks that are new."""
        if not updates and not new:
            return
        none, first = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32)
        admissions = tuple(
            RowAdmission(row, row, first, 1, 0, True, _SAMPLING, adapter_slot=self._rows[row].adapter_slot)
            for row in new
        )
        table = np.array(updates, dtype=np.int32).reshape(-1, 3)
        self._engine.begin_round(RoundPlan(0, (), admissions, table, (), none, none, none, max_context=1))
        for row in new:
            blocks = self._rows[row].table
            if blocks is not None:  # those that it shares, which are no news to the engine
                held = device_integers(blocks.blocks, self._engine.device)
                self._engine.rows.block_tables[row, : len(held)] = held

    def _write(self, rows: Sequence[int]) -> None:
        """Have the engine's rows say what the texts do."""
        if not rows:
            return
        state, device = self._engine.rows, self._engine.device
        places: list[tuple[int, int, int]] = []
        for row in rows:
            entry = self._rows[row]
            start = 0 if entry.is_new else entry.text.first_changed
            changed = entry.text.tokens[start:]
            if len(changed) > _FED_AT_ONCE:
                state.token_ids[row, start : start + len(changed)] = device_integers(changed, device).to(torch.int32)
            else:
                places += [(row, start + step, token) for step, token in enumerate(changed)]
            entry.text.first_changed, entry.is_new = len(entry.text.tokens), False
        if places:
            at, column, token = device_integers(places, device).unbind(1)
            state.token_ids[at, column] = token.to(torch.int32)
        where, lengths = device_integers([list(rows), self.lengths(rows)], device).unbind()
        state.lengths.index_copy_(0, where, lengths)
