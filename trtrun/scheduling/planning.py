"""A round plan under construction: collects rows, block updates and the token budget, then freezes to a RoundPlan.

It knows the layout of `RoundPlan` and nothing of policy: who gets into the round is decided in `admission.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trtrun.core.nouns import PrefillChunk, RoundPlan, RowAdmission
from trtrun.kvcache.tile_widths import padding
from trtrun.scheduling.batch import PlannedRow, ScoredRow, Work
from trtrun.scheduling.completions import Completion
from trtrun.scheduling.limits import SchedulerLimits, most_unfed

MOST_MISSED_ROUNDS = 30
_MISSED_BY_MANY, _MANY_ROWS = 6, 17
_MISSED_BY_FEW, _FEW_ROWS = 126, 4
"""Rounds without drafts that the draft engine sits out in a row: few of many rows, whose tokens add up."""

MOST_FED_LATE = 64
"""Tokens of the longest prompt that the draft store reads with the first draft, in small parts."""


def most_missed_rounds(num_rows: int, *, may_sit_out: bool) -> int:
    """Rounds without drafts that a draft engine sits out in a row, and after which rows that do not pay are left."""
    if num_rows >= _MANY_ROWS:
        return _MISSED_BY_MANY
    return _MISSED_BY_FEW if may_sit_out and num_rows <= _FEW_ROWS else MOST_MISSED_ROUNDS


def most_catch_up(draft_len: int, *, drafts_in_parallel: bool) -> int:
    """Tokens of a row that the draft engine feeds at once after them; where it lacks more, it does so in parts."""
    return most_unfed(draft_len, drafts_in_parallel=drafts_in_parallel) + MOST_MISSED_ROUNDS


def most_lacking(draft_len: int, *, drafts_in_parallel: bool) -> int:
    """Tokens at a row's end that the draft store lacks, at most, however long it sits out."""
    return most_unfed(draft_len, drafts_in_parallel=drafts_in_parallel) + _MISSED_BY_FEW + MOST_FED_LATE


