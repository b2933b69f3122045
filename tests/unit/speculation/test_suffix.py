"""SuffixDecoding: what it proposes, by the paper's rule in plain Python, and that nothing of a text depends on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from lookups import COUNT, check_greedy, check_sampled
from pipelines import make_llm, prompt_of, tokens_of
from suffixes_by_hand import expected_paths, rules, texts_of

from trtrun import SamplingParams
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.errors import ConfigError
from trtrun.speculation.drafters.suffix import SuffixDrafter
from trtrun.speculation.suffixes import search
from trtrun.speculation.suffixes.continuations import SuffixRule
from trtrun.speculation.suffixes.search import SuffixSearch
from trtrun.speculation.trees import path_tokens

RULE = SuffixRule(most_matched=24, spec_factor=None, spec_offset=0.0, min_token_prob=0.1)


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
    return SuffixDrafter(state, SuffixSearch(state, rule), max_paths).propose(plan, [])


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


@pytest.mark.parametrize("most_compared", [1, 1 << 22])
@pytest.mark.parametrize("max_paths", [1, 2, 5])
def test_it_agrees_with_the_rule_of_the_paper(
    most_compared: int, max_paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MOST_COMPARED", most_compared)
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


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(0, 1), (1, 3)])
def test_lossless_greedy_equals_transformers(target: Path, plans_ahead: int, max_paths: int) -> None:
    check_greedy(target, {"method": "suffix", "max_paths": max_paths}, plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(1, 2)])
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
        ({"suffix_decoding_max_cached_tokens": 99}, "is of use with suffix_decoding_max_cached_requests alone"),
        ({"use_logits": True}, "speculation: use_logits does not go with method suffix"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is an option of method ngram, but the method is suffix"),
        ({"method": "medusa", "max_paths": 3}, "max_paths is an option of method ngram and suffix, but the method is"),
    ],
)
def test_options_that_do_not_fit_are_refused(target: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(target, speculation={"method": "suffix", **section})
    assert message in str(caught.value) and "\n" not in str(caught.value)
