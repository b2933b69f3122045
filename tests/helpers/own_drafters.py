"""Drafting methods that are not the product's, one of each placement: what a new one takes, and no file of the product.

A method is a class, a function that makes it, and an entry in the table of methods that says where it runs:

- `repeating`: on the target ranks, from the target's own rows, on their device.
- `recalling`: the same, with a store of its own that it fills from the target's hidden states.
- `stepping`: on draft ranks that share the target's devices, with a draft model.
- `remembering`: on draft ranks with devices of their own, where drafts and verdicts are on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
from pipelines import Reference

from parallel.topology import Role
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.drafting.speculation_section import DraftingMethod, SpeculationSection
from trtrun.core.nouns import Draft, RoundPlan, Step, Verdict
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.protocols import DraftEngine, Rows


class Repeating(Drafter):
    """What a row's newest token was followed by is that token again."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def rows(self) -> Rows:
        return self._rows

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        rows = torch.from_numpy(plan.decode_rows).to(torch.int64)
        newest = self._rows.token_ids[rows, self._rows.lengths[rows] - 1].to(torch.int64)
        most = torch.from_numpy(plan.draft_lens).to(torch.int64).clamp(min=0)
        return Draft(newest.unsqueeze(1).expand(-1, plan.draft_len).contiguous(), most)


class Recalling(Repeating):
    """Looks in a row's earlier hidden states for the one most like the newest that is known, with each weighed by a
    matrix of its own, and proposes what followed there.

    Attributes:
        watched: of each request, what was tapped by position; and all of the rows' tokens when it was last seen.
    """

    watched: ClassVar[dict[int, dict[int, torch.Tensor]]] = {}

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._requests: dict[int, int] = {}
        self._weight: torch.Tensor | None = None
        self._store: dict[int, dict[int, torch.Tensor]] = {}

    def begin_round(self, plan: RoundPlan) -> None:
        for admission in plan.admissions:
            self._requests[admission.row] = admission.request_id
            self._store[admission.row] = {}
            self.watched.setdefault(admission.request_id, {})

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        draft = super().propose(plan, probability_rows)
        for index, row in enumerate(plan.decode_rows.tolist()):
            length = int(self._rows.lengths[row])
            known = {place: key for place, key in self._store[row].items() if place < length - 2}
            if length - 2 not in self._store[row] or not known:
                continue
            newest, places = self._store[row][length - 2], list(known)
            distances = (torch.stack(list(known.values())) - newest).norm(dim=1)
            place = places[int(distances.argmin())] + 2
            behind = self._rows.token_ids[row, place : min(length, place + plan.draft_len)].long()
            draft.tokens[index, : len(behind)] = behind
        return draft

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        assert step is not None and step.hidden is not None
        for chunk, tapped in zip(plan.prefill, step.hidden.prompts, strict=True):
            assert len(tapped) == chunk.length
            self._take(chunk.row, chunk.start, tapped)
        counts = verdict.num_tokens.tolist() if verdict is not None else []
        for row, count, tapped in zip(plan.decode_rows.tolist(), counts, step.hidden.decoded, strict=False):
            self._take(row, int(self._rows.lengths[row]) - count - 1, tapped[:count])

    def _take(self, row: int, start: int, tapped: torch.Tensor) -> None:
        tapped = tapped.clone()
        if self._weight is None:
            shape = (tapped.shape[2], 32)
            self._weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        keys = tapped[:, -1].float() @ self._weight
        for step in range(len(tapped)):
            self._store[row][start + step] = keys[step]
            self.watched[self._requests[row]][start + step] = tapped[step]


class Stepping(Drafter):
    """A model's likeliest tokens, step by step."""

    def __init__(self, engine: DraftEngine[Any]) -> None:
        self._engine = engine

    @property
    def rows(self) -> Rows:
        return self._engine.rows

    def begin_round(self, plan: RoundPlan) -> None:
        self._engine.begin_round(plan)

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        engine, state = self._engine, self._engine.rows
        engine.prefill([chunk for chunk in plan.prefill if chunk.has_draft_kv])
        most = torch.from_numpy(plan.draft_lens).to(torch.int64).clamp(min=0)
        tokens = torch.zeros((len(most), plan.draft_len), dtype=torch.int64)
        counts = plan.catch_up.tolist()
        followed = [index for index, count in enumerate(counts) if count > 0]
        if not followed:
            return Draft(tokens, most)
        rows = torch.from_numpy(plan.decode_rows[followed]).to(torch.int64)
        logits = engine.catch_up(rows, [counts[index] for index in followed], plan.max_context)
        if plan.draft_len == 0:
            return Draft(tokens, most)
        positions = state.lengths[rows].unsqueeze(1) + torch.arange(plan.draft_len)
        steps = engine.prepare_steps(engine.tables(rows, plan.max_context), positions)
        for step in range(plan.draft_len):
            tokens[followed, step] = logits.argmax(dim=1)
            if step + 1 < plan.draft_len:
                logits = engine.decode(steps[step], tokens[followed, step])
        return Draft(tokens, most)

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is None:
            return
        self._engine.rows.advance(torch.tensor(plan.sampled_rows), verdict.num_tokens, verdict.tokens)

    def close(self) -> None:
        self._engine.close()


