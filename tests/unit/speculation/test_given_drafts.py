"""Drafts that came with requests, row by row: compared on the device and on the host, and forgotten with their rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trtrun.core.nouns import RoundPlan, RowAdmission
from trtrun.core.sampling_params import SamplingParams
from trtrun.speculation.found_paths import HostPredictedOutputs, PredictedOutputs, usable_draft, with_certain_tokens

ROWS, COLUMNS = 4, 12


def admission(row: int, tokens: Sequence[int], draft: Sequence[int], num_prompt: int | None = None) -> RowAdmission:
    count = len(tokens) if num_prompt is None else num_prompt
    drafted = np.array(draft, dtype=np.int32)
    return RowAdmission(
        row, row, np.array(tokens, np.int32), count, 0, True, SamplingParams(seed=1), draft_tokens=drafted
    )


def plan(
    *admissions: RowAdmission,
    dropped: Sequence[int] = (),
    decode: Sequence[int] = (),
    given: Sequence[int] | None = None,
    draft_len: int = 3,
    max_context: int = COLUMNS,
) -> RoundPlan:
    rows = np.array(decode, dtype=np.int32)
    return RoundPlan(
        round_index=0,
        dropped_rows=tuple(dropped),
        admissions=admissions,
        block_updates=np.empty((0, 3), dtype=np.int32),
        prefill=(),
        decode_rows=rows,
        draft_lens=np.full_like(rows, draft_len),
        catch_up=np.zeros_like(rows),
        max_context=max_context,
        predicted_output_rows=tuple(decode if given is None else given),
    )


class Device:
    """Given drafts beside rows whose tokens a test writes."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.rows: Any = SimpleNamespace(
            token_ids=torch.full((ROWS, COLUMNS), 77, dtype=torch.int32), lengths=torch.zeros(ROWS, dtype=torch.int64)
        )
        self.given = PredictedOutputs(self.rows, vocab_size)

    def write(self, row: int, *tokens: int) -> None:
        self.rows.token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.rows.lengths[row] = len(tokens)

    def propose(self, *decode: int, **more: Any) -> list[list[int]] | None:
        """Of each row the leading tokens that are given."""
        found = self.given.propose(plan(decode=decode, **more))
        if found is None:
            return None
        tokens, is_given = found
        assert tokens.shape == is_given.shape == (len(decode), more.get("draft_len", 3))
        return [
            [token for token, known in zip(of_row, known_of_row, strict=True) if known]
            for of_row, known_of_row in zip(tokens.tolist(), is_given.tolist(), strict=True)
        ]


def test_ids_that_are_not_in_the_vocabulary_end_a_draft() -> None:
    assert usable_draft(admission(0, [1], [5, 9, 10, 3]), 10) == [5, 9]
    assert usable_draft(admission(0, [1], [5, 9]), 10) == [5, 9]
    assert usable_draft(admission(0, [1], [5, 99]), None) == [5, 99]


def test_what_follows_the_output_in_its_draft_is_proposed_as_long_as_the_output_is_its_start() -> None:
    device = Device()
    device.given.begin_round(plan(admission(0, [1, 2], [5, 6, 7, 8, 9]), admission(2, [1], [5, 6])))
    for output, expected in {
        (): [5, 6, 7], (5,): [6, 7, 8], (5, 6, 7): [8, 9], (5, 6, 7, 8): [9], (5, 6, 7, 8, 9): [],
        (5, 6, 7, 8, 9, 4): [], (4,): [], (5, 6, 4): [], (4, 6): [],
    }.items():  # fmt: skip
        device.write(0, 1, 2, *output)
        device.write(2, 1, 5)
        assert device.propose(0, 2) == [expected, [6]]
        assert device.propose(2, 1, 0) == [[6], [], expected], "in the plan's order, and none for a row without one"


