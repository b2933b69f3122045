"""Rows whose masks take long: all others wait for them, so that they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from guided_rows import PLAN, VOCABULARY, guide_of, tokens_of

from trtrun import SamplingParams
from trtrun.core.nouns import WAITS, Draft, RowAdmission, Verdict
from trtrun.guiding import masks as masks_module
from trtrun.guiding import masks as round_budget
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.host_copies import HostDraft
from trtrun.guiding.masks import MaskJob, MaskMaker
from trtrun.guiding.row_guide import Begun, RowGuide
from trtrun.guiding.row_guides import RowGuides
from trtrun.tokens.text import Tokenizer


def test_a_row_that_holds_others_up_ends(grammars: Grammars) -> None:
    guide = RowGuide(Begun(grammars.matcher(guide_of({"choice": ["no"]}))))
    for seconds in (1.0, 0.01, 1.0, 1.0, 0.02, 1.0):
        guide.count_slow(seconds)
        assert not guide.is_ended, "the first masks of a grammar may take long"
    guide.count_slow(1.0)
    assert guide.is_ended


@pytest.mark.parametrize("drafts", [False, True])
def test_one_mask_that_takes_far_too_long_ends_its_row(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """Whether it is a draft's or not; other rows go on. What is drafted does not depend on that: each of some ranks has
    a clock of its own, and drafts that part would leave them waiting for each other."""
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    sampling = SamplingParams(guided=guide_of({"regex": "[xqz]*"}))
    admissions = [RowAdmission(row, row, np.array([1], dtype=np.int32), 1, 0, False, sampling) for row in (3, 4)]
    guides.begin_round(replace(PLAN, admissions=tuple(admissions)))

    def allows() -> list[bool]:
        masks = guides.masks([3, 4], 0)
        assert masks is not None
        return [bool(tokens_of(line)) for line in masks.bits]

    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    assert allows() == [True, True]
    gained = Verdict(torch.tensor([1, 1]), torch.tensor([[letter], [letter]]))
    guides.note_verdict([3, 4], gained)
    with monkeypatch.context() as patched:
        patched.setattr(MaskMaker, "slow_lines", [1])
        if drafts:
            walk = guides.walk([3, 4])
            assert walk is not None
            assert [bool(tokens_of(line)) for line in walk.masks().bits] == [True, True]
        else:
            assert allows() == [True, True], "a mask that is there is good"
    guides.note_verdict([3, 4], gained)
    assert allows() == [True, False]
    walk = guides.walk([3, 4])
    assert walk is not None and [bool(tokens_of(line)) for line in walk.masks().bits] == [True, True]


def test_who_takes_far_too_long_is_looked_for_by_one_thread(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads cannot tell."""
    monkeypatch.setattr(masks_module, "_LONG_SECONDS", math.inf)  # a busy machine takes long for anybody
    maker = MaskMaker(VOCABULARY, 2)
    bits = torch.zeros((6, maker.words), dtype=torch.int32)

    def slow_lines() -> list[int]:
        matchers = [grammars.matcher(guide_of({"choice": ["no"]})) for _ in range(6)]
        maker.fill(bits, [MaskJob(matcher, line, [], is_first=True) for line, matcher in enumerate(matchers)])
        of_jobs = [*maker.slow_lines]
        maker.fill_next(bits, dict(enumerate(matchers)))
        assert of_jobs == [*maker.slow_lines]
        return of_jobs

    assert slow_lines() == slow_lines() == []
    monkeypatch.setattr(masks_module, "_MOST_SECONDS", -1.0)
    monkeypatch.setattr(masks_module, "_LONG_SECONDS", -1.0)
    maker.fill(bits, [MaskJob(grammars.matcher(guide_of({"choice": ["no"]})), line, [], True) for line in range(6)])
    assert [*maker.slow_lines] == [], "that was several threads"
    assert slow_lines() == slow_lines() == [0, 1, 2, 3, 4, 5]


class Clock:
    """In place of what a thread has computed: each look at it is so much later."""

    def __init__(self, seconds: float) -> None:
        self._now, self._seconds = 0.0, seconds

    def thread_time(self) -> float:
        self._now += self._seconds
        return self._now


def test_a_round_makes_masks_as_far_as_its_budget_goes(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of drafts first fall away. Rows without any wait, and have the one that they need when they come back."""
    guide, rows = guide_of({"regex": "[xqz]*"}), [0, 1, 2]
    guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
    (letter,) = tokenizer.encode("x", add_special_tokens=False)
    draft = HostDraft(Draft(torch.full((3, 2), letter), torch.full((3,), 2)))

    def admit(chosen: Sequence[int], output: Sequence[int] = ()) -> None:
        tokens = np.array([1, *output], dtype=np.int32)
        sampling = SamplingParams(guided=guide)
        admissions = tuple(RowAdmission(row, row, tokens, 1, 0, False, sampling) for row in chosen)
        guides.begin_round(replace(PLAN, dropped_rows=tuple(chosen), admissions=admissions))

    def masked(seconds: float, draft: HostDraft | None = draft) -> list[bool]:
        """Lines that allow something where each look at the clock is so much later."""
        monkeypatch.setattr(masks_module, "time", Clock(seconds))
        masks = guides.masks(rows, 2 if draft is not None else 0, draft)
        assert masks is not None
        return [bool(tokens_of(line)) for line in masks.bits]

    admit(rows)
    gained = Verdict(torch.ones(3, dtype=torch.int64), torch.full((3, 1), letter))
    guides.note_verdict(rows, gained)
    assert masked(0.0) == [True] * 9
    guides.begin_round(PLAN)
    assert masked(round_budget.SECONDS / 2)[::3] == [True] * 3, "of a budget of 8 ms"
    guides.begin_round(PLAN)
    guides.note_verdict(rows, gained)
    assert masked(round_budget.SECONDS) == [*[True, False, False] * 2, *[False] * 3]
    assert guides.waiting(rows) == {2: WAITS}
    guides.note_verdict(rows, gained)
    admit([2], [letter, letter])
    assert masked(1.0, None)[2] and guides.waiting(rows) == {1: WAITS}
