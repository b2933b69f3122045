"""Logits of prompts and of tokens: transformers' in float32, and the same bits whatever drafts, chunks, caches and
preemption do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from branching import branching_method
from gpus import needs_gpu
from pipelines import LLM_VOCABULARY, Reference, make_llm, prompt_of

from trtrun import LLM, SamplingParams
from trtrun.api import llm_engine
from trtrun.attention.backend import HostAttention
from trtrun.core.outputs import RequestOutput
from trtrun.engine import verification as prompt_logprobs
from trtrun.errors import InvalidRequestError
from trtrun.rounds.launched_round import VerdictCopy
from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completions import Completion
from trtrun.start import engine_maker

ASKED = SamplingParams(max_tokens=6, return_context_logits=True, return_generation_logits=True, ignore_eos=True)
PLAIN = replace(ASKED, return_context_logits=False, return_generation_logits=False)
PENALIZED = replace(
    ASKED, temperature=0.8, top_k=50, seed=3, repetition_penalty=1.3, presence_penalty=0.5, bad_words=("a",),
    logit_bias={7: 3.0}, max_tokens=12,
)  # fmt: skip
PROMPTS = [prompt_of(length, seed=length, vocab_size=LLM_VOCABULARY) for length in (1, 2, 20, 77, 150)]


def logits_of(output: RequestOutput, completion: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[prompt, vocab] and [tokens, vocab], both of float32."""
    found = output.completions[completion]
    context, generation = output.context_logits, found.generation_logits
    assert output.error is None and context is not None and generation is not None
    assert context.dtype == generation.dtype == np.float32
    assert context.shape[0] == len(output.prompt_token_ids) and generation.shape[0] == len(found.token_ids)
    assert context.shape[1] == generation.shape[1]
    return context, generation


def check(reference: Reference, output: RequestOutput) -> None:
    """The output has what transformers gives its prompt and its tokens."""
    prompt, completion = list(output.prompt_token_ids), output.completions[0]
    context, generation = logits_of(output)
    expected = reference.logits([*prompt, *completion.token_ids]).numpy()
    assert context == pytest.approx(expected[: len(prompt)], abs=1e-4)
    assert generation == pytest.approx(expected[len(prompt) - 1 : -1], abs=1e-4)


def check_same(outputs: Sequence[RequestOutput], others: Sequence[RequestOutput]) -> None:
    """All of them have the same tokens and the same bits."""
    for output, other in zip(outputs, others, strict=True):
        assert output.completions[0].token_ids == other.completions[0].token_ids
        for found, same in zip(logits_of(output), logits_of(other), strict=True):
            assert np.array_equal(found, same)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "target")


def test_they_equal_transformers_beside_rows_without(llm: LLM, reference: Reference) -> None:
    outputs = llm.generate([PROMPTS[3], PROMPTS[2], *PROMPTS], [*[PLAIN] * 2, *[ASKED] * 5])
    for output in outputs[2:]:
        check(reference, output)
    for output in outputs[:2]:
        assert output.context_logits is None and output.completions[0].generation_logits is None
    texts = [output.completions[0].token_ids for output in llm.generate(PROMPTS, PLAIN)]
    assert [output.completions[0].token_ids for output in outputs[2:]] == texts


def test_they_are_before_penalties_and_temperature(llm: LLM, reference: Reference) -> None:
    for output in llm.generate(PROMPTS, PENALIZED):
        check(reference, output)


def test_they_are_the_targets_where_drafts_are_accepted_by_probability(folder: Path, reference: Reference) -> None:
    asked = replace(ASKED, temperature=1.0, seed=4, max_tokens=24)
    with make_llm(folder / "target", folder / "draft", speculation={"use_logits": True}) as llm:
        for output in llm.generate(PROMPTS, asked):
            check(reference, output)
        assert llm.statistics()["num_accepted_draft_tokens"] > 0


def test_they_are_before_masks_of_guides(llm: LLM, reference: Reference) -> None:
    guided = SamplingParams(**(vars(ASKED) | {"guided": {"regex": "[0-9]{20}"}, "max_tokens": 12}))
    for output in llm.generate(PROMPTS[2:], guided):
        assert output.completions[0].text.isdigit()
        check(reference, output)


