"""Lookahead decoding on the target ranks: the drafting method `lookahead` (Fu et al. 2024, arXiv:2402.02057).

Beside the draft the target computes a window of guesses of what comes further on, each from guesses of the round before
(Jacobi iteration). A guess that went through N - 1 rounds ends an n-gram; a pool of them, the row's own, proposes what
may follow the row's newest token, and so does the row's text. It needs no model. The window is part of the draft tree,
whose shape trtrun.configuration.drafting.draft_trees has: a guess that is right at its place is kept like any
draft token.

Guesses are what the target would choose at their places, with a row's own random numbers: texts of a seed are a
function of what stands before, so that sampled rows converge as greedy ones do. Penalties and bans are left out.

It knows the target's rows and logits. It does not know where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from trtrun.configuration.drafting.draft_trees import LOOKAHEAD_ROUNDS_KEPT, LookaheadSizes
from trtrun.configuration.drafting.text_methods import LookaheadSection
from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.filters import argmax, pieces
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, distinct
from trtrun.speculation.leader_drafts import DraftShape, LeaderDrafter
from trtrun.speculation.protocols import Rows, TargetGroup
from trtrun.tensors import cached_range, cached_tensor, device_integers

_CANDIDATES = 4
"""N-grams that are looked at for each that is verified: many of the pool are the same."""

_MOST_POSITIONS = 1 << 20
"""Positions that are compared at a time: with many rows of long contexts, memory stays within tens of megabytes."""

_MOST_COMPARED = 1 << 24
"""Pairs of tokens of candidates that are compared at a time, a byte each."""

_STRIDE = 7919
"""A prime: tokens that follow one another come from places far apart."""


class NgramPool:
    """The n-grams of each row's last rounds.

    Attributes:
        ngrams: [max_rows, rounds, W, N] int32; -1 where there is none, and behind a shorter one's end.
        written: [max_rows] int64: rounds that each row has had.
    """

    def __init__(self, max_rows: int, sizes: LookaheadSizes, device: torch.device) -> None:
        """Hold none."""
        shape = (max_rows, LOOKAHEAD_ROUNDS_KEPT, sizes.window, sizes.ngram)
        self.ngrams = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.written = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def clear(self, rows: Tensor) -> None:
        """Forget those of `rows` [R] int64."""
        self.ngrams.index_fill_(0, rows, -1)
        self.written.index_fill_(0, rows, 0)

    def add(self, rows: Tensor, ngrams: Tensor) -> None:
        """Take in a round's, [R, W, N]."""
        written = self.written.index_select(0, rows)
        self.ngrams[rows, written % LOOKAHEAD_ROUNDS_KEPT] = ngrams.to(torch.int32)
        self.written.index_copy_(0, rows, written + 1)

    def find(self, rows: Tensor, newest: Tensor, most: int) -> Continuations:
        """What may follow tokens `newest` [R] int64: of the latest round first, and there of the first column."""
        count, width = len(rows), self.ngrams.shape[2]
        flat = self.ngrams.index_select(0, rows).flatten(1, 2)
        slots = cached_range(0, LOOKAHEAD_ROUNDS_KEPT, rows.device)
        age = (self.written.index_select(0, rows).unsqueeze(1) - 1 - slots) % LOOKAHEAD_ROUNDS_KEPT
        order = ((LOOKAHEAD_ROUNDS_KEPT - age) * width).unsqueeze(2) - cached_range(0, width, rows.device)
        scores = torch.where(flat[:, :, 0] == newest.unsqueeze(1), order.flatten(1) + width, 0)
        best, places = torch.topk(scores, min(most, scores.shape[1]), dim=1)
        tokens = flat.gather(1, places.unsqueeze(2).expand(count, -1, flat.shape[2]))[:, :, 1:].to(torch.int64)
        counts = torch.where(best > 0, (tokens >= 0).sum(dim=2), 0)
        return Continuations(tokens.clamp(min=0), counts)


def find_in_texts(token_ids: Tensor, lengths: Tensor, newest: Tensor, draft_len: int, most: int) -> Continuations:
    """What followed tokens `newest` [R] int64 in texts [R, columns] int32 of `lengths` [R] int64, the latest first."""
    columns = token_ids.shape[1]
    places = cached_range(0, columns, token_ids.device)
    last = lengths.unsqueeze(1) - 1
    found = (token_ids == newest.unsqueeze(1)) & (places < last)
    best, _ = torch.topk(torch.where(found, places + 1, 0), min(most, columns), dim=1)
    counts = torch.where(best > 0, last - best + 1, 0).clamp(max=draft_len)
    after = (best.unsqueeze(2) + cached_range(0, draft_len, token_ids.device)).clamp(max=columns - 1)
    tokens = token_ids.gather(1, after.flatten(1)).view(after.shape).to(torch.int64).clamp(min=0)
    return Continuations(tokens, counts)


