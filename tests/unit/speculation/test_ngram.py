"""Prompt lookup: what it finds, that nothing of a text depends on it, and that only real drafts are counted."""

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
from checkpoints import ARCHITECTURES, make_checkpoint
from lookups import check_greedy, check_sampled, generate
from pipelines import make_llm

from trtrun import SamplingParams
from trtrun.configuration.drafting_methods import METHODS
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.errors import ConfigError
from trtrun.speculation.drafters import DRAFTERS, ngram
from trtrun.speculation.drafters.ngram import NgramDrafter
from trtrun.speculation.trees import path_tokens

SHORT = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Texts of random models repeat single tokens often and longer parts seldom."""


def look_up(tokens: Sequence[int], fewest: int, most: int, draft_len: int) -> list[int]:
    """The proposal as one would say it: the longest match, of those the first, and what followed it."""
    for size in range(min(most, len(tokens) - 1), fewest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return list(tokens[start + size : start + size + draft_len])
    return []


def look_up_paths(tokens: Sequence[int], fewest: int, most: int, draft_len: int, max_paths: int) -> list[list[int]]:
    """Several proposals as one would say it: the best matches in turn, without those that say nothing new."""
    places = []
    for start in range(1, len(tokens)):
        sizes = range(min(most, start), fewest - 1, -1)
        longest = next((size for size in sizes if tokens[start - size : start] == tokens[-size:]), 0)
        places += [(-longest, start)] if longest else []
    best = [list(tokens[start : start + draft_len]) for _, start in sorted(places)[: ngram._CANDIDATES * max_paths]]
    new = [
        one
        for index, one in enumerate(best)
        if not any(one == other[: len(one)] and (one != other or at < index) for at, other in enumerate(best))
    ]
    return new[:max_paths]


def propose(
    texts: Sequence[Sequence[int]], lens: Sequence[int], fewest: int, most: int, max_context: int = 64
) -> list[list[int]]:
    """What the drafter proposes for rows with these tokens."""
    draft = draft_of(texts, lens, fewest, most, max_context)
    assert draft.tokens.shape == (len(texts), max(0, *lens)) and draft.draft_probs is None and draft.paths is None
    return [row[:count] for row, count in zip(draft.tokens.tolist(), draft.draft_lens.tolist(), strict=True)]


def draft_of(
    texts: Sequence[Sequence[int]], lens: Sequence[int], fewest: int, most: int, max_context: int, max_paths: int = 1
) -> Draft:
    """The draft for rows with these tokens, held in reverse order with scratch behind."""
    rows = list(reversed(range(len(texts))))
    token_ids = torch.randint(4, (len(texts), 80), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    lengths = torch.zeros(len(texts), dtype=torch.int64)
    for row, text in zip(rows, texts, strict=True):
        token_ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[row] = len(text)
    state: Any = SimpleNamespace(token_ids=token_ids, lengths=lengths)
    none, decode, draft_lens = np.zeros((0, 3), np.int32), np.array(rows, np.int32), np.array(lens, np.int32)
    plan = RoundPlan(0, (), (), none, (), decode, draft_lens, np.zeros_like(decode), max_context)
    return NgramDrafter(state, fewest, most, max_paths).propose(plan, [])


def test_it_proposes_what_followed_the_last_tokens_before() -> None:
    # vLLM's own example: [4, 2, 3] is new, [2, 3] was followed by [4, 2, 3].
    assert propose([[1, 2, 3, 4, 2, 3]], [4], 2, 3) == [[4, 2, 3]]
    assert propose([[1, 2, 9, 1, 2, 8, 1, 2]], [2], 1, 5) == [[9, 1]], "of equally long matches the first"
    assert propose([[2, 9, 1, 2, 8, 1, 2]], [2], 1, 5) == [[8, 1]], "a longer match before an earlier one"
    assert propose([[7, 7, 7, 7]], [4], 2, 2) == [[7, 7]], "a match may reach into the row's end"
    assert propose([[1, 2, 3]], [4], 1, 3) == [[]], "nothing occurred before"
    assert propose([[5]], [4], 1, 3) == [[]] and propose([[5, 5]], [4], 1, 3) == [[5]]
    assert propose([[5, 5], [5, 5, 5]], [0, -1], 1, 3) == [[], []], "a round without drafts"


@pytest.mark.parametrize("most_positions", [1, 100, 1 << 22])
def test_it_agrees_with_a_search_row_by_row(most_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MOST_POSITIONS", most_positions)
    chance = random.Random(3)
    found = 0
    for _ in range(60):
        texts = [[chance.randrange(4) for _ in range(chance.randint(1, 40))] for _ in range(5)]
        lens = [chance.randint(-1, 5) for _ in texts]
        fewest = chance.randint(1, 4)
        most = chance.randint(fewest, 6)
        context = chance.randint(max(map(len, texts)), 120)
        asked = zip(texts, lens, strict=True)
        expected = [look_up(text, fewest, most, max(0, length)) for text, length in asked]
        assert propose(texts, lens, fewest, most, context) == expected
        found += sum(map(bool, expected))
    assert found > 60


@pytest.mark.parametrize("most_positions", [1, 1 << 22])
def test_further_paths_are_the_next_best_matches(most_positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MOST_POSITIONS", most_positions)
    chance = random.Random(4)
    found: Counter[int] = Counter()
    for _ in range(60):
        texts = [[chance.randrange(4) for _ in range(chance.randint(1, 40))] for _ in range(5)]
        lens = [chance.randint(-1, 5) for _ in texts]
        fewest, max_paths = chance.randint(1, 3), chance.randint(2, 6)
        most = chance.randint(fewest, 6)
        draft = draft_of(texts, lens, fewest, most, 64, max_paths)
        if max(lens) < 1:
            continue
        assert draft.paths is not None and draft.paths.shape[1:] == (max_paths, max(lens))
        tokens, counts = path_tokens(draft).tolist(), draft.path_lens().tolist()
        for text, length, of_paths, of_row in zip(texts, lens, tokens, counts, strict=True):
            paths = [path[:count] for path, count in zip(of_paths, of_row, strict=True) if count]
            # Continuations are as long as the round's longest draft, and cut off where the row's own is.
            expected = [one[:length] for one in look_up_paths(text, fewest, most, max(lens), max_paths)]
            assert paths == (expected if length > 0 else [])
            found[len(paths)] += 1
    assert min(found[count] for count in range(1, 4)) > 10


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target of each architecture."""
    folder = tmp_path_factory.mktemp("ngram")
    return {name: make_checkpoint(folder / name, name, seed=1, num_hidden_layers=2) for name in ARCHITECTURES}


