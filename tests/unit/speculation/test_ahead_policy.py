"""How much is drafted ahead and when a fresh draft is worth its wait, on a machine whose costs are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from trtrun.speculation.ahead.ahead_costs import AheadRound
from trtrun.speculation.ahead.policy import NEVER, AheadPolicy, CandidateBudget

STEPS = (4, 8, 16, 32, 64, 128)
CHANCES = CandidateBudget(5).hit_chances(5)
"""How likely hits are by a row's guesses: the rough figures that a run begins with."""


def record(
    policy: AheadPolicy,
    rows: int,
    guesses: int | None,
    seconds: float,
    tokens: Sequence[int],
    draft_lens: Sequence[int],
    *,
    is_redrafted: bool = False,
    verifying: float = 0.1,
) -> None:
    """A round of `seconds` behind so many guesses."""
    hits = 0 if is_redrafted else sum(length > 0 for length in draft_lens)
    of_rows = ([*tokens], [*draft_lens])
    policy.record_round(AheadRound(rows, max(draft_lens), guesses, hits, is_redrafted, verifying, seconds, *of_rows))


def run_rounds(
    policy: AheadPolicy, rows: int, seconds: Callable[[int], float], verifying: float = 0.1, rounds: int = 60
) -> list[int]:
    """Rounds in which guesses take `seconds` beside a verification; returns how many the policy wanted in each."""
    chosen = []
    for _ in range(rounds):
        count = policy.num_guesses(rows)
        chosen.append(count)
        record(policy, rows, count, max(verifying, seconds(count)), [3] * rows, [5] * rows, verifying=verifying)
        policy.record_chances(CHANCES)
    return chosen


def test_without_steps_nothing_is_guessed_and_all_is_drafted_again() -> None:
    policy = AheadPolicy((), 5, always_redrafts=False)
    assert policy.num_guesses(3) == 0
    for _ in range(10):
        record(policy, 3, 0, 5.0, [1, 1, 1], [5, 5, 0], is_redrafted=True)
    assert policy.redraft_threshold(3) == 1, "nothing else would ever be drafted"


@pytest.mark.parametrize(
    ("rows", "first"), [(1, 4), (2, 8), (4, 16), (5, 32), (16, 64), (32, 128), (64, 128), (500, 128)]
)
def test_before_anything_is_known_each_row_gets_a_few(rows: int, first: int) -> None:
    assert AheadPolicy(STEPS, 5, always_redrafts=False).num_guesses(rows) == first


def test_a_round_of_prompts_alone_is_like_one_of_a_row() -> None:
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    assert policy.num_guesses(0) == 4
    run_rounds(policy, 1, lambda count: 0.0005 * count)
    assert policy.num_guesses(0) == 64


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("most", [8, 16, 32])
def test_as_many_as_are_there_with_the_verdict(rows: int, most: int) -> None:
    """`most` of them take as long as the verification, twice as many far more than they could gain."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    chosen = run_rounds(policy, rows, lambda count: 0.1 if count <= most else 1.0)
    assert set(chosen[-20:]) == {most}, chosen


def test_as_many_as_may_be_right_where_time_hardly_grows() -> None:
    """A row has eight candidates at each of six places, so 64 are not better than 48, and 128 not than 64."""
    chosen = run_rounds(AheadPolicy(STEPS, 5, always_redrafts=False), 1, lambda count: 0.05 + count * 1e-5)
    assert chosen[-1] == 64
    assert sorted(set(chosen)) == [4, 8, 16, 32, 64], "up, one step at a time"
    assert chosen == sorted(chosen)


@pytest.mark.parametrize(("seconds", "best"), [(0.2, 32), (0.21, 32), (0.6, 8)])
def test_what_comes_after_the_verification_must_gain_more_than_it_costs(seconds: float, best: int) -> None:
    """8 guesses take twice as long as a verification, and are right in one round of two."""
    policy = AheadPolicy((8, 32), 5, always_redrafts=False)
    chances = [0.5] * 8 + [0.9] * 40
    for _ in range(40):
        count = policy.num_guesses(1)
        record(policy, 1, count, 0.2 if count == 8 else seconds, [5], [5])
        policy.record_chances(chances)
    assert policy.num_guesses(1) == best


def test_it_steps_back_to_what_gains_most() -> None:
    """Time grows with the guesses: sixteen take nearly five verifications."""
    chosen = run_rounds(AheadPolicy(STEPS, 5, always_redrafts=False), 4, lambda count: 0.03 * count)
    assert chosen[0] == 16 and set(chosen[-20:]) == {4}, chosen
    assert chosen == sorted(chosen, reverse=True)


def test_each_row_has_a_guess_however_long_they_take() -> None:
    chosen = run_rounds(AheadPolicy(STEPS, 5, always_redrafts=False), 8, lambda count: 0.1 * count)
    assert min(chosen) == chosen[-1] == 8, chosen


def test_what_was_far_too_slow_is_tried_again_later_than_what_was_a_little() -> None:
    policy = AheadPolicy((4, 8), 5, always_redrafts=False)
    chosen = run_rounds(policy, 1, lambda count: 1.0 if count == 8 else 0.05, rounds=2000)
    assert 4 <= chosen.count(8) <= 6, "three times to know, then every thousand rounds"


def test_it_follows_the_machine() -> None:
    """Verifications become longer, then shorter again; the newest samples decide."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    seconds = (lambda count: 0.002 * count).__call__
    found = [run_rounds(policy, 2, seconds, verifying)[-1] for verifying in (0.02, 0.2, 0.04, 0.2)]

    assert found == [8, 64, 16, 64]


