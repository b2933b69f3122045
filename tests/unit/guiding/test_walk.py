"""What may follow drafts while they are made: lines of bits, as each matcher alone would fill them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from guided_rows import PLAN
from llguidance import LLMatcher

from trtrun import SamplingParams
from trtrun.core.guide import Guide
from trtrun.core.nouns import Draft, RowAdmission
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.host_copies import HostDraft
from trtrun.guiding.masks import MaskJob, MaskMaker
from trtrun.guiding.row_guides import RowGuides
from trtrun.guiding.walks import Walk

VOCABULARY = 4096
ROWS = 9
GUIDED = (0, 2, 3, 4, 5, 8)
NONE_LEFT, REFUSED, BOUNDED = 1, 2, 3
"""Which of them has no matcher, is told a token that it does not allow, and passes a bound."""


def bits_of(matcher: LLMatcher) -> torch.Tensor:
    line = torch.zeros(VOCABULARY // 32, dtype=torch.int32)
    matcher.deep_copy().unsafe_compute_mask_ptr(line.data_ptr(), 4 * len(line))
    return line


def options(line: torch.Tensor) -> list[int]:
    spread = (line.unsqueeze(1) >> torch.arange(32)) & 1
    return spread.flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_each_step_has_the_bits_of_each_rows_own_matcher(grammars: Grammars, num_threads: int) -> None:
    """Rows beside that are not guided have no line; a row that is refused or ended is allowed nothing from then on, and
    the others go on."""
    choose = random.Random(num_threads)
    alone = [grammars.matcher(Guide("regex", f"[a-{end}]{{3,40}}( [0-9]+)*!")) for end in "fghijk"]
    forks: list[LLMatcher | None] = [matcher.deep_copy() for matcher in alone]
    forks[NONE_LEFT] = None
    walk = Walk(MaskMaker(VOCABULARY, num_threads), ROWS, GUIDED, forks, torch.device("cpu"))
    ended = {NONE_LEFT}
    for step in range(6):
        masks = walk.masks()
        assert masks.places[:, 0].tolist() == [0, -1, 1, 2, 3, 4, -1, -1, 5]
        expected = [
            torch.zeros_like(masks.bits[0]) if line in ended else bits_of(one) for line, one in enumerate(alone)
        ]
        assert torch.equal(masks.bits, torch.stack(expected))
        tokens = torch.zeros(ROWS, dtype=torch.int64)
        for line, matcher in enumerate(alone):
            token = choose.choice(options(bits_of(matcher)) or [0])
            if step == 2 and line == REFUSED:
                token = next(other for other in range(VOCABULARY) if other not in options(bits_of(matcher)))
                ended.add(line)
            elif line not in ended:
                assert matcher.consume_token(token)
            tokens[GUIDED[line]] = token
        if step == 3:
            bounded = forks[BOUNDED]
            assert bounded is not None and not bounded.rollback(1000) and bounded.is_error()
            ended.add(BOUNDED)
        walk.tell(tokens)


def test_masks_that_were_not_told_anything_since_are_left_alone(grammars: Grammars) -> None:
    """They may still be on their way to the device."""
    matcher = grammars.matcher(Guide("regex", "[a-c]+"))
    walk = Walk(MaskMaker(VOCABULARY, 1), 1, [0], [matcher.deep_copy()], torch.device("cpu"))
    first = walk.masks()
    assert walk.masks().bits.data_ptr() != first.bits.data_ptr()


def test_what_was_made_for_a_draft_serves_again_where_it_is_verified(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place of a draft allows what it does where nothing was made before; only the last one is made anew. Not for
    a row whose draft became another one than it was told, that was told a token which is not allowed, or that drafted
    nothing."""
    steps, rows = 3, [7, 2, 5, 0, 4, 1]
    unguided, changed, refused, shorter, undrafted = 5, 2, 4, 1, 0
    drafted = [row for row in rows if row != undrafted]

    def guides_of() -> RowGuides:
        guides = RowGuides(lambda: grammars, VOCABULARY, torch.device("cpu"))
        admissions = [
            RowAdmission(row, row, np.array([1], dtype=np.int32), 1, 0, False, SamplingParams(guided=guide))
            for row in rows
            if row != unguided
            for guide in [Guide("regex", f"[a-{'fghijklm'[row]}]{{3,40}}( [0-9]+)*!")]
        ]
        guides.begin_round(replace(PLAN, admissions=tuple(admissions)))
        return guides

    guides, choose, told = guides_of(), random.Random(3), list[list[int]]()
    walk = guides.walk(drafted)
    assert walk is not None
    for step in range(steps):
        masks = walk.masks()
        lines = [masks.bits[place] if place >= 0 else None for place in masks.places[:, 0].tolist()]
        chosen = [3 if line is None else choose.choice(options(line) or [0]) for line in lines]
        if step == 1:
            chosen[drafted.index(refused)] = next(token for token in range(9, 4096) if token not in options(lines[-2]))
        told.append(chosen)
        if step + 1 < steps:
            walk.tell(torch.tensor(chosen))
    tokens = torch.tensor(told).T.contiguous()
    tokens[drafted.index(changed), 1] = (tokens[drafted.index(changed), 1] + 1) % VOCABULARY
    lens = torch.tensor([1 if row == shorter else steps for row in drafted])
    draft, asked = HostDraft(Draft(tokens, lens)), [*drafted, undrafted]
    made = list[int]()
    fill = MaskMaker.fill

    def counted(maker: MaskMaker, bits: torch.Tensor, jobs: Sequence[MaskJob], *others: Any) -> list[MaskJob]:
        made.extend(1 + len(job.drafts) for job in jobs)
        return fill(maker, bits, jobs, *others)

    empty = torch.empty
    monkeypatch.setattr(MaskMaker, "fill", counted)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(-1))  # as of old use
    found = guides.masks(asked, steps, draft)
    num_made, made = sum(made), []
    expected = guides_of().masks(asked, steps, draft)
    assert found is not None and expected is not None
    assert torch.equal(found.places < 0, expected.places < 0) and (found.places[drafted.index(unguided)] < 0).all()
    for place, row in enumerate(asked):
        for step in range((lens[place] if row != undrafted else 0) + 1):
            lines = [masks.bits[masks.places[place, step]] for masks in (found, expected)]
            assert row == unguided or torch.equal(*lines), (row, step)
        for step in range(2 if row == refused else lens[place] + 1 if row != undrafted else 1, steps + 1):
            assert row == unguided or not any(
                masks.bits[masks.places[place, step]].any() for masks in (found, expected)
            )
    assert sum(made) == num_made + steps + 2, "of a whole draft all but the last, and both of the short one"
