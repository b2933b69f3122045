"""Drafts out of texts: each match is judged by its length and what became of such, so that bad ones cost nothing and
good ones are taken at once, whatever was before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from pipelines import make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.configuration.drafting.speculation_section import MatchRule
from trtrun.scheduling.matches import MatchRecord, OwnMatch, kind_of
from trtrun.speculation.match_pacing import MatchPacer
from trtrun.speculation.round_costs import assume_costs

MOST = 4
Drafter = Callable[[Sequence[int]], Sequence[int]]


def longest_match(text: Sequence[int], fewest: int = 2, most: int = 4) -> Sequence[int]:
    """What followed the first place of the longest match."""
    for size in range(min(most, len(text) - 1), fewest - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + MOST]
    return ()


class Played:
    """Rows that write given texts; rounds take as long as their positions say."""

    def __init__(self, at_once: float, fewest: int = 2, drafter: Drafter = longest_match, others: bool = False) -> None:
        self.record = MatchRecord()
        costs = assume_costs((1, 4, 16), MOST, lambda draft_len: draft_len + 1, 12, 0.0)
        self.pacer = MatchPacer(MOST, self.record, costs, has_other_texts=others)
        self._at_once, self._drafter = at_once, drafter
        self._rule = MatchRule(fewest, max(4, fewest), takes_first=True, has_others=others)

    def write(self, texts: Sequence[list[int]], prompt: int) -> tuple[float, list[int]]:
        """How many times as fast as plain decoding these texts come, and for how many rows each round drafts."""
        written, took, drafting = [prompt] * len(texts), 0.0, []
        matches = [OwnMatch(self._rule, self.record) for _ in texts]
        for match, text in zip(matches, texts, strict=True):
            self.record.begin_round()
            match.read(text[:prompt], prompt)
        while rows := [row for row, text in enumerate(texts) if written[row] < len(text)]:
            kinds = [matches[row].kind(texts[row][: written[row]]) for row in rows]
            draft_len, chosen = self.pacer.choose_matches(kinds)
            drafted = [row for row, kind in zip(rows, kinds, strict=True) if kind in chosen]
            self.pacer.note_plan(len(rows), len(rows) - len(drafted), draft_len, len(drafted))
            cost = 1 + (len(rows) + len(drafted) * draft_len) / self._at_once
            pairs = []
            self.record.begin_round()
            for row in rows:
                text, accepted = texts[row], 0
                found = self._drafter(text[: written[row]])[:draft_len] if row in drafted else ()
                while accepted < len(found) and [found[accepted]] == text[written[row] + accepted :][:1]:
                    accepted += 1
                if row in drafted:
                    pairs.append((draft_len, accepted))
                    matches[row].note_draft(len(found), accepted)
                written[row] = min(len(text), written[row] + accepted + 1)
                matches[row].read(text[: written[row]], prompt)
            self.pacer.record(len(rows), draft_len, cost * 0.03, pairs, len(rows) - len(drafted))
            took += cost
            drafting.append(len(drafted))
        return (len(texts[0]) - prompt) * (1 + len(texts) / self._at_once) / took, drafting


def of_chance(generator: random.Random, count: int, vocabulary: int) -> list[int]:
    return [generator.randrange(vocabulary) for _ in range(count)]


@pytest.mark.parametrize("at_once", [12, 200])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_matches_that_are_never_right_cost_nothing(num_rows: int, at_once: float) -> None:
    """Texts of thirty words at random: two words have stood before most of the time."""
    generator = random.Random(num_rows)
    speed, _ = Played(at_once).write([of_chance(generator, 440, 30) for _ in range(num_rows)], 40)
    assert speed > 0.98


@pytest.mark.parametrize("fewest", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_text_that_begins_to_repeat_itself_is_drafted_for_at_once(num_rows: int, fewest: int) -> None:
    """Four hundred words at random and then the same twenty over and over: four words of the second time, and what is
    left is drafted for."""
    generator = random.Random(7)
    texts = [of_chance(generator, 400, 30) + of_chance(generator, 20, 500) * 12 for _ in range(num_rows)]
    played = Played(200, fewest, lambda text: longest_match(text, fewest, max(4, fewest)))
    speed, drafting = played.write(texts, 40)
    assert 360 <= len(drafting) <= 360 + 20 + fewest + 5 + 220 // 4, len(drafting)
    assert all(drafting[-20:])
    speed, drafting = played.write([of_chance(generator, 30, 900) * 5 for _ in range(num_rows)], 60)
    assert drafting[0] == num_rows and speed > 3, "and what matches are like is known for other texts"


def test_bad_matches_of_some_rows_keep_no_other_row_from_its_good_ones() -> None:
    """Two texts at random, in which two words often stood before, and two that repeat themselves."""
    generator = random.Random(2)
    texts = [of_chance(generator, 440, 20) for _ in range(2)] + [of_chance(generator, 40, 500) * 40 for _ in range(2)]
    _, drafting = Played(12).write(texts, 60)
    together = drafting[40:300]
    assert 1.9 < sum(together) / len(together) < 2.3, together


def test_the_first_match_of_a_job_is_drafted_for() -> None:
    text = of_chance(random.Random(3), 20, 500)
    _, drafting = Played(12).write([text + text[5:15]], 23)
    assert drafting[0] == 1


def test_a_drafter_that_takes_other_places_than_the_match_is_judged_by_its_drafts() -> None:
    """The match is right each time, and what is drafted never."""
    text = of_chance(random.Random(3), 20, 500) * 20
    speed, drafting = Played(12, drafter=lambda text: [501] * MOST).write([text], 60)
    assert speed > 0.98 and sum(drafting) < 50, "a token now and then"


@pytest.mark.parametrize("others", [False, True])
def test_rows_without_a_match_are_drafted_for_where_other_texts_may_have_one(others: bool) -> None:
    """And not for ever where these have none."""
    known = of_chance(random.Random(3), 300, 5000)
    follows = {token: known[place + 1 : place + 1 + MOST] for place, token in enumerate(known)}
    played = Played(200, drafter=lambda text: follows.get(text[-1], ()), others=others)
    speed, drafting = played.write([known], 10)
    assert (speed > 3) == others and (sum(drafting) > 50) == others
    played = Played(200, drafter=lambda text: (), others=others)
    assert sum(played.write([known], 10)[1]) < 30


def test_a_match_is_there_where_the_last_tokens_stood_before() -> None:
    """As a search of the whole text says, token by token; and a long prompt is read in parts."""
    generator = random.Random(5)
    for fewest, takes_first in product((1, 2, 5), (False, True)):
        text, match = of_chance(generator, 300, 6), OwnMatch(MatchRule(fewest, 5, takes_first), MatchRecord())
        for end in range(1, len(text)):
            match.read(text[:end], 0)
            last = text[:end][-fewest:]
            stood = end > fewest and any(text[at : at + fewest] == last for at in range(end - fewest))
            assert (match.kind(text[:end]) > 0) == stood, (fewest, end)
    text, record = of_chance(generator, 2500, 3), MatchRecord()
    match, later = OwnMatch(MatchRule(2, 3), record), OwnMatch(MatchRule(2, 3), record)
    kinds = []
    for _ in range(4):
        record.begin_round()
        match.read(text, 2500)
        later.read(text, 2500)
        kinds.append((match.kind(text) > 0, later.kind(text) > 0))
    # Of a round's time the rows have what those before them leave.
    assert kinds == [(False, False), (True, False), (True, True), (True, True)]
    assert record.offered == MatchRecord().offered
    assert [kind_of(length) for length in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 99)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_texts_are_those_of_the_target_alone_and_drafts_begin_with_the_first_matches(
    tmp_path: Path, method: str, plans_ahead: int
) -> None:
    """A tiny model of few words falls into repeating itself. Nothing is measured at the start."""
    target = make_checkpoint(tmp_path / "target", vocab_size=48)
    prompts = [prompt_of(30, seed=seed, vocab_size=40) for seed in range(3)]
    sampling = [SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.3 * seed, seed=seed) for seed in range(3)]
    with make_llm(target) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
    speculation = {"method": method, "draft_len": MOST, "pacing": "measured"}
    if method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    with make_llm(target, speculation=speculation, scheduler={"plans_ahead": plans_ahead}) as llm:
        outputs = llm.generate(prompts, sampling)
        statistics = llm.statistics()
        llm.check_idle()
    assert tokens_of(outputs) == expected
    assert statistics["num_draft_tokens"] > 0