class Remembering(Drafter):
    """What followed a row's newest token the last time, and so on: from verdicts alone, the engine computes nothing."""

    def __init__(self, engine: DraftEngine[Any]) -> None:
        self._engine = engine
        self._tokens: dict[int, list[int]] = {}

    @property
    def rows(self) -> Rows:
        return self._engine.rows

    def begin_round(self, plan: RoundPlan) -> None:
        for row in plan.dropped_rows:
            self._tokens.pop(row, None)
        self._tokens |= {admission.row: admission.tokens.tolist() for admission in plan.admissions}

    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        drafts = [self._continue(self._tokens[row], most) for row, most in zip(*self._asked(plan), strict=True)]
        width = max(map(len, drafts), default=0)
        padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
        return Draft(torch.tensor(padded).view(len(drafts), width).long(), torch.tensor(list(map(len, drafts))).long())

    def observe(self, plan: RoundPlan, verdict: Verdict | None, step: Step | None) -> None:
        if verdict is None:
            return
        gained = zip(plan.sampled_rows, verdict.tokens.tolist(), verdict.num_tokens.tolist(), strict=True)
        for row, tokens, count in gained:
            self._tokens[row] += tokens[:count]

    @staticmethod
    def _asked(plan: RoundPlan) -> tuple[list[int], list[int]]:
        return plan.decode_rows.tolist(), plan.draft_lens.tolist()

    @staticmethod
    def _continue(tokens: list[int], most: int) -> list[int]:
        follows = dict(pairwise(tokens))
        draft: list[int] = []
        while len(draft) < most and (draft or tokens)[-1] in follows:
            draft.append(follows[(draft or tokens)[-1]])
        return draft

    def close(self) -> None:
        self._engine.close()


def make_repeating(context: DrafterContext) -> Drafter:
    assert context.target is not None
    return Repeating(context.target.rows)


def make_recalling(context: DrafterContext) -> Drafter:
    assert context.target is not None
    return Recalling(context.target.rows)


def every_boundary(section: SpeculationSection, num_layers: int) -> Sequence[int]:
    """The normed end is the last."""
    return range(num_layers + 2)


def make_stepping(context: DrafterContext) -> Drafter:
    assert context.draft is not None
    return Stepping(context.draft)


def make_remembering(context: DrafterContext) -> Drafter:
    assert context.draft is not None
    return Remembering(context.draft)


@contextmanager
def own_methods() -> Iterator[None]:
    """The methods of this file are there, as those of the product are."""
    added = {
        "repeating": (make_repeating, DraftingMethod(Role.TARGET, needs_draft_model=False, has_probabilities=False)),
        "recalling": (
            make_recalling,
            DraftingMethod(Role.TARGET, needs_draft_model=False, has_probabilities=False, find_taps=every_boundary),
        ),
        "stepping": (make_stepping, DraftingMethod(Role.DRAFT, needs_draft_model=True, has_probabilities=False)),
        "remembering": (make_remembering, DraftingMethod(Role.DRAFT, needs_draft_model=True, has_probabilities=False)),
    }
    for name, (make, method) in added.items():
        DRAFTERS.register(name)(make)
        METHODS[name] = method
    Recalling.watched.clear()
    try:
        yield
    finally:
        for name in added:
            del DRAFTERS._items[name], METHODS[name]


def hidden_states(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """[tokens, boundaries, hidden] of transformers: its hidden states, and what leaves the last layer before the
    norm."""
    found: list[torch.Tensor] = []
    hook = reference.model.model.norm.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0][0]))
    with torch.inference_mode():
        *states, normed = reference.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(state[0] for state in states), found[0], normed[0]], dim=1)


def check_watched(reference: Reference, texts: dict[int, list[int]]) -> int:
    """Compare what was watched of each request's tokens; returns how many positions."""
    seen = 0
    for request_id, tokens in texts.items():
        watched = Recalling.watched[request_id]
        assert set(watched) >= set(range(len(tokens) - 1)), "a position has no hidden states"
        expected = hidden_states(reference, tokens[:-1])
        actual = torch.stack([watched[place] for place in range(len(tokens) - 1)])
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        seen += len(actual)
    return seen
