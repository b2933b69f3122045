"""In-flight batching end to end: who shares the batch, is cancelled, preempted, refused or reuses blocks changes
nothing for the others, and when all is done no block is held."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of

from trtrun import SamplingParams
from trtrun.core.outputs import RequestId

# Rounds of 64 tokens: the longest of the prompts needs three of them to itself.
SCHEDULER = {"max_batch_size": 8, "max_num_tokens": 64}
LENGTHS = [1, 2, 3, 150, 8, 16, 17, 70, 31, 5, 64, 110, 9, 47, 1, 100, 12, 24, 25, 33, 7, 66, 2, 90, 15, 40, 4, 55, 81,
           6, 20, 130]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it about half of the time."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(folder / "target", seed=1, num_hidden_layers=3)
    return target, noisy_copy(folder / "draft", target, 0.05)


def mixed_sampling(count: int) -> list[SamplingParams]:
    """Greedy and sampled rows of many kinds, 1 to 40 tokens long."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.2, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.5},
        {"min_tokens": 1, "stop_token_ids": (3, 11, 19, 54)},
        {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 0.4, "logprobs": 2},
    ]
    return [
        SamplingParams(max_tokens=1 + 11 * index % 40, seed=index, **kinds[index % len(kinds)])
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> list[list[tuple[int, ...]]]:
    """What each of the 32 mixed prompts gives with the target and the batch to itself, and no block reused."""
    with make_llm(pair[0], kv_cache={"enable_block_reuse": False}) as llm:
        return run_alone(llm, mixed_prompts(), mixed_sampling(len(LENGTHS)))


def mixed_prompts() -> list[list[int]]:
    return [prompt_of(length, seed=index) for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(("plans_ahead", "max_tokens"), [(0, 200), (1, 8192)])
def test_32_mixed_prompts_together_give_what_each_gives_alone(
    pair: tuple[Path, Path], alone: list[list[tuple[int, ...]]], plans_ahead: int, max_tokens: int
) -> None:
    """With 200 tokens of KV the longest leaves hardly any room for the others."""
    with make_llm(
        *pair,
        scheduler={**SCHEDULER, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": max_tokens, "block_size": 8},
        speculation={"draft_len": 3},
    ) as llm:
        outputs = llm.generate(mixed_prompts(), mixed_sampling(len(LENGTHS)))
        llm.check_idle()
    assert tokens_of(outputs) == alone
    statistics = [output.completions[0].statistics for output in outputs]
    assert sum(item.num_accepted_draft_tokens for item in statistics) > 30
    reasons = {output.completions[0].finish_reason for output in outputs}
    assert reasons == {"stop", "length"}


CROWD = 12
CROWD_PROMPTS = [prompt_of(4 + 3 * index, seed=index) for index in range(CROWD)]
CROWD_SAMPLING = [replace(parameters, max_tokens=48) for parameters in mixed_sampling(CROWD)]


@pytest.fixture(scope="module")
def undisturbed(pair: tuple[Path, Path]) -> list[list[tuple[int, ...]]]:
    """What each row of the crowd gives with the target and the batch to itself."""
    with make_llm(pair[0], kv_cache={"enable_block_reuse": False}) as llm:
        return run_alone(llm, CROWD_PROMPTS, CROWD_SAMPLING)


@pytest.mark.parametrize(
    ("plans_ahead", "draft_len", "reuse"),
    [
        # Each pair of settings meets here.
        (0, 1, False),
        (0, 4, True),
        (1, 1, True),
        (1, 4, False),
    ],
)
def test_preempted_rows_give_what_they_give_undisturbed(
    pair: tuple[Path, Path], undisturbed: list[list[tuple[int, ...]]], plans_ahead: int, draft_len: int, reuse: bool
) -> None:
    with make_llm(
        *pair,
        scheduler={**SCHEDULER, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": 200, "block_size": 8, "enable_block_reuse": reuse},
        speculation={"draft_len": draft_len},
    ) as llm:
        outputs = llm.generate(CROWD_PROMPTS, CROWD_SAMPLING)
        llm.check_idle()
    assert tokens_of(outputs) == undisturbed
    statistics = [output.completions[0].statistics for output in outputs]
    assert sum(item.num_preemptions for item in statistics) >= 5
    # A row that asked for logprobs has one entry a token, those before its preemption included.
    for output, parameters in zip(outputs, CROWD_SAMPLING, strict=True):
        completion = output.completions[0]
        if parameters.logprobs is not None:
            assert completion.logprobs is not None
            assert tuple(entry.token_id for entry in completion.logprobs) == completion.token_ids


@pytest.mark.parametrize(
    ("plans_ahead", "max_tokens", "seed"),
    [
        (0, 8192, 0),
        (1, 8192, 1),
        (1, 200, 2),
    ],
)
def test_cancelling_midway_leaves_the_others_as_they_were(
    pair: tuple[Path, Path], alone: list[list[tuple[int, ...]]], plans_ahead: int, max_tokens: int, seed: int
) -> None:
    """Rows that wait, prefill, decode or have a plan out are cancelled, one every second round."""
    chooser = random.Random(seed)
    sampling = mixed_sampling(len(LENGTHS))
    with make_llm(
        *pair,
        scheduler={**SCHEDULER, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": max_tokens, "block_size": 8},
        speculation={"draft_len": 3},
    ) as llm:
        engine = llm.engine
        ids = [
            engine.add_request(prompt, parameters) for prompt, parameters in zip(mixed_prompts(), sampling, strict=True)
        ]
        gained: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
        victims = chooser.sample(range(len(LENGTHS)), 12)
        cancelled = []
        while engine.has_work:
            for delta in engine.step():
                gained[delta.request_id] += delta.token_ids
            if victims and chooser.random() < 0.5:
                victim = victims.pop()
                tokens = list(gained[ids[victim]])
                if engine.abort_request(ids[victim]):
                    assert not engine.abort_request(ids[victim])
                    cancelled.append((victim, tokens))
        llm.check_idle()
        # A cancelled row gains nothing afterwards, not even from the plan that was out.
        for victim, tokens in cancelled:
            assert gained[ids[victim]] == tokens
            assert tuple(tokens) == alone[victim][0][: len(tokens)]
        untouched = sorted(set(range(len(LENGTHS))) - {victim for victim, _ in cancelled})
        assert [tuple(gained[ids[index]]) for index in untouched] == [alone[index][0] for index in untouched]
        assert len(cancelled) >= 3
        # The engines are as good as before.
        again = llm.generate(mixed_prompts()[:6], sampling[:6])
        assert tokens_of(again) == alone[:6]
        llm.check_idle()


def test_a_cancelled_prompt_can_be_asked_again_at_once(pair: tuple[Path, Path]) -> None:
    """Its blocks, some of them cached, are reused while others run."""
    prompt, sampling = prompt_of(70, seed=3), SamplingParams(max_tokens=30, seed=0)
    with make_llm(*pair, scheduler=SCHEDULER, kv_cache={"block_size": 8}) as llm:
        expected = tokens_of(llm.generate([prompt], sampling))[0][0]
    with make_llm(*pair, scheduler={**SCHEDULER, "plans_ahead": 1}, kv_cache={"block_size": 8}) as llm:
        for rounds in range(1, 9):
            request_id, _ = [llm.engine.add_request(tokens, sampling) for tokens in (prompt, prompt_of(20, seed=4))]
            for _ in range(rounds):
                llm.engine.step()
            assert llm.engine.abort_request(request_id)
            assert tokens_of(llm.generate([prompt], sampling))[0][0] == expected
            assert not llm.engine.has_work
            llm.check_idle()


@pytest.mark.parametrize(("kind", "plans_ahead"), [("same", 1), ("noisy", 0)])
def test_prefix_reuse_changes_nothing_in_either_engine(pair: tuple[Path, Path], kind: str, plans_ahead: int) -> None:
    """If the draft's store lacked a reused block, its acceptance would fall; if the target's did, the output."""
    target, draft = pair
    draft = target if kind == "same" else draft
    prefix = prompt_of(61, seed=8)
    prompts = [prefix + prompt_of(1 + 9 * index, seed=index) for index in range(4)]
    sampling = [
        SamplingParams(max_tokens=20, seed=index, temperature=0.8 * (index % 2)) for index in range(len(prompts))
    ]
    results = []
    for reuse in (False, True):
        with make_llm(
            target,
            draft,
            scheduler={**SCHEDULER, "plans_ahead": plans_ahead},
            kv_cache={"block_size": 8, "enable_block_reuse": reuse},
        ) as llm:
            # One by one, then together, then whole texts as prompts: their generated blocks are reused, too.
            first = [
                llm.generate([prompt], parameters)[0] for prompt, parameters in zip(prompts, sampling, strict=True)
            ]
            second = llm.generate(prompts, sampling)
            longer = [
                [*output.prompt_token_ids, *output.completions[0].token_ids, *prompt_of(3, seed=9)] for output in second
            ]
            third = llm.generate(longer, sampling)
            llm.check_idle()
        cached = [
            [output.completions[0].statistics.num_cached_prompt_tokens for output in outputs]
            for outputs in (first, second, third)
        ]
        if reuse:
            assert cached[0] == [0] + [56] * 3
            assert min(cached[1]) >= 56
            # All full blocks of prompt and output whose tokens both engines have written.
            assert min(cached[2]) >= len(prompts[0]) + 20 - 8 - 2
        else:
            assert cached == [[0] * 4] * 3
        results.append(
            [
                (output.completions[0].token_ids, output.completions[0].statistics.acceptance_histogram)
                for output in (*first, *second, *third)
            ]
        )
    assert results[0] == results[1]


def test_too_long_prompts_are_refused_alone_with_the_numbers(pair: tuple[Path, Path]) -> None:
    sampling = SamplingParams(max_tokens=12)
    prompts = [prompt_of(length, seed=length) for length in (10, 256, 30, 400, 255, 12)]
    with make_llm(pair[0], kv_cache={"enable_block_reuse": False}) as llm:
        expected = {index: tokens_of(llm.generate([prompts[index]], sampling))[0] for index in (0, 2, 5)}
    with make_llm(*pair, scheduler=SCHEDULER) as llm:  # the target's context is 256 tokens
        finished = []
        outputs = llm.generate(prompts, sampling, on_finish=lambda output: finished.append(output.index))
        llm.check_idle()
        for index, length in ((1, 256), (3, 400)):
            assert outputs[index].completions == ()
            error = outputs[index].error
            assert error is not None and str(length) in error and "256" in error and "\n" not in error
        for index, tokens in expected.items():
            assert [completion.token_ids for completion in outputs[index].completions] == tokens
        # 255 tokens leave room for one.
        assert len(outputs[4].completions[0].token_ids) == 1
        assert outputs[4].completions[0].finish_reason == "length"
        assert sorted(finished) == list(range(6))
    with make_llm(*pair, scheduler=SCHEDULER, kv_cache={"max_tokens": 64, "block_size": 8}) as llm:
        short = [prompts[0], prompt_of(64, seed=1), prompts[2], prompt_of(100, seed=2), prompts[5]]
        outputs = llm.generate(short, sampling)
        llm.check_idle()
        for index, length in ((1, 64), (3, 100)):
            error = outputs[index].error
            assert error is not None and str(length) in error and "64" in error and "\n" not in error
        assert [outputs[index].completions[0].token_ids for index in (0, 2, 4)] == [
            expected[index][0] for index in (0, 2, 5)
        ]


def test_a_request_that_fills_the_whole_store_ends_with_length(pair: tuple[Path, Path]) -> None:
    prompts = [prompt_of(20, seed=1), prompt_of(25, seed=2)]
    with make_llm(pair[0]) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=64))
    for plans_ahead in (0, 1):
        with make_llm(
            *pair,
            scheduler={**SCHEDULER, "plans_ahead": plans_ahead},
            kv_cache={"max_tokens": 64, "block_size": 8},
        ) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=200))
            llm.check_idle()
        for output, full, length in zip(outputs, expected, (20, 25), strict=True):
            tokens = output.completions[0].token_ids
            assert tokens == full.completions[0].token_ids[: 64 - length]
            assert output.completions[0].finish_reason == "length"


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_n_completions_share_their_prompt_and_equal_those_asked_for_alone(
    pair: tuple[Path, Path], plans_ahead: int
) -> None:
    prompt, sampling = prompt_of(40, seed=6), SamplingParams(max_tokens=20, temperature=1.0, seed=50, n=5)
    with make_llm(*pair, scheduler={**SCHEDULER, "plans_ahead": plans_ahead}, kv_cache={"block_size": 8}) as llm:
        together = tokens_of(llm.generate([prompt], sampling))[0]
        alone = [tokens_of(llm.generate([prompt], replace(sampling, seed=50 + index, n=1)))[0][0] for index in range(5)]
        llm.check_idle()
    assert together == alone
    assert len(set(together)) == 5
