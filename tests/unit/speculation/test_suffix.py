"""SuffixDecoding: what it proposes, by the paper's rule in plain Python, and that nothing of a text depends on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from lookups import COUNT, check_greedy, check_sampled
from pipelines import make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.errors import ConfigError
from trtrun.speculation.drafters import suffix
from trtrun.speculation.drafters.suffix import SuffixDrafter
from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule
from trtrun.speculation.trees import path_tokens

RULE = SuffixRule(most_matched=24, spec_factor=None, spec_offset=0.0, min_token_prob=0.1)


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


def expected_paths(tokens: list[int], rule: SuffixRule, draft_len: int, max_paths: int) -> list[list[int]]:
    """What is to be proposed behind `tokens`, as one would say it."""
    places = []
    for start in range(1, len(tokens)):
        sizes = range(min(rule.most_matched, start), 0, -1)
        longest = next((size for size in sizes if tokens[start - size : start] == tokens[-size:]), 0)
        places += [(longest, start)] if longest else []
    places = sorted(places, reverse=True)[:MOST_PLACES]
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


def draft_of(texts: Sequence[Sequence[int]], lens: Sequence[int], rule: SuffixRule, max_paths: int = 1) -> Draft:
    """The draft for rows with these tokens, held in reverse order with scratch behind."""
    rows = list(reversed(range(len(texts))))
    token_ids = torch.randint(-1, 4, (len(texts), 120), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    lengths = torch.zeros(len(texts), dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[row] = len(text)
    state: Any = SimpleNamespace(token_ids=token_ids, lengths=lengths)
    none, decode, draft_lens = np.zeros((0, 3), np.int32), np.array(rows, np.int32), np.array(lens, np.int32)
    plan = RoundPlan(0, (), (), none, (), decode, draft_lens, np.zeros_like(decode), max(map(len, texts)) + 9)
    return SuffixDrafter(state, rule, max_paths).propose(plan, [])


def propose(texts: Sequence[Sequence[int]], lens: Sequence[int], rule: SuffixRule = RULE) -> list[list[int]]:
    """What is proposed for rows with these tokens, in chains."""
    draft = draft_of(texts, lens, rule)
    assert draft.tokens.shape == (len(texts), max(0, *lens)) and draft.draft_probs is None and draft.paths is None
    return [row[:count] for row, count in zip(draft.tokens.tolist(), draft.draft_lens.tolist(), strict=True)]


def test_it_proposes_what_followed_most_often() -> None:
    often = [1, 2, 8, 1, 2, 9, 1, 2, 8, 5, 1, 2]
    assert propose([often], [1]) == [[8]], "8 twice, 9 once"
    assert propose([[*often[:-2], 7, 9, 1, 2]], [1]) == [[8]], "a longer match of one place before a shorter one"
    assert propose([[4, 7, 9, 3, 7, 8, 4, 7]], [1]) == [[9]], "a longer match before a later one"
    assert propose([[7, 9, 7, 8, 4, 7]], [2]) == [[8, 4]], "of matches that say as much the latest"
    assert propose([[7, 7, 7, 7, 7, 7]], [3]) == [[7, 7, 7]], "a text that repeats goes on for a whole draft"
    assert propose([[1, 2, 3], [5]], [4, 4]) == [[], []], "nothing occurred before"
    assert propose([[5, 5], [5, 5, 5]], [0, -1]) == [[], []], "a round without drafts"


def test_matches_bound_how_far_they_are_followed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    for factor, offset, count in ((1.0, 0.0, 2), (2.0, 0.0, 4), (0.5, 0.0, 1), (0.1, 2.8, 3), (1.0, -2.0, 0)):
        rule = SuffixRule(24, factor, offset, 0.1)
        assert propose([text], [6], rule) == [text[2 : 2 + count]], (factor, offset)
    assert propose([text], [6], RULE) == [text[2:8]]
    likely = [1, 2, 5, 0, 1, 3, 6, 0, 1, 2, 4, 0, 1]
    assert propose([likely], [3], SuffixRule(1, None, 0, 0.5)) == [[2]], "two of three, and then one of three"


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


@pytest.mark.parametrize("most_compared", [1, 1 << 22])
@pytest.mark.parametrize("max_paths", [1, 2, 5])
def test_it_agrees_with_the_rule_of_the_paper(
    most_compared: int, max_paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix, "_MOST_COMPARED", most_compared)
    chance = random.Random(max_paths)
    found: Counter[int] = Counter()
    for _ in range(50):
        texts, rule = texts_of(chance), rules(chance)
        lens = [chance.randint(-1, 6) for _ in texts]
        if max(lens) < 1:
            continue
        draft = draft_of(texts, lens, rule, max_paths)
        if max_paths == 1:
            tokens, counts = draft.tokens.unsqueeze(1).tolist(), draft.draft_lens.unsqueeze(1).tolist()
        else:
            assert draft.paths is not None and draft.paths.shape[1:] == (max_paths, max(lens))
            tokens, counts = path_tokens(draft).tolist(), draft.path_lens().tolist()
        for text, length, of_paths, of_row in zip(texts, lens, tokens, counts, strict=True):
            paths = [path[:count] for path, count in zip(of_paths, of_row, strict=True) if count]
            expected = [one[:length] for one in expected_paths(text, rule, max(lens), max_paths) if length > 0]
            assert paths == expected, (text, rule, length)
            found[len(paths)] += 1
    assert all(found[count] > 10 for count in range(1 + min(max_paths, 3)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("suffix") / "target", seed=1, num_hidden_layers=2)


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(0, 1), (1, 1), (0, 3), (1, 2)])
def test_lossless_greedy_equals_transformers(target: Path, plans_ahead: int, max_paths: int) -> None:
    check_greedy(target, {"method": "suffix", "max_paths": max_paths}, plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(0, 1), (1, 2)])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    target: Path, plans_ahead: int, max_paths: int
) -> None:
    check_sampled(target, {"method": "suffix", "max_paths": max_paths}, plans_ahead)


def test_what_a_request_brings_is_proposed_first(target: Path) -> None:
    with make_llm(target, speculation={"method": "suffix", "draft_len": 3}) as llm:
        (text,) = tokens_of(llm.generate([prompt_of(9)], SamplingParams(max_tokens=COUNT)))[0]
        llm.reset_statistics()
        asked = SamplingParams(max_tokens=COUNT, draft_token_ids=text)
        output = llm.generate([prompt_of(9)], asked)[0].completions[0]
    assert output.token_ids == text and output.statistics.num_rounds == COUNT // 4


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"suffix_decoding_max_tree_dept": 3}, "unknown key (did you mean 'suffix_decoding_max_tree_depth'?)"),
        ({"suffix_decoding_max_tree_depth": 65}, "max_tree_depth: must be less than or equal to 64"),
        ({"suffix_decoding_max_spec_factor": -1}, "max_spec_factor: must be greater than or equal to 0"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob: must be less than or equal to 1"),
        ({"use_logits": True}, "speculation: use_logits does not go with method suffix"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is an option of method ngram, but the method is suffix"),
        ({"method": "medusa", "max_paths": 3}, "max_paths is an option of method ngram and suffix, but the method is"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(target, speculation={"method": "suffix", **section})
    assert message in str(caught.value) and "\n" not in str(caught.value)