def test_times_that_were_another_programs_are_not_believed_for_ever() -> None:
    """The first rounds of 16 guesses were slow, for whatever reason. One more is tried now and then, and is fast."""
    policy, rounds = AheadPolicy((4, 16), 5, always_redrafts=False), 0

    def seconds(count: int) -> float:
        return 0.2 if count == 16 and rounds == 0 else 0.05

    assert run_rounds(policy, 1, seconds)[-1] == 4
    rounds = 1
    chosen = run_rounds(policy, 1, seconds, rounds=1200)
    assert chosen[-1] == 16
    first = chosen.index(16)
    assert chosen[first : first + 50].count(16) == 1, "once, not again and again"


def test_one_slow_round_changes_nothing() -> None:
    """A kernel is made, or something else runs."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    before = run_rounds(policy, 1, lambda count: 0.001 * count)[-1]
    record(policy, 1, before, 3.0, [3], [5], verifying=0.0001)
    policy.record_chances(CHANCES)
    assert policy.num_guesses(1) == before


def test_first_rounds_that_make_kernels_do_not_count_alone() -> None:
    slow = set(STEPS)

    def seconds(count: int) -> float:
        first = count in slow
        slow.discard(count)
        return 5.0 if first else 0.0005 * count

    assert run_rounds(AheadPolicy(STEPS, 5, always_redrafts=False), 1, seconds)[-1] == 64


def test_each_load_has_times_of_its_own() -> None:
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    run_rounds(policy, 1, lambda count: 0.0005 * count)
    run_rounds(policy, 16, lambda count: 0.005 * count)
    assert (policy.num_guesses(1), policy.num_guesses(16)) == (64, 16)
    assert policy.num_guesses(9) == policy.num_guesses(16), "loads go by powers of two"
    assert policy.num_guesses(4) == 16, "nothing is known of four rows"


def taught_redrafting(drafting: float, tokens: int, *, rows: int = 8, always: bool = False) -> AheadPolicy:
    """Fresh drafts take `drafting` seconds; rounds take 0.1 and give `tokens` to each row that has a draft."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=always)
    for number in range(60):
        is_redrafted = number < 5
        record(policy, rows, 32, 0.1 + drafting * is_redrafted, [tokens] * rows, [5] * rows, is_redrafted=is_redrafted)
    return policy


def test_without_knowledge_rows_that_missed_are_drafted_for() -> None:
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    assert policy.redraft_threshold(8) == 1
    for _ in range(3):
        assert policy.redraft_threshold(8) == 1
        record(policy, 8, 32, 0.1, [2] * 8, [5] * 8)
        record(policy, 8, 32, 1000.0, [2] * 8, [5] * 8, is_redrafted=True)
    for _ in range(60):
        record(policy, 8, 32, 0.1, [2] * 8, [5] * 8)
    assert policy.redraft_threshold(8) == NEVER
    assert policy.redraft_threshold(1) == 1, "nothing is known of one row"


def test_where_some_row_misses_each_time_it_is_seen_what_rounds_take_without_a_fresh_draft() -> None:
    """Else what a fresh draft costs would never be known."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    for _ in range(3):
        assert policy.redraft_threshold(8) == 1
        record(policy, 8, 32, 0.11, [3] * 8, [5] * 8, is_redrafted=True)
    for _ in range(3):
        assert policy.redraft_threshold(8) == NEVER
        record(policy, 8, 32, 0.1, [3] * 5 + [1] * 3, [5] * 5 + [0] * 3)
    assert policy.redraft_threshold(8) < 8


def test_a_slow_first_fresh_draft_does_not_end_them() -> None:
    """Kernels are made in it, or graphs. The ones behind it are worth their wait."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    for drafting in (5.0, 0.01, 0.01, 0.01, 0.01):
        assert policy.redraft_threshold(1) == 1
        record(policy, 1, 8, 0.1 + drafting, [5], [5], is_redrafted=True)
        record(policy, 1, 8, 0.1, [5], [5])
    assert policy.redraft_threshold(1) == 1


