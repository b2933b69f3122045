"""Lookahead decoding on the target ranks: the drafting method `lookahead` (Fu et al. 2024, arXiv:2402.02057).

Beside the draft the target computes a window of guesses of what comes further on, each from guesses of the round before
(Jacobi iteration). A guess that went through N - 1 rounds ends an n-gram; a pool of them, the row's own, proposes what
may follow the row's newest token, and so does the row's text. It needs no model. The window is part of the draft tree,
whose shape trtrun.configuration.lookahead_windows has: a guess that is right at its place is kept like any draft token.

Guesses are what the target would choose at their places, with a row's own random numbers: texts of a seed are a
function of what stands before, so that sampled rows converge as greedy ones do. Penalties and bans are left out.

It knows the target's rows and logits. It does not know where they come from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtrun.configuration.drafting_methods import LookaheadSection
from trtrun.configuration.lookahead_windows import LookaheadSizes
from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.likeliest import argmax
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, distinct
from trtrun.speculation.led_drafts import DraftShape, LedDrafter
from trtrun.speculation.protocols import Rows, TargetGroup
from trtrun.tensors import kept_integers, kept_range

_ROUNDS_KEPT = 128
"""Rounds whose n-grams a row's pool has."""

_CANDIDATES = 4
"""N-grams that are looked at for each that is verified: many of the pool are the same."""

_MOST_POSITIONS = 1 << 20
"""Positions that are compared at a time: with many rows of long contexts, memory stays within some tens of megabytes."""

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
        shape = (max_rows, _ROUNDS_KEPT, sizes.window, sizes.ngram)
        self.ngrams = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.written = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def clear(self, rows: Tensor) -> None:
        """Forget those of `rows` [R] int64."""
        self.ngrams.index_fill_(0, rows, -1)
        self.written.index_fill_(0, rows, 0)

    def add(self, rows: Tensor, ngrams: Tensor) -> None:
        """Take in a round's, [R, W, N]."""
        written = self.written.index_select(0, rows)
        self.ngrams[rows, written % _ROUNDS_KEPT] = ngrams.to(torch.int32)
        self.written.index_copy_(0, rows, written + 1)

    def find(self, rows: Tensor, newest: Tensor, most: int) -> Continuations:
        """What may follow tokens `newest` [R] int64: of the latest round first, and there of the first column."""
        count, width = len(rows), self.ngrams.shape[2]
        flat = self.ngrams.index_select(0, rows).flatten(1, 2)
        slots = kept_range(0, _ROUNDS_KEPT, rows.device)
        age = (self.written.index_select(0, rows).unsqueeze(1) - 1 - slots) % _ROUNDS_KEPT
        order = ((_ROUNDS_KEPT - age) * width).unsqueeze(2) - kept_range(0, width, rows.device)
        scores = torch.where(flat[:, :, 0] == newest.unsqueeze(1), order.flatten(1) + width, 0)
        best, places = torch.topk(scores, min(most, scores.shape[1]), dim=1)
        tokens = flat.gather(1, places.unsqueeze(2).expand(count, -1, flat.shape[2]))[:, :, 1:].to(torch.int64)
        counts = torch.where(best > 0, (tokens >= 0).sum(dim=2), 0)
        return Continuations(tokens.clamp(min=0), counts)


def find_in_texts(token_ids: Tensor, lengths: Tensor, newest: Tensor, draft_len: int, most: int) -> Continuations:
    """What followed tokens `newest` [R] int64 in texts [R, columns] int32 of `lengths` [R] int64, the latest first."""
    columns = token_ids.shape[1]
    places = kept_range(0, columns, token_ids.device)
    last = lengths.unsqueeze(1) - 1
    found = (token_ids == newest.unsqueeze(1)) & (places < last)
    best, _ = torch.topk(torch.where(found, places + 1, 0), min(most, columns), dim=1)
    counts = torch.where(best > 0, last - best + 1, 0).clamp(max=draft_len)
    after = (best.unsqueeze(2) + kept_range(0, draft_len, token_ids.device)).clamp(max=columns - 1)
    tokens = token_ids.gather(1, after.flatten(1)).view(after.shape).to(torch.int64).clamp(min=0)
    return Continuations(tokens, counts)


