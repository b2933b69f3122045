"""Answers of the past for SuffixDecoding: what is kept of them, that rows find it, and that no text depends on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from lookups import COUNT, KINDS, SCHEDULER, check_greedy, check_sampled, repeated_prompts
from pipelines import configuration, make_llm, prompt_of, run_alone, tokens_of

from launch.jobs.placement.memory import JobMemory
from trtrun import SamplingParams
from trtrun.speculation.suffixes.continuations import MOST_PLACES
from trtrun.speculation.suffixes.corpus import PastAnswers
from trtrun.start.job_spec import JobSpec

MOST = 5
DEVICE = torch.device("cpu")
FEW = COUNT // 5 + 1
"""Rounds of a text that is drafted whole, but for its first tokens."""
CACHED = {"method": "suffix", "suffix_decoding_max_cached_requests": 100}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("answers") / "target", seed=1, num_hidden_layers=2)


def found_by_hand(answers: list[list[int]], row: list[int], count: int) -> list[tuple[int, list[int]]]:
    """Every place where at least the row's last token stood: how many of them, and what stands behind."""
    found = []
    for answer in answers:
        for start in range(1, len(answer)):
            sizes = range(min(MOST, start, len(row)), 0, -1)
            longest = next((size for size in sizes if answer[start - size : start] == row[-size:]), 0)
            found += [(longest, answer[start : start + count])] if longest else []
    return sorted(found, reverse=True)


def kept_by_hand(answers: list[list[int]], max_requests: int, max_tokens: int) -> list[list[int]]:
    """The newest answers; of the oldest what room is left for, and its end alone."""
    kept: list[list[int]] = []
    room = max_tokens
    for answer in reversed([answer for answer in answers if answer][-max_requests:]):
        if room > 1:
            kept.append(answer[-(room - 1) :])
        room -= len(kept[-1]) + 1
        if room < 1:
            break
    return kept


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(1, 400), (3, 400), (99, 40), (4, 25), (99, 2), (9, 5)])
def test_the_newest_answers_are_found(max_requests: int, max_tokens: int) -> None:
    """As many as there is room for; of an answer what stands behind the prompt, up to the row's length."""
    chance = random.Random(max_requests * max_tokens)
    store, answers, num_found = PastAnswers(max_requests, max_tokens, MOST, DEVICE), [], 0
    for _ in range(30):
        row = torch.randint(0, 3, (60,), dtype=torch.int32, generator=torch.Generator().manual_seed(len(answers)))
        start, length = chance.randint(0, 20), chance.randint(0, 50)
        store.add(row, start, torch.tensor(length))
        answers.append(row[start:length].tolist())
        kept = kept_by_hand(answers, max_requests, max_tokens)
        wanted = [[chance.randrange(3) for _ in range(MOST)] for _ in range(4)]
        matched, tokens, counts = store.corpus().find(torch.tensor(wanted, dtype=torch.int32), 4)
        for index, row_tokens in enumerate(wanted):
            expected = found_by_hand(kept, row_tokens, 4)
            found = [
                (size, behind[:count])
                for size, behind, count in zip(
                    matched[index].tolist(), tokens[index].tolist(), counts[index].tolist(), strict=True
                )
                if size
            ]
            assert [size for size, _ in found] == [size for size, _ in expected[:MOST_PLACES]]
            if len(expected) <= MOST_PLACES:
                assert sorted(found, reverse=True) == expected
            num_found += len(found)
    assert num_found > 50 or max_tokens < 9


def test_an_answer_is_drafted_for_who_asks_again_and_texts_are_the_same(target: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 30, 12, 21)]
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, temperature=index % 2) for index in range(4)]
    with make_llm(target) as llm:
        expected = run_alone(llm, prompts, sampling)
    for speculation, repeats in ((CACHED, True), ({"method": "suffix"}, False)):
        with make_llm(target, speculation={**speculation, "draft_len": 4}) as llm:
            rounds = []
            for _ in range(2):
                outputs = llm.generate(prompts, sampling)
                assert tokens_of(outputs) == expected
                rounds.append([output.completions[0].statistics.num_rounds for output in outputs])
            llm.check_idle()
        assert (max(rounds[1]) <= FEW) == repeats, "an answer that is kept is drafted as soon as it has begun"
        if not repeats:
            assert rounds[0] == rounds[1], "without a store nothing of a request is known to another"


def test_one_request_is_kept_where_no_more_may_be(target: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in (30, 12)]
    sampling = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3)
    speculation = {**CACHED, "suffix_decoding_max_cached_requests": 1, "draft_len": 4}
    with make_llm(target, speculation=speculation) as llm:

        def rounds(prompt: list[int]) -> int:
            return llm.generate([prompt], sampling)[0].completions[0].statistics.num_rounds

        assert [rounds(prompts[index]) <= FEW for index in (0, 1, 0, 0, 1)] == [False, False, False, True, False]


@pytest.mark.parametrize(("plans_ahead", "max_paths"), [(1, 1), (0, 3)])
def test_lossless_greedy_equals_transformers(target: Path, plans_ahead: int, max_paths: int) -> None:
    check_greedy(target, {**CACHED, "max_paths": max_paths}, plans_ahead)


@pytest.mark.parametrize(("plans_ahead", "max_tokens"), [(1, 100)])
def test_sampled_output_is_the_targets_own_whatever_the_batch_and_who_is_preempted(
    target: Path, plans_ahead: int, max_tokens: int
) -> None:
    check_sampled(target, {**CACHED, "suffix_decoding_max_cached_tokens": max_tokens}, plans_ahead)


def test_what_a_preempted_row_wrote_is_kept_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[list[int]] = []
    add = PastAnswers.add

    def note(self: PastAnswers, token_ids: torch.Tensor, start: int, length: torch.Tensor) -> None:
        added.append(token_ids[start : int(length)].tolist())
        add(self, token_ids, start, length)

    monkeypatch.setattr(PastAnswers, "add", note)
    sections: dict[str, Any] = {
        "scheduler": {**SCHEDULER, "plans_ahead": 0},
        "kv_cache": {"max_tokens": 144, "block_size": 8},
    }
    speculation = {**CACHED, "suffix_decoding_max_tree_depth": 2, "pacing": "measured"}
    with make_llm(target, speculation=speculation, **sections) as llm:
        assert not added, "rows of warm-up rounds are nobody's"
        outputs = llm.generate(repeated_prompts(), SamplingParams(max_tokens=COUNT, **KINDS[1]))
        llm.generate([[1]], SamplingParams(max_tokens=1))  # the next plan drops the last row
        llm.check_idle()
    texts = [list(text) for (text,) in tokens_of(outputs)]
    preempted = sum(output.completions[0].statistics.num_preemptions for output in outputs)
    assert preempted > 0 and len(added) == len(texts) + preempted
    assert sum(map(len, added)) <= sum(map(len, texts)) + 2 * preempted


def test_its_memory_is_counted(target: Path) -> None:
    def planned(**options: object) -> int:
        config = configuration(target, None, speculation={"method": "suffix", **options})
        return JobMemory.read(JobSpec(config)).working_bytes(0)

    bound = {"suffix_decoding_max_cached_tokens": 3_000_000}
    assert planned(**bound, suffix_decoding_max_cached_requests=0) == planned()
    assert planned(**bound, suffix_decoding_max_cached_requests=9) == planned() + 3_000_000 * 136