def test_fresh_drafts_that_became_fast_are_found_again() -> None:
    """While none are made nothing is learned of them: one is tried now and then."""
    policy, rounds = taught_redrafting(1000.0, 3), 0
    while policy.redraft_threshold(8) == NEVER:
        record(policy, 8, 32, 0.1, [1] * 8, [0] * 7 + [5])
        rounds += 1
        assert rounds < 1000
    assert rounds > 50, "not again and again"
    tried = 0
    for _ in range(1000):
        if policy.redraft_threshold(8) != NEVER:
            tried += 1
            record(policy, 8, 32, 0.101, [3] * 8, [5] * 8, is_redrafted=True)
    assert tried > 500


def test_always_is_always() -> None:
    assert taught_redrafting(1000.0, 1, always=True).redraft_threshold(8) == 1


def test_never_where_a_fresh_draft_costs_more_than_it_gains() -> None:
    """It gains each row 2 tokens; in the time that it takes all rows would gain 24, or 12."""
    assert taught_redrafting(0.1, 3).redraft_threshold(8) == NEVER
    assert taught_redrafting(0.05, 3).redraft_threshold(8) in (6, 7)
    assert taught_redrafting(0.1, 1).redraft_threshold(8) == NEVER, "drafts that are never accepted gain nothing"


def test_from_as_many_rows_as_gain_what_the_wait_costs() -> None:
    answers = [taught_redrafting(drafting, 3).redraft_threshold(8) for drafting in (0.001, 0.01, 0.02, 0.03, 0.04)]
    assert answers == sorted(answers)
    for drafting, answer in zip((0.001, 0.01, 0.02, 0.03, 0.04), answers, strict=True):
        lost, gained = drafting * 240, 2
        assert 1 <= answer <= 8 and answer * gained >= lost
        assert answer <= max(1, lost / gained + 1)


def test_rounds_without_drafts_say_nothing_of_what_drafts_gain() -> None:
    policy = taught_redrafting(0.04, 3)
    before = policy.redraft_threshold(8)
    for _ in range(3):
        policy.record_round(AheadRound(8, 5, 32, 0, False, 0.1, 0.1, [3] * 8, [0] * 8))
    assert policy.redraft_threshold(8) == before
    for _ in range(50):  # drafts are accepted less
        record(policy, 8, 32, 0.1, [2] * 4 + [4] * 4, [5] * 4 + [0] * 4)
    assert policy.redraft_threshold(8) > before


def test_rounds_that_had_something_else_to_do_say_nothing_of_times() -> None:
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    for _ in range(5):
        record(policy, 2, None, 7.0, [3, 3], [5, 5], verifying=0.0)
        record(policy, 2, 0, 0.1, [1, 1], [0, 5])
    assert policy.num_guesses(2) == 8 and policy.redraft_threshold(2) == 1


def play(policy: AheadPolicy, rows: int, seconds: float, drafting: float, chance: float, rounds: int) -> list[int]:
    """Rounds of verifications of 0.1 s in which guesses take `seconds`, each verdict is guessed with `chance`, and a
    fresh draft takes `drafting`; rows with a draft gain 4 tokens."""
    chosen, guessed = list[int](), 0
    for number in range(rounds):
        chosen.append(policy.num_guesses(rows))
        threshold = policy.redraft_threshold(rows)
        hits = rows if guessed and number % 10 < 10 * chance else 0
        drafts_again = hits < rows and rows - hits >= threshold
        gained, lens = ([4] * rows, [5] * rows) if hits or drafts_again else ([1] * rows, [0] * rows)
        spent = max(0.1, seconds if guessed else 0.0) + drafting * drafts_again
        policy.record_round(AheadRound(rows, 5, guessed, hits, drafts_again, 0.1, spent, gained, lens))
        policy.record_chances([chance] * 40)
        guessed = chosen[-1]
    return chosen


@pytest.mark.parametrize(
    ("rows", "seconds", "drafting", "chance", "guesses"),
    [
        (8, 0.3, 0.12, 0.7, False),  # 4 tokens in 0.23 s, where guesses give 3.1 in 0.33
        (1, 0.3, 0.12, 0.9, False),  # 4 in 0.23, where even all of them would be 4 in 0.33
        (8, 0.09, 0.12, 0.7, True),
        (1, 0.15, 0.12, 0.9, True),  # 4 in 0.15 and, one time in ten, 0.12 more
        (8, 0.3, 0.4, 0.7, True),
    ],
)
def test_nothing_is_guessed_where_a_fresh_draft_in_each_round_gains_more(
    rows: int, seconds: float, drafting: float, chance: float, guesses: bool
) -> None:
    """Then each round has one, and guesses are tried once in some hundred rounds."""
    policy = AheadPolicy(STEPS, 5, always_redrafts=False)
    chosen = play(policy, rows, seconds, drafting, chance, 800)[-600:]
    assert sum(count > 0 for count in chosen) == 600 if guesses else sum(count > 0 for count in chosen) <= 12, chosen
    insisting = AheadPolicy(STEPS, 5, always_redrafts=False, always_guesses=True)
    assert all(play(insisting, rows, seconds, drafting, chance, 300))
    if not guesses:
        assert policy.num_guesses(rows) == 0 and policy.redraft_threshold(rows) == 1