class PlanBuilder:
    """Parts of one round.

    Where prompts are cut into tiles, what fills those up counts as tokens, and a chunk that does not end its prompt is
    whole tiles. So a round has no more rows of activations than it may have tokens: products take rows in large parts,
    and a few more rows would have all weights read once more.

    Attributes:
        budget: tokens that still fit into the round; a last tile may take a little more, and a prompt alone.
        most_alone: tokens of a prompt that is read alone, which may be more.
        oldest: of the prompts that are being read; where its logits are reported, no other's are in the round.
    """

    def __init__(
        self,
        budget: int,
        prompt_tile: int | None = None,
        most_chunk: int | None = None,
        most_reported: int | None = None,
        block_size: int = 1,
        most_alone: int | None = None,
    ) -> None:
        """Plan up to `budget` tokens, or `most_alone` of one prompt; see `SchedulerLimits` for the others."""
        self.budget = budget
        self.most_alone = most_alone or budget
        self.oldest: Completion | None = None
        self._tile = prompt_tile or 1
        self._most_chunk = most_chunk or self.most_alone
        self._most_reported = max(most_reported or self.most_alone, self._tile)
        self._decoding: list[tuple[Completion, int]] = []
        self._last_chunks: list[PlannedRow] = []
        self._chunks: list[PlannedRow] = []
        self._scored: list[ScoredRow] = []
        self._reported: list[ScoredRow] = []
        self.num_announced = 0
        self._prefill: list[PrefillChunk] = []
        self._admissions: list[RowAdmission] = []
        self._updates: list[tuple[int, int, int]] = []
        self._max_context = 0
        self._catch_up: list[int] = []
        self._given: list[int] = []
        self._timed: list[int] = []
        self._starts: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int, int]] = []
        self._block_size = block_size

    @classmethod
    def of(cls, limits: SchedulerLimits) -> PlanBuilder:
        """Plan a round within limits."""
        return cls(
            limits.shared_tokens,
            limits.prompt_tile,
            limits.most_chunk,
            limits.most_reported,
            limits.block_size,
            limits.max_num_tokens,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no row would run."""
        return not self._decoding and not self._prefill

    def admit(self, running: Completion) -> None:
        """Announce a row that just got its place, with its whole block table."""
        request = running.request
        self.num_announced += len(running.token_ids)
        self._admissions.append(
            RowAdmission(
                row=running.row,
                request_id=request.request_id,
                tokens=np.array(running.token_ids, dtype=np.int32),
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=running.num_prefilled,
                has_draft_kv=running.has_draft_kv,
                sampling=request.sampling,
                lists=request.lists,
                draft_tokens=np.array(running.predicted_output if running.is_drafted_for else (), dtype=np.int32),
                adapter_slot=0 if request.adapter is None else request.adapter.slot,
            )
        )
        if running.table.first_snapshot:
            self._starts.append((running.row, running.table.first_snapshot))
        self.add_blocks(running, 0)

    def add_blocks(self, running: Completion, first_new: int) -> None:
        """Announce the blocks of a row's table from index `first_new` on."""
        blocks = running.table.blocks
        for index in range(first_new, len(blocks)):
            self._updates.append((running.row, index, blocks[index]))

    def decode(self, running: Completion, longest: int, draft_len: int, num_verified: int) -> None:
        """Have a row of up to `longest` tokens draft `draft_len` more, one behind the other, and verify `num_verified`
        in all; counts the result as pending."""
        most_gained = draft_len + 1
        if longest + most_gained > self._max_context:
            self._max_context = longest + most_gained
        self._decoding.append((running, draft_len))
        if running.predicted_output and draft_len and running.may_follow_predicted_output:
            self._given.append(running.row)
        if running.may_change_by_length(longest - len(running.request.prompt_token_ids) + draft_len):
            self._timed.append(running.row)
        running.num_pending_rounds += 1
        running.num_pending_tokens += most_gained
        self.budget -= num_verified

    def takes_prompts(self, most: int) -> bool:
        """Whether `most` tokens are enough for a chunk. The first one may be as short as it has to be, so that every
        round that has a token left reads on."""
        return most >= self._tile or (most > 0 and not self._prefill)

    def most_read(self, running: Completion) -> int:
        """Tokens of a row's prompt that the round may read, however much of it is left."""
        return min(running.num_unread, self._most_reported) if running.reports_prompt else running.num_unread

    def may_read(self, running: Completion) -> bool:
        """Whether a prompt may be read on in this round: those whose logits are reported have few positions of it, so
        that reports stay small, and the first one its share at least."""
        if not running.reports_prompt:
            return True
        if self.oldest is not None and self.oldest.reports_prompt:
            return running is self.oldest
        return not self._reported or self._most_reported >= self._tile

    def prefill(self, running: Completion, most: int) -> None:
        """Have a row compute its next admission tokens, at most `most`, which is one at least; the last chunk's result
        counts as pending. There are places for what it reads, where layers have windows."""
        start = running.num_prefilled
        length = min(self.most_read(running), most, self._most_chunk)
        if self._tile <= length < running.num_unread:
            length -= length % self._tile
        end = start + length
        # The last token of a prompt is always computed again, so that no row begins behind it.
        whole = min(end, running.num_admitted_tokens - 1) // self._block_size * self._block_size
        if start < running.table.parting < whole:  # snapshots are taken where chunks end
            whole = end = running.table.parting
            length = end - start
        is_last = end == running.num_admitted_tokens
        running.num_prefilled = end
        running.table.hold_places(end)
        if whole > start and (snapshot := running.table.take_snapshot(whole)) is not None:
            self._saves.append((running.row, whole, snapshot))
        self.budget -= length + padding(length, self._tile)
        self._max_context = max(self._max_context, end + 1)
        scored = running.scores.part_of(start, length) if running.scores is not None else None
        if scored is not None:
            self._scored.append(ScoredRow(running, running.epoch, scored.length))
        reported = running.logits.part_of(start, length) if running.logits is not None else None
        if reported is not None:
            self._most_reported -= reported.length
            self._reported.append(ScoredRow(running, running.epoch, reported.length))
        self._prefill.append(PrefillChunk(running.row, start, length, is_last, running.is_prompt_fed, scored, reported))
        if is_last:
            if running.may_change_by_length(running.num_output_tokens):
                self._timed.append(running.row)
            running.num_pending_rounds += 1
            running.num_pending_tokens += 1
            self._last_chunks.append(_prefilled(running, Work.LAST_CHUNK))
        else:
            self._chunks.append(_prefilled(running, Work.CHUNK, end))

    def settle_drafting(
        self,
        unfed_after: Callable[[int], int],
        *,
        drafts_pay: bool = True,
        may_sit_out: bool = True,
        apart: bool = False,
    ) -> list[PlannedRow]:
        """Decide whether the draft engine feeds the decoding rows in this round; call it once, when all are planned.

        Args:
            unfed_after: `SchedulerLimits.most_unfed`.
            drafts_pay: False where nothing has been worth drafting for long: then rows are left for good that would
                have to be fed, or that were fed for many rounds without a draft.
            may_sit_out: `SchedulerLimits.may_sit_out`.
            apart: whether rows that nothing is drafted for may sit out a round in which others draft.

        Returns:
            Rows that get tokens, in the order of `RoundPlan.sampled_rows`.

        Where nothing is drafted it may sit the round out, and feed what it missed later: its weights are then read
        once in several rounds. Each round that it missed gave one token, so the host knows how many it lacks.
        """
        most_missed = most_missed_rounds(len(self._decoding), may_sit_out=may_sit_out)
        drafts = any(draft_len for _, draft_len in self._decoding)
        late = [
            running
            for running, _ in self._decoding
            if running.has_draft_kv and running.num_missed_rounds >= most_missed
        ]
        if late and not drafts and not drafts_pay:
            for running in late:
                running.is_drafted_for = running.has_draft_kv = False
            late = []
        # Where some are late, all are fed: the draft's weights are read once for all.
        may_leave_out = may_sit_out and not late and (apart or not drafts)
        planned = []
        for running, draft_len in self._decoding:
            if running.has_draft_kv and (draft_len or not may_leave_out):
                self._catch_up.append(running.num_unfed)
                running.num_missed_rounds = 0 if may_sit_out or drafts else running.num_missed_rounds + 1
                running.num_unfed = unfed_after(draft_len)
            else:
                self._catch_up.append(0)
                running.num_missed_rounds += 1
                running.num_unfed += 1
            unfed = running.num_unfed
            planned.append(PlannedRow(running, running.epoch, Work.DECODE, draft_len, running.has_draft_kv, unfed, 0))
        return planned + self._last_chunks

    def chunks(self) -> list[PlannedRow]:
        """Rows whose prefill goes on after this round."""
        return self._chunks

    def scored(self) -> list[ScoredRow]:
        """Rows whose prompt's log probabilities the round reports."""
        return self._scored

    def reported(self) -> list[ScoredRow]:
        """Rows of whose prompt the round reports logits."""
        return self._reported

    def build(
        self, round_index: int, dropped_rows: tuple[int, ...], window_places: Sequence[tuple[int, int]] = ()
    ) -> RoundPlan:
        """Freeze to the plan that ranks get; see `RoundPlan` for the arguments."""
        rows = [running.row for running, _ in self._decoding]
        # -1 says that nothing is drafted for the row in any round; 0 leaves it a row that may be drafted later.
        lengths = [draft_len if running.is_drafted_for else -1 for running, draft_len in self._decoding]
        return RoundPlan(
            round_index=round_index,
            dropped_rows=dropped_rows,
            admissions=tuple(self._admissions),
            block_updates=np.array(self._updates, dtype=np.int32).reshape(-1, 3),
            prefill=tuple(self._prefill),
            decode_rows=np.array(rows, dtype=np.int32),
            draft_lens=np.array(lengths, dtype=np.int32),
            catch_up=np.array(self._catch_up, dtype=np.int32),
            predicted_output_rows=tuple(self._given),
            timed_rows=tuple(self._timed),
            max_context=self._max_context,
            window_places=np.array(window_places, dtype=np.int32).reshape(-1, 2),
            snapshot_starts=tuple(self._starts),
            snapshot_saves=tuple(self._saves),
        )


def _prefilled(running: Completion, work: Work, end: int = 0) -> PlannedRow:
    """The part of a row whose prompt is read."""
    return PlannedRow(running, running.epoch, work, 0, running.is_prompt_fed, running.num_unfed, end)
