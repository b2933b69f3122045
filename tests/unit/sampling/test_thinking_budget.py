"""A budget for thoughts: which positions of a row force the mark, for tokens of the row and of drafts alike."""

from __future__ import annotations

import random

import pytest
import torch
from gpus import DEVICES

from trtrun.core.token_lists import ThoughtBounds, TokenSequences
from trtrun.sampling.thoughts import ThinkingBudget, force_marks_

BLANK, OPEN, HALF, END, CALL, VOCABULARY = 0, 1, 2, 3, 4, 8


def due(output: list[int], budget: int, begins: list[list[int]], ends: list[list[int]]) -> int | None:
    """The token that must follow an output; None where any may. By its text, token by token."""
    start = 0
    if begins:
        last = 4 + len(begins[0]) + 1
        found = [
            end for end in range(last) for one in begins if end <= len(output) and output[:end][-len(one) :] == one
        ]
        if not found:
            return None
        start = min(found)
    thoughts = output[start:]
    for place in range(1, min(len(thoughts), budget) + 1):
        if any(thoughts[:place][-len(one) :] == one for one in ends):
            return None
    behind = thoughts[budget:]
    is_due = len(thoughts) >= budget and behind == ends[0][: len(behind)] and len(behind) < len(ends[0])
    return ends[0][len(behind)] if is_due else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [[[END], [CALL]], [[HALF, END], [HALF, HALF, END], [CALL]]])
@pytest.mark.parametrize("begins", [[], [[OPEN]], [[OPEN, BLANK], [OPEN, OPEN]]])
def test_the_mark_is_forced_at_the_budget_behind_tokens_of_row_and_draft(
    begins: list[list[int]], ends: list[list[int]], device: str
) -> None:
    draw, num_forced, num_free, num_left_out = random.Random(1), 0, 0, 0
    for _ in range(12):
        num_drafted, rows = draw.randrange(4), list[list[int]]()
        logits = torch.randn(7, num_drafted + 1, VOCABULARY, device=device)
        expected, token_ids = logits.clone(), torch.full((5, 16), END, dtype=torch.int32, device=device)
        drafts = torch.zeros((5, num_drafted), dtype=torch.int64, device=device)
        budgets, members = [], draw.sample(range(7), 5)
        for row, member in enumerate(members):
            budget, num_prompt, length = draw.randrange(5), draw.randrange(1, 4), draw.randrange(9)
            output = draw.choices(range(5), weights=[3, 3, 2, 1, 1], k=12)
            if begins and draw.random() < 0.7:
                output[:2] = draw.choice(begins) if len(begins[0]) == 2 else [BLANK, OPEN]
            if draw.random() < 0.5:  # as a row goes on that was forced
                for place in range(12):
                    token = due(output[:place], budget, begins, ends)
                    output[place] = output[place] if token is None else token
            token_ids[row, : num_prompt + length] = torch.tensor([OPEN] * num_prompt + output[:length])
            drafts[row] = torch.tensor(output[length : length + num_drafted])
            rows.append([num_prompt, num_prompt + length])
            bounds = ThoughtBounds(budget, TokenSequences.of(begins), TokenSequences.of(ends))
            budgets.append(ThinkingBudget(bounds))
            may_be_due = bounds.may_be_due(length, length + num_drafted)
            num_left_out += not may_be_due
            forbidden = draw.choice([None, END, HALF])
            if forbidden is not None:
                logits[member, :, forbidden] = expected[member, :, forbidden] = -torch.inf
            for position in range(num_drafted + 1):
                token = due(output[: length + position], budget, begins, ends)
                if token is not None and token != forbidden:
                    expected[member, position, [other for other in range(VOCABULARY) if other != token]] = -torch.inf
                assert may_be_due or token is None
                num_forced, num_free = num_forced + (token is not None), num_free + (token is None)
        places = torch.tensor(rows, device=device)
        where = (torch.tensor(members, device=device), token_ids, places[:, 0], places[:, 1])
        assert torch.equal(force_marks_(budgets, logits, *where, drafts if num_drafted else None), expected)
    assert num_forced > 5 and num_free > 20 and num_left_out > 5


def test_a_mark_that_an_engine_does_not_know_is_not_forced() -> None:
    budget = ThinkingBudget(ThoughtBounds(0, TokenSequences.of([]), TokenSequences.of([[VOCABULARY]])))
    one, logits = torch.ones(1, dtype=torch.int64), torch.zeros(1, 1, VOCABULARY)
    assert force_marks_([budget], logits, one - 1, torch.zeros((1, 4), dtype=torch.int32), one, one, None).eq(0).all()
