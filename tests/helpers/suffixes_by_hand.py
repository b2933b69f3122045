"""SuffixDecoding by the paper's rule in plain Python, and texts to try it on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule


class Match:
    """A match of some length: where its tokens stood before, and how often each continuation followed."""

    def __init__(self, tokens: Sequence[int], length: int, places: Sequence[tuple[int, int]], rule: SuffixRule) -> None:
        self.starts = [start for matched, start in places if matched >= length]
        self.tokens, self.length, self.rule = tokens, length, rule

    def count(self, continuation: Sequence[int]) -> int:
        """Places that go on like this."""
        size = len(continuation)
        return sum(self.tokens[start : start + size] == continuation for start in self.starts)

    def likely(self, start: int, most: int) -> list[list[int]]:
        """Continuations of one place, of one token, of two and so on, as long as they are likely."""
        behind = self.tokens[start : start + most]
        found = [list(behind[:size]) for size in range(1, len(behind) + 1)]
        least = len(self.starts) * Fraction(str(self.rule.min_token_prob))
        return [one for one in found if self.count(one) >= least]


def most_tokens(rule: SuffixRule, matched: int, draft_len: int) -> int:
    """How far a match may go on."""
    if rule.spec_factor is None:
        return draft_len
    exact = matched * Fraction(str(rule.spec_factor)) + Fraction(str(rule.spec_offset))
    return min(draft_len, max(0, int(exact)))


def expected_paths(
    tokens: list[int], rule: SuffixRule, draft_len: int, max_paths: int, min_match: int = 1
) -> list[list[int]]:
    """What is to be proposed behind `tokens`, as one would say it, by places where `min_match` of them stood."""
    places = []
    for start in range(1, len(tokens)):
        sizes = range(min(rule.most_matched, start), 0, -1)
        longest = next((size for size in sizes if tokens[start - size : start] == tokens[-size:]), 0)
        places += [(longest, start)] if longest else []
    places = [place for place in sorted(places, reverse=True)[:MOST_PLACES] if place[0] >= min_match]
    best, best_score, best_path = None, Fraction(-1), []
    for length in sorted({matched for matched, _ in places}, reverse=True):
        match = Match(tokens, length, places, rule)
        for start in match.starts:
            likely = match.likely(start, most_tokens(rule, length, draft_len))
            score = Fraction(sum(map(match.count, likely)), len(match.starts))
            if score > best_score:
                best, best_score, best_path = match, score, likely[-1] if likely else []
    if max_paths == 1 or best is None:
        return [best_path] if best_path else []
    everything = Match(tokens, 0, places, rule)
    weights: list[dict[tuple[int, ...], int]] = []
    for matched, start in places:
        of_place: Counter[tuple[int, ...]] = Counter()
        if start in best.starts:
            for one in best.likely(start, most_tokens(rule, best.length, draft_len)):
                of_place[tuple(one)] += best.count(one) * 1_000_000
        for one in everything.likely(start, most_tokens(rule, matched, draft_len)):
            of_place[tuple(one)] += everything.count(one)
        weights.append(of_place)
    said: set[tuple[int, ...]] = set()
    paths = []
    for _ in range(max_paths):
        gains = [sum(weight for node, weight in of_place.items() if node not in said) for of_place in weights]
        if not any(gains):
            break
        chosen = gains.index(max(gains))
        paths.append(list(max(weights[chosen], key=len)))
        # What is the same up to a token is said up to there, be the other one's own match longer or not.
        start = places[chosen][1]
        said |= {tuple(tokens[start : start + size]) for size in range(1, draft_len + 1)}
    return paths


def rules(chance: random.Random) -> SuffixRule:
    factor = chance.choice([None, 0.5, 1.0, 2.0])
    probability = chance.choice([0.0, 0.1, 0.25, 0.3, 0.5, 1.0])
    return SuffixRule(chance.choice([1, 3, 24, 64]), factor, chance.choice([0.0, 1.0, -1.0]), probability)


def texts_of(chance: random.Random) -> list[list[int]]:
    """Some of a few tokens, and some that repeat longer parts with a change here and there."""
    found = [[chance.randrange(4) for _ in range(chance.randint(1, 60))] for _ in range(3)]
    for _ in range(2):
        part = [chance.randrange(9) for _ in range(chance.randint(2, 12))]
        repeated = part * chance.randint(2, 7)
        found.append([token if chance.random() < 0.95 else chance.randrange(9) for token in repeated])
    return found
