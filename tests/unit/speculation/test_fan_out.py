"""How guesses are spread over places and ranks: all of a budget, the likeliest first, and by what verdicts say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from trtrun.speculation.ahead.policy import MOST_RANKS, CandidateBudget

DRAFT_LEN = 5


def hit_chance(candidate_budget: CandidateBudget, drafted: int, counts: Sequence[int]) -> float:
    """How likely a verdict on a draft of `drafted` tokens is among guesses of these counts."""
    return sum(
        chance * sum(candidate_budget._share(place == drafted, rank) for rank in range(counts[place]))
        for place, chance in enumerate(candidate_budget.chances(drafted))
    )


def taught(*verdicts: tuple[int, int, int | None], times: int = 300) -> CandidateBudget:
    """A fan-out that has seen these verdicts over and over."""
    candidate_budget = CandidateBudget(DRAFT_LEN)
    for _ in range(times):
        for verdict in verdicts:
            candidate_budget.record(*verdict)
    return candidate_budget


MIXTURES = {
    "nothing seen": taught(),
    "never accepted": taught((5, 0, 0)),
    "always accepted": taught((5, 5, 0)),
    "all sorts": taught((5, 5, 0), (5, 2, 3), (3, 1, None), (5, 0, 0), (0, 0, 2), (1, 1, 1), times=60),
}


@pytest.mark.parametrize("name", list(MIXTURES))
@pytest.mark.parametrize("drafted", range(DRAFT_LEN + 1))
def test_all_of_the_budget_is_given_as_far_as_there_are_candidates(name: str, drafted: int) -> None:
    candidate_budget = MIXTURES[name]
    assert sum(candidate_budget.chances(drafted)) == pytest.approx(1.0)
    for budget in (0, 1, 2, 3, 7, 20, (drafted + 1) * MOST_RANKS, 1000):
        counts = candidate_budget.allocate(drafted, budget)
        assert len(counts) == drafted + 1
        assert sum(counts) == min(budget, (drafted + 1) * MOST_RANKS)
        assert all(0 <= count <= MOST_RANKS for count in counts)


@pytest.mark.parametrize("name", list(MIXTURES))
@pytest.mark.parametrize("drafted", range(3))
def test_no_other_way_to_spread_the_budget_hits_more_often(name: str, drafted: int) -> None:
    candidate_budget = MIXTURES[name]
    for budget in (1, 2, 5, 9):
        ways = (
            counts
            for counts in itertools.product(range(MOST_RANKS + 1), repeat=drafted + 1)
            if sum(counts) == min(budget, (drafted + 1) * MOST_RANKS)
        )
        best = max(hit_chance(candidate_budget, drafted, counts) for counts in ways)
        assert hit_chance(candidate_budget, drafted, candidate_budget.allocate(drafted, budget)) == pytest.approx(best)


def test_a_larger_budget_keeps_what_a_smaller_one_had() -> None:
    for candidate_budget in MIXTURES.values():
        before = candidate_budget.allocate(4, 0)
        for budget in range(1, 41):
            counts = candidate_budget.allocate(4, budget)
            assert sorted(new - old for new, old in zip(counts, before, strict=True)) == [0, 0, 0, 0, 1], budget
            before = counts


@pytest.mark.parametrize("name", list(MIXTURES))
def test_the_chances_told_are_those_of_what_is_guessed(name: str) -> None:
    candidate_budget = MIXTURES[name]
    chances = candidate_budget.hit_chances(4)
    assert len(chances) == 5 * MOST_RANKS
    for budget, chance in enumerate(chances, 1):
        assert hit_chance(candidate_budget, 4, candidate_budget.allocate(4, budget)) == pytest.approx(chance)


def test_guesses_go_where_verdicts_end() -> None:
    assert taught((5, 5, 0)).allocate(5, 1) == [0, 0, 0, 0, 0, 1]
    assert taught(*[(5, 0, rank) for rank in range(4)]).allocate(5, 4)[0] == 4
    assert taught((5, 2, 0)).allocate(5, 1) == [0, 0, 1, 0, 0, 0]
    assert taught((5, 2, 0)).chances(5)[2] > 0.98
    assert taught((5, 2, 0)).chances(2)[2] > 0.98, "the first places of a longer draft are those of a shorter one"


def test_a_verdict_says_nothing_of_places_behind_the_first_rejected_token() -> None:
    before, after = CandidateBudget(DRAFT_LEN), taught((5, 1, 0))
    assert after._offered[2:] == before._offered[2:] and after._accepted[2:] == before._accepted[2:]
    assert after._offered[0] != before._offered[0] and after._offered[1] != before._offered[1]


def test_ranks_are_counted_apart_for_whole_drafts_and_rejected_ones() -> None:
    """Behind a whole draft the first candidate suffices here; behind a rejected one any rank comes up as often."""
    spread = [(5, 5, 0)] * 8 + [(5, 0, rank) for rank in range(8)]
    counts = taught(*spread, times=50).allocate(5, 9)
    assert counts == [8, 0, 0, 0, 0, 1]


def test_a_draft_without_tokens_counts_as_a_whole_one() -> None:
    candidate_budget = taught((0, 0, 3))
    assert candidate_budget.allocate(0, 3) == [3]
    assert hit_chance(candidate_budget, 0, [3]) < 0.1 < 0.9 < hit_chance(candidate_budget, 0, [4])


def test_what_is_long_ago_is_forgotten() -> None:
    candidate_budget = taught((5, 0, 0))
    for _ in range(300):
        candidate_budget.record(5, 5, 0)
    assert candidate_budget.chances(5) == pytest.approx(MIXTURES["always accepted"].chances(5), abs=0.02)


def test_a_token_beyond_the_last_rank_is_a_miss_like_one_that_was_not_listed() -> None:
    unlisted, beyond = taught((5, 1, None)), taught((5, 1, MOST_RANKS), (5, 1, MOST_RANKS + 5), times=150)
    full = [MOST_RANKS] * 6
    assert hit_chance(unlisted, 5, full) == hit_chance(beyond, 5, full) < 0.05
    assert hit_chance(taught((5, 1, MOST_RANKS - 1)), 5, full) > 0.95