def test_a_long_draft_is_compared_as_far_as_there_is_output() -> None:
    device = Device()
    device.given.begin_round(plan(admission(0, [1, 2], list(range(5000))), admission(1, [1], [5, 6])))
    compared = [device.given._num_compared(rows, 10) for rows in ([0, 1], [0], [1])]
    assert compared == [9, 8, 2], "tokens behind the prompts, at most, or those of the longest draft"
    device.write(0, 1, 2, 0, 1, 2)
    device.write(1, 1, 5)
    for most in (5, 6, COLUMNS):  # of any row's length
        assert device.propose(0, 1, max_context=most) == [[3, 4, 5], [6]]


def test_a_row_that_ends_at_the_last_column_is_compared_within_its_own_tokens() -> None:
    device = Device()
    prompt = list(range(COLUMNS - 2))
    device.given.begin_round(plan(admission(1, prompt, [5, 6, 7, 8])))
    device.write(1, *prompt, 5, 6)
    assert device.propose(1) == [[7, 8]]


def test_a_preempted_row_goes_on_behind_its_prompt() -> None:
    device, host = Device(), HostPredictedOutputs(100)
    come_back = plan(admission(3, [1, 2, 5, 6], [5, 6, 7], num_prompt=2))
    device.given.begin_round(come_back)
    host.begin_round(come_back)
    device.write(3, 1, 2, 5, 6)
    assert device.propose(3) == [[7]] and host.behind(3, 4, 9) == [7]


def test_drafts_go_with_their_rows() -> None:
    device, host = Device(), HostPredictedOutputs(100)
    device.write(0, 1)
    device.write(1, 1)
    first = plan(admission(0, [1], [5, 6]), admission(1, [1], [7, 8]))
    second = plan(admission(1, [1], [4, 3]), dropped=[1])
    third = plan(admission(1, [1], [9]), dropped=[0, 1])
    fourth = plan(admission(1, [1], []))
    expected: list[list[list[int]] | None] = [[[5, 6], [7, 8]], [[5, 6], [4, 3]], [[], [9]], None]
    for given, proposed in zip((first, second, third, fourth), expected, strict=True):
        device.given.begin_round(given)
        host.begin_round(given)
        assert device.propose(0, 1) == proposed
        assert [host.behind(row, 1, 3) for row in (0, 1)] == (proposed or [[], []])
    assert not device.given._drafts


def test_rows_of_which_the_plan_says_nothing_and_rounds_without_drafts_have_none() -> None:
    device = Device()
    device.given.begin_round(plan(admission(0, [1], [5, 6]), admission(1, [1], [7, 8])))
    device.write(0, 1)
    device.write(1, 1)
    assert device.propose(0, 1, given=[1]) == [[], [7, 8]]
    assert device.propose(0, 1, given=[]) is None
    assert device.propose(0, 1, draft_len=0) is None


def test_the_host_forgets_a_draft_that_the_output_leaves_or_ends() -> None:
    host = HostPredictedOutputs(100)

    def begin() -> None:
        host.begin_round(plan(admission(0, [1, 2], [5, 6, 7, 100, 8])))

    begin()
    assert host.behind(0, 2, 2) == [5, 6] and host.behind(0, 4, 2) == [7], "100 is not in the vocabulary"
    host.learn(0, 2, [5, 6])
    assert host.behind(0, 4, 9) == [7]
    host.learn(0, 4, [8])
    assert host.behind(0, 5, 9) == [] and not host._drafts
    begin()
    host.learn(0, 2, [5, 6, 7, 4])
    assert not host._drafts
    host.learn(1, 2, [5])


def test_a_given_token_is_certain_and_the_others_keep_their_probabilities() -> None:
    probs = torch.full((1, 2, 4), 0.25)
    certain = with_certain_tokens(probs, torch.tensor([[2, 1]]), torch.tensor([[True, False]]))
    assert certain.tolist() == [[[0.0, 0.0, 1.0, 0.0], [0.25] * 4]]
