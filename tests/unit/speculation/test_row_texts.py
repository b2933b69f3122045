"""A row's text beside a naive model of it, which keeps every token and which of them were written at which place."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from trtrun.speculation.ahead.row_texts import Guess, Guesses, RowText


@dataclass
class Naive:
    """All that `RowText` is about, kept in full.

    Attributes:
        row: the row's tokens.
        draft: behind them.
        store: the token whose keys and values are in the row's blocks, by position.
    """

    row: list[int]
    draft: list[int] = field(default_factory=list)
    store: dict[int, int] = field(default_factory=dict)

    @property
    def text(self) -> list[int]:
        return self.row + self.draft

    def check(self, text: RowText) -> None:
        """The text says the same, and claims nothing to be written whose token is another one."""
        assert (text.length, text.newest, text.draft) == (len(self.row), self.row[-1], self.draft)
        assert text.end == len(self.text)
        assert text.unfed == self.text[text.written :]
        assert 0 <= text.written <= text.end
        assert all(self.store.get(place) == self.text[place] for place in range(text.written))


class Walk:
    """A text through random operations, checked after each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        prompt = self._tokens(self.random.randrange(1, 6))
        self.naive = Naive(prompt, store=dict(enumerate(prompt)))
        self.text = RowText(len(prompt), 0)
        self.text.end_prompt(prompt[-1])
        self.most_unfed = 0
        self.went_on = 0
        self.naive.check(self.text)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(4) for _ in range(count)]  # few ids: a wrong token is often the right one again

    def step(self) -> None:
        kind = self.random.choice(("feed", "draft now", "hit", "cut", "verdict", "verdict", "verdict"))
        getattr(self, kind.replace(" ", "_"))()
        self.naive.check(self.text)
        self.most_unfed = max(self.most_unfed, len(self.text.unfed))

    def feed(self) -> None:
        """The whole text, as before guesses."""
        fed = self.text.take_unfed()
        assert fed, "a row is fed something, for what follows its last token"
        start = self.text.end - len(fed)
        assert fed == self.naive.text[start:]
        self.naive.store |= dict(enumerate(fed, start))
        assert self.text.written == self.text.end and not self.text.unfed

    def draft_now(self) -> None:
        if self.naive.draft:
            return
        self.feed()
        self._extend(self._tokens(self.random.randrange(1, 5)))

    def hit(self) -> None:
        """The tokens come with their keys and values, also that of the newest token, which was not fed here."""
        lacking = len(self.naive.row) - 1
        if self.naive.draft or self.text.written < lacking:
            return
        self.naive.store[lacking] = self.naive.row[-1]
        self._extend(self._tokens(self.random.randrange(1, 5)))

    def _extend(self, draft: list[int]) -> None:
        self.naive.draft = draft
        for place, token in enumerate(draft[:-1], len(self.naive.row)):
            self.naive.store[place] = token
        self.text.extend(list(draft), [[9 + place] for place in range(len(draft))])

    def cut(self) -> None:
        most = self.random.randrange(1, 5)
        if len(self.naive.draft) > most:
            self.naive.draft = self.naive.draft[:most]
            self.text.extend(self.text.draft[:most], self.text.ranked[:most])

    def verdict(self) -> None:
        draft = self.naive.draft
        accepted = self.random.choice((0, len(draft), self.random.randrange(len(draft) + 1)))
        token = self.random.randrange(4)
        goes_on = draft[accepted : accepted + 1] == [token]
        ranked = self.text.ranked[accepted + 1 :]
        self.naive.row = [*self.naive.row, *draft[:accepted], token]
        self.naive.draft = draft[accepted + 1 :] if goes_on else []
        self.text.advance(accepted, token)
        assert self.text.ranked == (ranked if goes_on else [])
        self.went_on += bool(self.naive.draft)
        # What is written behind the text is overwritten before it is read: only what the text claims counts.


@pytest.mark.parametrize("seed", range(200))
def test_a_text_is_what_the_tokens_and_the_store_say(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(60):
        walk.step()


def test_the_walks_go_everywhere() -> None:
    walks = [Walk(seed) for seed in range(50)]
    for walk in walks:
        for _ in range(60):
            walk.step()
    assert max(walk.most_unfed for walk in walks) > 4
    assert sum(walk.went_on for walk in walks) > 20


def decoding(prompt: list[int], draft: list[int]) -> RowText:
    """A row with a fresh draft."""
    text = RowText(len(prompt), 0)
    text.end_prompt(prompt[-1])
    text.take_unfed()
    text.extend(draft, [[50 + place] for place in range(len(draft))])
    return text


@pytest.mark.parametrize(
    ("accepted", "token", "written", "unfed", "draft"),
    [
        (3, 20, 5, [12, 20], []),  # all: the last draft token was never fed
        (2, 20, 5, [20], []),
        (1, 20, 4, [20], []),
        (0, 20, 3, [20], []),
        (0, 10, 5, [12], [11, 12]),  # not all of it was verified, and the rest may still be right
        (2, 12, 5, [12], []),  # the last one comes as the verdict's own token: to be fed, for what follows it
    ],
)
def test_a_verdict_on_a_draft_of_three(
    accepted: int, token: int, written: int, unfed: list[int], draft: list[int]
) -> None:
    text = decoding([1, 2, 3], [10, 11, 12])
    text.advance(accepted, token)
    assert (text.length, text.written, text.unfed, text.draft) == (4 + accepted, written, unfed, draft)
    assert text.ranked == [[51], [52]][: len(draft)]


def test_a_fed_draft_is_written_whole() -> None:
    text = decoding([1, 2, 3], [10, 11, 12])
    assert text.take_unfed() == [12]
    assert text.take_unfed() == [12], "a second time for what follows it"
    text.advance(3, 20)
    assert (text.written, text.unfed) == (6, [20])


def test_verdicts_in_rounds_without_a_forward_add_up() -> None:
    text = decoding([1, 2, 3], [10, 11])
    for token in (20, 21, 22):
        text.advance(0, token)
    assert (text.written, text.unfed) == (3, [20, 21, 22])
    assert text.take_unfed() == [20, 21, 22]
    assert (text.written, text.take_unfed()) == (6, [22])


def test_a_guess_is_found_by_its_verdict_alone() -> None:
    guesses = Guesses([Guess(0, 0, 7), Guess(0, 1, 8), Guess(2, 0, 3), Guess(0, 0, 7)])
    assert guesses.find(0, 0, 5) is None, "before it is settled"
    guesses.settle([5, 6, 5, 5], [[1], [2], [3], [4]], [[[1]], [[2]], [[3]], [[4]]])
    assert [guesses.find(*verdict) for verdict in ((0, 0, 5), (0, 1, 6), (2, 0, 5))] == [0, 1, 2]
    assert [guesses.find(*verdict) for verdict in ((0, 0, 6), (0, 1, 5), (1, 0, 5), (2, 1, 5))] == [None] * 4