def test_a_completion_that_goes_on_has_those_of_its_new_tokens_alone(llm: LLM) -> None:
    whole = llm.generate([PROMPTS[3]], ASKED)[0]
    tokens, engine = whole.completions[0].token_ids, llm.engine
    request_id = engine.add_request(PROMPTS[3], ASKED, generated={0: tokens[:2]})
    deltas = []
    while engine.has_unfinished_requests:
        deltas += engine.step()
    assert {delta.request_id for delta in deltas} == {request_id}
    assert [token for delta in deltas for token in delta.token_ids] == [*tokens[2:]]
    assert all(delta.context_logits is None for delta in deltas)
    found = np.concatenate([delta.generation_logits.array() for delta in deltas if delta.generation_logits is not None])
    assert found == pytest.approx(logits_of(whole)[1][2:], abs=1e-4)


def test_either_comes_without_the_other(llm: LLM) -> None:
    asked = llm.generate([PROMPTS[2]], ASKED)[0]
    context = llm.generate([PROMPTS[2]], replace(ASKED, return_generation_logits=False))[0]
    assert context.completions[0].generation_logits is None and context.context_logits is not None
    generation = llm.generate([PROMPTS[2]], replace(ASKED, return_context_logits=False, prompt_logprobs=1))[0]
    assert generation.context_logits is None and generation.prompt_logprobs is not None
    assert np.array_equal(context.context_logits, logits_of(asked)[0])
    found = generation.completions[0].generation_logits
    assert found is not None and np.array_equal(found, logits_of(asked)[1])


def test_a_cached_prefix_is_computed_again(llm: LLM, reference: Reference) -> None:
    prompt = PROMPTS[4]
    llm.generate([prompt], PLAIN)
    again = llm.generate([prompt], replace(ASKED, return_context_logits=False))[0]
    assert again.completions[0].statistics.num_cached_prompt_tokens > 0, "logits of tokens need no prompt"
    asked = llm.generate([prompt], ASKED)[0]
    assert asked.completions[0].statistics.num_cached_prompt_tokens == 0
    check(reference, asked)


@pytest.mark.parametrize(("at_once", "of_a_round"), [(1, 1), (7, 5), (128, 1000)])
def test_chunks_and_pieces_change_nothing(
    folder: Path, reference: Reference, at_once: int, of_a_round: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MOST_AT_ONCE", at_once)
    monkeypatch.setattr(llm_engine, "_MOST_REPORTED", of_a_round * LLM_VOCABULARY)
    scheduler = {"max_num_tokens": 32, "max_batch_size": 4, "plans_ahead": 1}
    with make_llm(folder / "target", folder / "draft", scheduler=scheduler) as llm:
        for output in llm.generate(PROMPTS, [ASKED, PLAIN, ASKED, ASKED, ASKED]):
            if len(output.prompt_token_ids) != 2:
                check(reference, output)


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "is_reading"),
    [([*[PROMPTS[3]] * 3, PROMPTS[4]], 80, True), ([PROMPTS[2]] * 4, 150, False)],
)
def test_a_row_that_is_preempted_loses_nothing(
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    max_tokens: int,
    is_reading: bool,
) -> None:
    seen: list[tuple[int, bool]] = []
    release = RunningBatch.release

    def watched(self: RunningBatch, running: Completion) -> None:
        if running.finish_reason is None:
            seen.append((running.logits.num_reported if running.logits is not None else -1, running.reports_prompt))
        release(self, running)

    monkeypatch.setattr(RunningBatch, "release", watched)
    settings: dict[str, Any] = {"scheduler": {"max_num_tokens": 20, "max_batch_size": 4, "plans_ahead": 1}}
    with make_llm(folder / "target", folder / "draft", kv_cache={"max_tokens": 544}, **settings) as llm:
        for output in llm.generate(prompts, replace(ASKED, max_tokens=max_tokens)):
            check(reference, output)
    assert any((count > 0 or not is_reading) and reports == is_reading for count, reports in seen), seen


