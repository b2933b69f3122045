"""Log probabilities of prompts: transformers' in float32, whatever chunks, caches, preemption and speculation do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import needs_gpu
from pipelines import LLM_VOCABULARY, Reference, make_llm, prompt_of

from trtrun import LLM, SamplingParams
from trtrun.attention.backend import HostAttention
from trtrun.core.outputs import RequestOutput
from trtrun.engine import verification as prompt_logprobs
from trtrun.errors import InvalidRequestError
from trtrun.scheduling.batch import RunningBatch
from trtrun.scheduling.completions import Completion
from trtrun.start import engine_maker

SCORED = SamplingParams(max_tokens=6, prompt_logprobs=4, ignore_eos=True)
PROMPTS = [prompt_of(length, seed=length, vocab_size=LLM_VOCABULARY) for length in (1, 2, 20, 77, 150)]


def check(reference: Reference, output: RequestOutput, alternatives: int = 4) -> None:
    """The output's prompt has what transformers gives it."""
    assert output.error is None and output.prompt_logprobs is not None
    tokens, (first, *entries) = list(output.prompt_token_ids), output.prompt_logprobs
    expected = torch.log_softmax(reference.logits(tokens), dim=-1)
    assert first is None and len(entries) == len(tokens) - 1
    for token, entry, row in zip(tokens[1:], entries, expected, strict=False):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(alternatives) if alternatives else row[:0].sort()
        assert [value for _, value in entry.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(float(row[other]) == pytest.approx(value, abs=1e-4) for other, value in entry.alternatives)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "target")


def test_they_equal_transformers_beside_other_rows(llm: LLM, reference: Reference) -> None:
    plain = [replace(SCORED, prompt_logprobs=None, max_tokens=30)] * 2
    counts = [4, 4, 0, 20, 4]
    scored = [replace(SCORED, prompt_logprobs=count) for count in counts]
    outputs = llm.generate([PROMPTS[3], PROMPTS[2], *PROMPTS], [*plain, *scored])
    for count, output in zip(counts, outputs[2:], strict=True):
        check(reference, output, count)
    assert [output.prompt_logprobs for output in outputs[:2]] == [None, None]
    texts = [output.completions[0].token_ids for output in llm.generate(PROMPTS, plain[:1] * 5)]
    assert [output.completions[0].token_ids for output in outputs[2:]] == [text[:6] for text in texts]


def test_a_cached_prefix_is_computed_again(llm: LLM, reference: Reference) -> None:
    prompt = PROMPTS[4]
    plain = replace(SCORED, prompt_logprobs=None)
    llm.generate([prompt], plain)
    again = llm.generate([prompt], plain)[0]
    assert again.completions[0].statistics.num_cached_prompt_tokens > 0
    scored = llm.generate([prompt], SCORED)[0]
    assert scored.completions[0].statistics.num_cached_prompt_tokens == 0
    check(reference, scored)


@needs_gpu
def test_on_a_gpu_they_are_transformers_and_drafts_change_no_bit(folder: Path, reference: Reference) -> None:
    """Transformers' in float32; the same bits in bfloat16, whose products do not depend on shapes there."""
    settings: dict[str, Any] = {
        "devices": (("cuda:0",), ("cuda:0",)), "scheduler": {"max_num_tokens": 64, "max_batch_size": 4},
    }  # fmt: skip
    with make_llm(folder / "target", dtype="float32", **settings) as llm:
        for output in llm.generate(PROMPTS, SCORED):
            check(reference, output)
    found = []
    for draft in (None, folder / "draft"):
        with make_llm(folder / "target", draft, dtype="bfloat16", **settings) as llm:
            found.append([output.prompt_logprobs for output in llm.generate(PROMPTS, SCORED)])
    assert found[0] == found[1]


@pytest.mark.parametrize("at_once", [1, 7, 128])
def test_chunks_and_pieces_change_nothing(
    folder: Path, reference: Reference, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "_MOST_AT_ONCE", at_once)
    scheduler = {"max_num_tokens": 32, "max_batch_size": 4, "plans_ahead": 1}
    with make_llm(folder / "target", folder / "draft", scheduler=scheduler) as llm:
        for output in llm.generate(PROMPTS, SCORED):
            check(reference, output)


def test_a_prompt_that_is_preempted_while_it_is_read_loses_nothing(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    release = RunningBatch.release

    def watched(self: RunningBatch, running: Completion) -> None:
        if running.finish_reason is None and running.scores is not None:
            seen.append((running.scores.num_scored, running.scores.is_whole))
        release(self, running)

    monkeypatch.setattr(RunningBatch, "release", watched)
    settings: dict[str, Any] = {"scheduler": {"max_num_tokens": 20, "max_batch_size": 4, "plans_ahead": 1}}
    with make_llm(folder / "target", folder / "draft", kv_cache={"max_tokens": 544}, **settings) as llm:
        prompts = [*[PROMPTS[3]] * 3, PROMPTS[4]]
        for output in llm.generate(prompts, replace(SCORED, max_tokens=80)):
            check(reference, output)
    assert any(count > 0 and not is_whole for count, is_whole in seen), seen


def test_graphs_of_last_positions_are_passed_by(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are played by running the captured work again; prompts are cut into tiles, as on GPUs."""
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    monkeypatch.setattr(HostAttention, "tile", 64)
    settings: dict[str, Any] = {"scheduler": {"max_num_tokens": 128, "max_batch_size": 4}}
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        plain = replace(SCORED, prompt_logprobs=None)
        outputs = llm.generate([*PROMPTS, *PROMPTS], [*[plain] * 5, *[SCORED] * 5])
        for output in outputs[5:]:
            check(reference, output)
        assert [one.completions[0].token_ids for one in outputs[:5]] == [
            one.completions[0].token_ids for one in outputs[5:]
        ]


def entries_of(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [output.prompt_logprobs for output in outputs]


def test_speculation_does_not_change_a_bit_of_them(folder: Path) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16", "scheduler": {"max_num_tokens": 40, "max_batch_size": 4}}
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        speculative = llm.generate(PROMPTS, SCORED)
        assert llm.statistics()["num_draft_tokens"] > 0
    with make_llm(folder / "target", **settings) as llm:
        assert entries_of(llm.generate(PROMPTS, SCORED)) == entries_of(speculative)


def test_of_several_completions_the_first_computes_them(llm: LLM, reference: Reference) -> None:
    output = llm.generate([PROMPTS[3]], replace(SCORED, n=3, temperature=1.0, seed=5))[0]
    check(reference, output)
    assert len(output.completions) == 3


def test_nothing_is_generated_where_nothing_may_be(llm: LLM, reference: Reference) -> None:
    for n in (1, 2):
        outputs = llm.generate(PROMPTS, replace(SCORED, max_tokens=0, n=n))
        for output in outputs:
            check(reference, output)
            assert [(one.token_ids, one.text, one.finish_reason) for one in output.completions] == [
                ((), "", "length")
            ] * n


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20, not 21"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens must be at least 0, not -1"),
        ({"prompt_logprob": 1}, "did you mean 'prompt_logprobs'"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, object], line: str) -> None:
    with pytest.raises(InvalidRequestError, match=line):
        SamplingParams.from_mapping(values)