class LookaheadDrafter(LedDrafter):
    """Proposes n-grams of the pool and the row's text, and has the window computed beside them."""

    def __init__(self, rows: Rows, group: TargetGroup, sizes: LookaheadSizes) -> None:
        """Draft for `rows`; the rank that decides keeps windows and pools."""
        super().__init__(rows, group)
        self._sizes = sizes
        self._windowed: set[int] = set()
        if group.decides:
            max_rows = len(rows.lengths)
            # Level N - 1 is what the target says behind level N - 2.
            shape = (max_rows, sizes.ngram, sizes.window)
            self._windows = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._pool = NgramPool(max_rows, sizes, self._device)

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        super().begin_round(plan)
        self._windowed.difference_update(plan.dropped_rows)
        self._windowed.difference_update(admission.row for admission in plan.admissions)

    def _make_shape(self, depth: int) -> DraftShape:
        """See LedDrafter."""
        return DraftShape.of(self._sizes.tree(depth).paths, depth, self._device, is_chain=False)

    def _draft(self, plan: RoundPlan, rows: Tensor, newest: Tensor, shape: DraftShape) -> Tensor:
        """See LedDrafter."""
        fresh = [row for row in plan.decode_rows.tolist() if row not in self._windowed]
        if fresh:
            self._begin_windows(kept_integers(fresh, self._device))
            self._windowed.update(fresh)
        tree = self._sizes.tree(plan.draft_len)
        guesses = self._windows.index_select(0, rows)[:, :-1, : tree.columns]
        guesses = guesses.transpose(1, 2).flatten(1)[:, 1:]  # but for the row's newest token
        tokens, counts = self._find(plan, rows, newest)
        steps = kept_range(0, tree.followed, self._device)
        ngrams = torch.where(steps < counts.unsqueeze(2), tokens[:, :, : tree.followed], -1)
        return torch.cat((guesses, ngrams.flatten(1)), dim=1)

    def _begin_windows(self, rows: Tensor) -> None:
        """Windows of rows that have none: guesses are tokens of their texts, as good as any."""
        self._pool.clear(rows)
        self._windows.index_copy_(0, rows, self._fillers(rows))

    def _fillers(self, rows: Tensor) -> Tensor:
        """[R, N, W] int64: tokens from all over the rows' texts."""
        lengths = self._rows.lengths.index_select(0, rows)
        count = self._sizes.ngram * self._sizes.window
        places = (lengths.unsqueeze(1) + kept_range(1, count + 1, self._device)) * _STRIDE % lengths.unsqueeze(1)
        found = self._rows.token_ids[rows.unsqueeze(1), places].to(torch.int64)
        return found.view(len(rows), self._sizes.ngram, self._sizes.window)

    def _find(self, plan: RoundPlan, rows: Tensor, newest: Tensor) -> Continuations:
        """G n-grams of each row, those of the pool first; none says what another one does."""
        most, draft_len = _CANDIDATES * self._sizes.verified, self._sizes.ngram - 1
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = max(1, _MOST_POSITIONS // columns)
        found = []
        for start in range(0, len(rows), share):
            part, of_part = rows[start : start + share], newest[start : start + share]
            lengths = self._rows.lengths.index_select(0, part)
            pooled = self._pool.find(part, of_part, most)
            written = find_in_texts(self._rows.token_ids[part, :columns], lengths, of_part, draft_len, most)
            tokens, counts = (torch.cat(both, dim=1) for both in zip(pooled, written, strict=True))
            found.append(distinct(tokens, counts, self._sizes.verified))
        return Continuations(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _learn(self, plan: RoundPlan, rows: Tensor, proposed: Draft, verdict: Verdict, logits: Tensor) -> None:
        """See LedDrafter: windows move on, and their first level leaves them with an n-gram behind each guess."""
        if not plan.draft_len:
            # Rows that go on without drafts leave their windows behind.
            self._windowed.difference_update(plan.decode_rows.tolist())
            return
        assert self._newest is not None
        sizes, tree = self._sizes, self._sizes.tree(plan.draft_len)
        gained = verdict.num_tokens[: len(rows)]
        window = self._windows.index_select(0, rows)
        window[:, 0, 0] = self._newest
        fillers = self._fillers(rows)
        window[:, -1] = fillers[:, -1]
        if tree.columns:
            said = self._choose(plan, rows, gained, logits)
            deepest = kept_range(sizes.ngram - 2, sizes.ngram - 2 + tree.columns, self._device)
            is_said = deepest <= proposed.draft_lens.unsqueeze(1)
            window[:, -1, : tree.columns] = torch.where(is_said, said, window[:, -1, : tree.columns])
            ngrams = torch.where(is_said.unsqueeze(2), window[:, :, : tree.columns].transpose(1, 2), -1)
            self._pool.add(rows, pad(ngrams, (0, 0, 0, sizes.window - tree.columns), value=-1))
        # A guess stays at its place: one level less, and as many columns as the row has gained tokens beside that.
        columns = kept_range(0, sizes.window, self._device) + (gained - 1).clamp(min=0).unsqueeze(1)
        columns = columns.unsqueeze(1).expand(-1, sizes.ngram - 1, -1)
        moved = window[:, 1:].gather(2, columns.clamp(max=sizes.window - 1))
        fillers[:, :-1] = torch.where(columns < sizes.window, moved, fillers[:, :-1])
        self._windows.index_copy_(0, rows, fillers)

    def _choose(self, plan: RoundPlan, rows: Tensor, gained: Tensor, logits: Tensor) -> Tensor:
        """[R, columns] int64: what the target would choose behind the last level of each column."""
        tree, state = self._sizes.tree(plan.draft_len), self._rows
        level = self._sizes.ngram - 2
        nodes = [1 + tree.place(column, level) for column in range(tree.columns)]
        lines = logits[: len(rows)].index_select(1, kept_integers(nodes, self._device))
        listed: list[int] = plan.decode_rows.tolist()
        if state.sampling.needs_history(listed):
            return argmax(lines)
        every = [row for row in listed for _ in nodes]
        before = (state.lengths.index_select(0, rows) - gained).unsqueeze(1)
        places = before + kept_range(level, level + tree.columns, self._device)
        found = distributions_of(
            state.sampling, lines.flatten(0, 1).unsqueeze(1), every, places.flatten(), state.token_ids
        )
        return found.choose(Stream.TARGET).view(len(rows), tree.columns)


@DRAFTERS.register("lookahead")
def make_lookahead_drafter(place: DrafterContext) -> Drafter:
    """Windows and pools of the section's sizes."""
    section = place.section
    assert isinstance(section, LookaheadSection) and place.target is not None and place.group is not None
    return LookaheadDrafter(place.target.rows, place.group, section.sizes)