def test_graphs_are_played_with_them(folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are played by running the captured work again; prompts are cut into tiles, as on GPUs."""
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    monkeypatch.setattr(HostAttention, "tile", 64)
    settings: dict[str, Any] = {"scheduler": {"max_num_tokens": 128, "max_batch_size": 4, "plans_ahead": 1}}
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        outputs = llm.generate([*PROMPTS, *PROMPTS], [*[PLAIN] * 5, *[ASKED] * 5])
        for output in outputs[5:]:
            check(reference, output)
        assert [one.completions[0].token_ids for one in outputs[:5]] == [
            one.completions[0].token_ids for one in outputs[5:]
        ]


@pytest.mark.parametrize("asked", [replace(ASKED, max_tokens=24), PENALIZED])
def test_speculation_does_not_change_a_bit_of_them(folder: Path, asked: SamplingParams) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "scheduler": {"max_num_tokens": 40, "max_batch_size": 4}}
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        speculative = llm.generate(PROMPTS, asked)
        assert llm.statistics()["num_accepted_draft_tokens"] > 0
    with make_llm(folder / "target", **settings) as llm:
        check_same(llm.generate(PROMPTS, asked), speculative)


@pytest.mark.parametrize("asked", [[replace(ASKED, max_tokens=24)] * 4, [ASKED, replace(PENALIZED, max_tokens=24)] * 2])
def test_draft_trees_do_not_change_a_bit_of_them(folder: Path, asked: list[SamplingParams]) -> None:
    """Nodes are looked at once where no row has penalties, else path by path."""
    with make_llm(folder / "target", dtype="bfloat16") as llm:
        plain = llm.generate(PROMPTS[1:], asked)
    with branching_method() as method:
        method.texts = [[*output.prompt_token_ids, *output.completions[0].token_ids] for output in plain]
        speculation = {"method": "branching", "draft_len": 4}
        with make_llm(folder / "target", speculation=speculation, dtype="bfloat16") as llm:
            check_same(llm.generate(PROMPTS[1:], asked), plain)
            assert llm.statistics()["num_accepted_draft_tokens"] > 10 and method.num_shared > 3


@needs_gpu
def test_on_a_gpu_they_are_transformers_and_drafts_change_no_bit(folder: Path, reference: Reference) -> None:
    """With the graphs that rounds have there: two rounds are in work, and the second must not write over the logits of
    the first."""
    settings: dict[str, Any] = {
        "devices": (("cuda:0",), ("cuda:0",)),
        "scheduler": {"max_batch_size": 8, "max_num_tokens": 64, "plans_ahead": 1},
    }
    asked = replace(ASKED, max_tokens=40)
    with make_llm(folder / "target", folder / "draft", dtype="float32", **settings) as llm:
        for output in llm.generate(PROMPTS, asked):
            check(reference, output)
    with make_llm(folder / "target", dtype="bfloat16", **settings) as llm:
        plain = llm.generate(PROMPTS, asked)
    with make_llm(folder / "target", folder / "draft", dtype="bfloat16", **settings) as llm:
        check_same(llm.generate(PROMPTS, asked), plain)
        assert llm.statistics()["num_accepted_draft_tokens"] > 0


def test_of_several_completions_the_first_computes_the_prompts(llm: LLM, reference: Reference) -> None:
    output = llm.generate([PROMPTS[3]], replace(ASKED, n=3, temperature=1.0, seed=5))[0]
    check(reference, output)
    first = [logits_of(output, index)[1][0] for index in range(3)]
    assert all(found == pytest.approx(first[0], abs=1e-4) for found in first)
    assert len({completion.token_ids for completion in output.completions}) > 1
    for index in range(3):
        check(reference, replace(output, completions=(output.completions[index],)))


def test_nothing_is_generated_where_nothing_may_be(llm: LLM, reference: Reference) -> None:
    for output in llm.generate(PROMPTS, replace(ASKED, max_tokens=0)):
        context, generation = logits_of(output)
        assert context == pytest.approx(reference.logits(output.prompt_token_ids).numpy(), abs=1e-4)
        assert generation.shape == (0, LLM_VOCABULARY)


def test_rounds_without_rows_that_ask_report_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, int]] = []
    wait = VerdictCopy.wait

    def watched(self: VerdictCopy, *args: Any) -> Any:
        report = wait(self, *args)
        reported.append((len(report.logits), len(report.prompt_logits)))
        return report

    monkeypatch.setattr(VerdictCopy, "wait", watched)
    with make_llm(folder / "target", folder / "draft") as llm:
        llm.generate([PROMPTS[3]] * 3, replace(PLAIN, logprobs=1, prompt_logprobs=1))
        assert reported and set(reported) == {(0, 0)}
        reported.clear()
        llm.generate([PROMPTS[2]] * 3, [replace(PLAIN, max_tokens=30), ASKED, PLAIN])
    assert {rows for rows, _ in reported} == {0, 1} and sum(positions for _, positions in reported) == 20
    assert reported[-1] == (0, 0)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"return_context_logits": 1}, "return_context_logits must be true or false"),
        ({"return_generation_logits": "yes"}, "return_generation_logits must be true or false"),
        ({"max_tokens": 0, "return_generation_logits": True}, "max_tokens must be at least 1, not 0"),
        ({"return_logits": True}, "did you mean 'return_context_logits'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, object], line: str) -> None:
    with pytest.raises(InvalidRequestError, match=line):
        SamplingParams.from_mapping(values)
