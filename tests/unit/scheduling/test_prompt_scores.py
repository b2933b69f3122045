"""Which positions of a prompt chunks score, and whose the numbers of a round are."""

from __future__ import annotations

import numpy as np
from scheduler_rounds import LIMITS

from trtrun.core.nouns import Request, ScoredPart
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.batch import ScoredRow
from trtrun.scheduling.completions import Completion, PromptScores
from trtrun.scheduling.results import commit_scores
from trtrun.scheduling.scheduler import Scheduler


def numbers(count: int, width: int = 3, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.arange(first, first + count * width).reshape(count, width)
    return ids, -ids.astype(np.float32)


def test_each_position_but_the_last_is_scored_once() -> None:
    scores = PromptScores(10, 2)
    assert scores.part_of(0, 4) == ScoredPart(0, 4, 2)
    scores.take(*numbers(4))
    assert scores.part_of(0, 4) is None and scores.part_of(2, 4) == ScoredPart(4, 2, 2)
    assert scores.part_of(4, 9) == ScoredPart(4, 5, 2), "nothing is said of what follows the prompt"
    assert not scores.is_whole
    scores.take(*numbers(5, width=6))
    assert scores.is_whole and scores.part_of(0, 20) is None
    entries = scores.whole().entries()
    assert len(entries) == 10 and entries[0] is None
    assert entries[6] is not None and (entries[6].token_id, entries[6].alternatives) == (6, ((7, -7.0), (8, -8.0)))


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    scores = PromptScores(1, 5)
    assert scores.is_whole and scores.part_of(0, 1) is None and scores.whole().entries() == [None]


def test_numbers_of_a_row_that_was_preempted_meanwhile_are_nobodys() -> None:
    scheduler = Scheduler(LIMITS)
    first, second = (
        scheduler.add(Request(number, (1, 2, 3, 4), SamplingParams(prompt_logprobs=2, seed=0))) for number in range(2)
    )

    def count(completion: Completion) -> int:
        assert completion.scores is not None
        return completion.scores.num_scored

    commit_scores([ScoredRow(first, first.epoch + 1, 2), ScoredRow(second, second.epoch, 1)], *numbers(3))
    assert (count(first), count(second)) == (0, 1)
    assert second.scores is not None
    second.scores.take(*numbers(2))
    entry = second.scores.whole().entries()[1]
    assert entry is not None and entry.token_id == 6, "behind those of the other row"