class LookaheadDrafter(LeaderDrafter):
    """Proposes n-grams of the pool and the row's text, and has the window computed beside them."""

    def __init__(self, rows: Rows, group: TargetGroup, sizes: LookaheadSizes, *, is_chain: bool = False) -> None:
        """Draft for `rows`; the rank that decides keeps windows and pools. No request's own sizes are more than
        `sizes`. With `is_chain` no draft has room for more than one n-gram, so that the target knows no trees."""
        super().__init__(rows, group)
        self._sizes = sizes
        self._is_chain = is_chain
        self._windowed: set[int] = set()
        self._admitted: dict[int, LookaheadSizes] = {}
        if group.decides:
            max_rows = len(rows.lengths)
            # Level N - 1 is what the target says behind level N - 2.
            shape = (max_rows, sizes.ngram, sizes.window)
            self._windows = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._own = torch.zeros((max_rows, 3), dtype=torch.int64, device=self._device)
            self._pool = NgramPool(max_rows, sizes, self._device)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        super().begin_round(plan)
        for admission in plan.admissions:
            self._windowed.discard(admission.row)
            self._admitted[admission.row] = self._sizes.lowered(admission.sampling.lookahead_config)

    @override
    def _make_shape(self, depth: int) -> DraftShape:
        return DraftShape.of(self._sizes.tree(depth).paths, depth, self._device, is_chain=self._is_chain)

    @override
    def _draft(self, plan: RoundPlan, rows: Tensor, newest: Tensor, shape: DraftShape) -> Tensor:
        fresh = [row for row in plan.decode_rows.tolist() if row not in self._windowed]
        if fresh:
            self._begin_windows(fresh)
            self._windowed.update(fresh)
        tree = self._sizes.tree(plan.draft_len)
        width, ngram, verified = self._own.index_select(0, rows).view(-1, 3, 1, 1).unbind(1)
        guesses = self._windows.index_select(0, rows)[:, :-1, : tree.columns].transpose(1, 2)
        columns, levels = (cached_range(0, count, self._device) for count in guesses.shape[1:])
        guesses = torch.where((columns.view(-1, 1) < width) & (levels < ngram - 1), guesses, -1)
        guesses = guesses.flatten(1)[:, 1:]  # but for the row's newest token
        tokens, counts = self._find(plan, rows, newest, ngram.view(-1, 1) - 1)
        steps, places = (cached_range(0, count, self._device) for count in (tree.followed, tokens.shape[1]))
        is_there = (steps < counts.unsqueeze(2)) & (places.view(-1, 1) < verified)
        ngrams = torch.where(is_there, tokens[:, :, : tree.followed], -1)
        return torch.cat((guesses, ngrams.flatten(1)), dim=1)

    def _begin_windows(self, fresh: list[int]) -> None:
        """Windows of rows that have none: guesses are tokens of their texts, as good as any. Pools of rows that another
        request has had are empty."""
        rows = cached_tensor(fresh, self._device)
        self._windows.index_copy_(0, rows, self._fillers(rows))
        admitted = [row for row in fresh if row in self._admitted]
        if admitted:
            own = [self._admitted.pop(row) for row in admitted]
            rows = cached_tensor(admitted, self._device)
            self._pool.clear(rows)
            self._own.index_copy_(0, rows, device_integers(own, self._device))

    def _fillers(self, rows: Tensor) -> Tensor:
        """[R, N, W] int64: tokens from all over the rows' texts."""
        lengths = self._rows.lengths.index_select(0, rows)
        count = self._sizes.ngram * self._sizes.window
        places = (lengths.unsqueeze(1) + cached_range(1, count + 1, self._device)) * _STRIDE % lengths.unsqueeze(1)
        found = self._rows.token_ids[rows.unsqueeze(1), places].to(torch.int64)
        return found.view(len(rows), self._sizes.ngram, self._sizes.window)

    def _find(self, plan: RoundPlan, rows: Tensor, newest: Tensor, longest: Tensor) -> Continuations:
        """G n-grams of each row, of `longest` [R, 1] int64 tokens at most behind `newest` [R] int64, those of its
        first; none says what another one does."""
        most, draft_len = _CANDIDATES * self._sizes.verified, self._sizes.ngram - 1
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = _MOST_POSITIONS // max(columns, LOOKAHEAD_ROUNDS_KEPT * self._sizes.window * self._sizes.ngram)
        share = max(1, min(share, _MOST_COMPARED // ((2 * most) ** 2 * draft_len)))
        found = []
        for start in range(0, len(rows), share):
            part, of_part = rows[start : start + share], newest[start : start + share]
            lengths = self._rows.lengths.index_select(0, part)
            pooled = self._pool.find(part, of_part, most)
            written = find_in_texts(self._rows.token_ids[part, :columns], lengths, of_part, draft_len, most)
            tokens, counts = (torch.cat(both, dim=1) for both in zip(written, pooled, strict=True))
            counts = counts.minimum(longest[start : start + share])
            found.append(distinct(tokens, counts, self._sizes.verified))
        return Continuations(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    @override
    def _learn(self, plan: RoundPlan, rows: Tensor, proposed: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Move windows on; their first level leaves them with an n-gram behind each guess."""
        if not plan.draft_len:
            # Rows that go on without drafts leave their windows behind; pools stay.
            self._windowed.difference_update(plan.decode_rows.tolist())
            return
        assert self._newest is not None
        sizes, num_columns = self._sizes, self._sizes.tree(plan.draft_len).columns
        gained = verdict.num_tokens[: len(rows)]
        window, fillers = self._windows.index_select(0, rows), self._fillers(rows)
        window[:, 0, 0] = self._newest
        width, ngram, _ = self._own.index_select(0, rows).unsqueeze(2).unbind(1)
        last, columns = fillers[:, -1], cached_range(0, sizes.window, self._device)
        if num_columns:
            # A column is said to end where its last guess was verified.
            depths = (ngram - 2 + columns)[:, :num_columns]
            is_said = (depths <= proposed.draft_lens.unsqueeze(1)) & (columns[:num_columns] < width)
            said = self._choose(plan, rows, gained, logits, ngram - 2, depths)
            last = torch.cat((torch.where(is_said, said, last[:, :num_columns]), last[:, num_columns:]), dim=1)
        window.scatter_(1, (ngram - 1).unsqueeze(2).expand(-1, 1, sizes.window), last.unsqueeze(1))
        if num_columns:
            is_kept = is_said.unsqueeze(2) & (cached_range(0, sizes.ngram, self._device) < ngram.unsqueeze(2))
            ngrams = torch.where(is_kept, window[:, :, :num_columns].transpose(1, 2), -1)
            self._pool.add(rows, pad(ngrams, (0, 0, 0, sizes.window - num_columns), value=-1))
        # A guess stays at its place: one level less, and as many columns as the row has gained tokens beside that.
        source = (columns + (gained - 1).clamp(min=0).unsqueeze(1)).unsqueeze(1).expand(-1, sizes.ngram - 1, -1)
        moved = window[:, 1:].gather(2, source.clamp(max=sizes.window - 1))
        fillers[:, :-1] = torch.where(source < width.unsqueeze(2), moved, fillers[:, :-1])
        self._windows.index_copy_(0, rows, fillers)

    def _choose(
        self, plan: RoundPlan, rows: Tensor, gained: Tensor, logits: Tensor, level: Tensor, depths: Tensor
    ) -> Tensor:
        """[R, columns] int64: what the target would choose behind the guesses at `level` [R, 1] int64 of each column,
        which stand `depths` [R, columns] int64 behind the rows' newest tokens."""
        count, num_columns = depths.shape
        state, listed = self._rows, plan.decode_rows.tolist()
        # The row's newest token comes first in its logits, and is the first guess.
        lines = cached_range(0, num_columns, self._device) * (self._sizes.ngram - 1) + level
        places = (state.lengths.index_select(0, rows) - gained).unsqueeze(1) + depths
        chosen = torch.empty_like(depths)
        for part in pieces(count, num_columns * logits.shape[2]):
            every = lines[part].unsqueeze(2).expand(-1, -1, logits.shape[2])
            of_part, of_rows = logits[: len(rows)][part].gather(1, every), listed[part]
            if state.sampling.needs_history(of_rows):
                chosen[part] = argmax(of_part)
                continue
            repeated = [row for row in of_rows for _ in range(num_columns)]
            found = distributions_of(
                state.sampling,
                of_part.flatten(0, 1).unsqueeze(1),
                repeated,
                places[part].flatten(),
                state.token_ids,
            )
            chosen[part] = found.choose(Stream.TARGET).view(-1, num_columns)
        return chosen


@DRAFTERS.register("lookahead")
def make_lookahead_drafter(context: DrafterContext) -> Drafter:
    """Windows and pools of the section's sizes."""
    section = context.section
    assert isinstance(section, LookaheadSection) and context.target is not None and context.group is not None
    is_chain = section.size_of(section.draft_len).paths == 1
    return LookaheadDrafter(context.target.rows, context.group, section.sizes, is_chain=is_chain)