@pytest.mark.parametrize(
    ("architecture", "plans_ahead", "max_paths"),
    [(ARCHITECTURES[0], 0, 1), (ARCHITECTURES[-1], 1, 3)],
)
def test_lossless_greedy_equals_transformers(
    targets: dict[str, Path], architecture: str, plans_ahead: int, max_paths: int
) -> None:
    check_greedy(targets[architecture], {**SHORT, "max_paths": max_paths}, plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(1, 1), (0, 2)])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    targets: dict[str, Path], plans_ahead: int, max_paths: int
) -> None:
    check_sampled(targets["LlamaForCausalLM"], {**SHORT, "max_paths": max_paths}, plans_ahead)


def test_a_text_that_repeats_takes_fewer_rounds_and_one_that_does_not_counts_no_draft(tmp_path: Path) -> None:
    """A target of zeros says token 0 for ever; the other row ends before anything occurs twice."""
    from safetensors.torch import load_file, save_file

    target = make_checkpoint(tmp_path / "target", num_hidden_layers=1)
    weights = {name: value * 0 for name, value in load_file(target / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with make_llm(target, speculation={"method": "ngram", "prompt_lookup_min": 2, "draft_len": 4}) as llm:
        sampling = [SamplingParams(max_tokens=count) for count in (42, 3)]
        repeats, new = llm.generate([[5, 6, 7], [5, 6, 7]], sampling)
        first, second = (output.completions[0] for output in (repeats, new))
        assert first.token_ids == (0,) * 42 and second.token_ids == (0,) * 3
        assert first.statistics.num_draft_tokens == first.statistics.num_accepted_draft_tokens > 20
        assert first.statistics.num_rounds < 15
        assert (second.statistics.num_draft_tokens, second.statistics.acceptance_histogram) == (0, [2])
        llm.set_speculation(False)
        llm.reset_statistics()
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=42))[0].completions[0].token_ids == (0,) * 42
        assert (llm.statistics()["num_draft_tokens"], llm.statistics()["num_rounds"]) == (0, 42)


def test_pacing_gives_up_a_lookup_that_never_finds_anything(targets: dict[str, Path]) -> None:
    """No text depends on it, and it works without a draft engine."""
    with make_llm(targets["Qwen3ForCausalLM"], speculation={"method": "ngram", "pacing": "measured"}) as llm:
        assert llm.config.is_paced and llm.config.is_speculative and not llm.config.has_draft_engine
        paced = generate(llm)
        llm.set_speculation(False)
        assert generate(llm) == paced


def test_every_method_of_the_table_has_a_drafter_where_it_drafts() -> None:
    assert set(DRAFTERS) == {name for name, method in METHODS.items() if method.placement is not None}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"method": "ngrm"}, "speculation.method: unknown method 'ngrm' (did you mean 'ngram'?)"),
        (
            {"method": "ngram", "prompt_lookup_mx": 3},
            "prompt_lookup_mx: unknown key (did you mean 'prompt_lookup_max'?)",
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 0},
            "speculation.prompt_lookup_max: must be greater than or equal to 1",
        ),
        ({"method": "ngram", "prompt_lookup_max": True}, "speculation.prompt_lookup_max: must be a number"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4"),
        ({"method": "ngram", "use_logits": True}, "speculation: use_logits does not go with method ngram"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is an option of method ngram, but the method is draft_target"),
    ],
)
def test_options_that_do_not_fit_are_refused(targets: dict[str, Path], section: dict[str, Any], message: str) -> None:
    target = next(iter(targets.values()))
    with pytest.raises(ConfigError) as caught:
        make_llm(target, target, speculation={"method": "draft_target", **section})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_draft_section_is_forgotten_and_so_are_lookup_options_without_drafts(targets: dict[str, Path]) -> None:
    from pipelines import configuration

    target = next(iter(targets.values()))
    config = configuration(target, Path("nowhere"), speculation={"method": "ngram", "prompt_lookup_max": 3})
    assert (config.draft, config.is_speculative, config.draft_len) == (None, True, 4)
    assert config.speculation.lookup_range == (3, 3)
    config = configuration(target, None, speculation={"method": "none", "prompt_lookup_max": 3})
    assert (config.is_speculative, config.draft_len) == (False, 0)
