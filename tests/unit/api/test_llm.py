"""The Python API: completions, log probabilities, statistics, errors, closing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft, make_tokenizer
from pipelines import LLM_VOCABULARY, Reference, configuration, make_llm, prompt_of, text_of, tokens_of

import trtrun
from trtrun import LLM, SamplingParams
from trtrun.core.outputs import CompletionDelta
from trtrun.errors import CheckpointError, ConfigError, InvalidRequestError, TrtrunError

# Completions, seeds, log probabilities.


def test_completions_differ_and_come_again_with_the_seed(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, n=4, seed=9)
    first, again = llm.generate(["abc", "abc"], sampling)
    assert [completion.index for completion in first.completions] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in first.completions}) == 4
    assert tokens_of([first]) == tokens_of([again])
    other = llm.generate(["abc"], replace(sampling, seed=1009))[0]
    assert not {completion.token_ids for completion in other.completions} & {
        completion.token_ids for completion in first.completions
    }
    unseeded = [llm.generate(["abc"], replace(sampling, seed=None, n=1))[0] for _ in range(3)]
    assert len({output.completions[0].token_ids for output in unseeded}) == 3
    greedy = llm.generate(["abc"], SamplingParams(max_tokens=10, n=3))[0]
    assert len({completion.token_ids for completion in greedy.completions}) == 1


def test_a_configuration_may_be_a_files_path(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"target: {{model: {folder / 'target'}, devices: ['cpu:0']}}\nspeculation: {{method: none}}\n")
    with LLM(config=path) as llm, trtrun.open_llm(str(path)) as other:
        assert other is not None and llm.config == other.config
        assert tokens_of(llm.generate(["abc"])) == tokens_of(other.generate(["abc"]))
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        LLM(config=str(tmp_path / "none.yaml"))
    wrong: Any = {"target": {"model": folder / "target"}}
    with pytest.raises(ConfigError, match="must be a RuntimeConfig or a YAML file's path, not a mapping"):
        LLM(config=wrong)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2}])
def test_logprobs_equal_transformers_at_every_position(llm: LLM, folder: Path, values: dict[str, Any]) -> None:
    """They are of the target's raw distribution, before penalties and temperature."""
    reference = Reference(folder / "target")
    prompts = [prompt_of(length, seed=length, vocab_size=LLM_VOCABULARY) for length in (1, 20, 77)]
    sampling = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, logprobs=5, **values)
    llm.reset_statistics()
    outputs = llm.generate(
        [*prompts, prompts[1], prompts[2]],
        [sampling] * 3 + [replace(sampling, logprobs=None), replace(sampling, logprobs=0)],
    )
    assert llm.statistics()["num_accepted_draft_tokens"] > 10
    for prompt, output in zip(prompts, outputs[:3], strict=True):
        completion = output.completions[0]
        logprobs = torch.log_softmax(reference.logits([*prompt, *completion.token_ids]), dim=-1)[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
        for entry, expected in zip(completion.logprobs, logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
            best = expected.topk(5)
            assert [token for token, _ in entry.alternatives] == best.indices.tolist()
            assert [value for _, value in entry.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert outputs[3].completions[0].logprobs is None
    assert outputs[3].completions[0].token_ids == outputs[1].completions[0].token_ids
    chosen_only = outputs[4].completions[0].logprobs
    assert chosen_only is not None
    assert all(list(entry.alternatives) == [] for entry in chosen_only)


# Order, statistics.


def test_on_finish_is_called_in_order_of_completion(llm: LLM) -> None:
    lengths = [30, 3, 17, 1, 40, 9]
    finished: list[int] = []
    outputs = llm.generate(
        ["abc", "bc", "c", "d", "ef", "ghi"],
        [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths],
        on_finish=lambda output: finished.append(output.index),
    )
    assert [output.index for output in outputs] == list(range(6))
    assert [len(output.completions[0].token_ids) for output in outputs] == lengths
    assert sorted(finished) == list(range(6))
    assert finished[0] == 3
    assert finished.index(1) < finished.index(0)
    times = [outputs[index].completions[0].statistics.finished or 0.0 for index in finished]
    assert times == sorted(times)


def test_an_error_in_on_finish_cancels_the_others_and_leaves_the_engines_usable(llm: LLM) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the caller's own")

    expected = text_of(llm, "abc", SamplingParams(max_tokens=12))
    with pytest.raises(RuntimeError, match="the caller's own"):
        llm.generate(
            ["abc", "b", "c"], [SamplingParams(max_tokens=length, ignore_eos=True) for length in (60, 2, 60)], fail
        )
    llm.check_idle()
    assert text_of(llm, "abc", SamplingParams(max_tokens=12)) == expected
    with pytest.raises(RuntimeError, match="the caller's own"):
        llm.generate(["abc", "b"], [SamplingParams(max_tokens=length, ignore_eos=True) for length in (60, 2)], fail)
    llm.set_speculation(False)
    assert text_of(llm, "abc", SamplingParams(max_tokens=12)) == expected
    llm.set_speculation(True)


def test_statistics_add_up(llm: LLM) -> None:
    llm.reset_statistics()
    sampling = [
        SamplingParams(max_tokens=5 + 6 * index, ignore_eos=True, temperature=0.5 * (index % 2), seed=index)
        for index in range(6)
    ]
    outputs = llm.generate(["one", "two", "three", "four", "five", "six"], sampling)
    total = llm.statistics()
    rows = [output.completions[0] for output in outputs]
    for row in rows:
        item = row.statistics
        assert sum(item.acceptance_histogram) == item.num_rounds
        assert sum(place * count for place, count in enumerate(item.acceptance_histogram)) == (
            item.num_accepted_draft_tokens
        )
        assert item.mean_acceptance_length == pytest.approx(1 + item.num_accepted_draft_tokens / item.num_rounds)
        assert item.num_accepted_draft_tokens <= item.num_draft_tokens
        # One token comes from the prompt; each round gives one more than it accepted. A plan sent ahead may give more
        # than max_tokens, and what is too much is cut.
        gained = 1 + item.num_rounds + item.num_accepted_draft_tokens
        assert 0 <= gained - len(row.token_ids) <= 5 * llm.config.scheduler.plans_ahead
        assert item.first_token is not None and item.finished is not None
        assert item.arrival <= item.first_token <= item.finished
    assert total["num_tokens"] == sum(len(row.token_ids) for row in rows)
    assert total["num_draft_tokens"] == sum(row.statistics.num_draft_tokens for row in rows)
    assert total["num_accepted_draft_tokens"] == sum(row.statistics.num_accepted_draft_tokens for row in rows)
    row_rounds = sum(row.statistics.num_rounds for row in rows)
    assert sum(total["acceptance_histogram"]) == row_rounds
    assert total["mean_acceptance_length"] == pytest.approx(
        1 + total["num_accepted_draft_tokens"] / row_rounds, abs=1e-3
    )
    assert max(row.statistics.num_rounds for row in rows) < total["num_rounds"] <= row_rounds + len(rows) + 2
    assert all(total[name] > 0 for name in ("drafting_s", "verifying_s", "committing_s", "orchestrating_s"))
    llm.reset_statistics()
    assert llm.statistics()["num_rounds"] == 0
    assert llm.statistics()["acceptance_histogram"] == []


# Errors.


def test_wrong_requests_are_refused_alone(llm: LLM) -> None:
    good = SamplingParams(max_tokens=4)
    expected = tokens_of(llm.generate(["fine"], good))
    prompts: list[Any] = ["", [], [1, LLM_VOCABULARY], [-1], [1.5], [True], "fine", "x", "x", "x" * 300]
    sampling = [good] * 7 + [
        replace(good, stop_token_ids=(LLM_VOCABULARY,)),
        replace(good, logit_bias={LLM_VOCABULARY: 1.0}),
        good,
    ]
    outputs = llm.generate(prompts, sampling)
    for index, output in enumerate(outputs):
        if index == 6:
            assert tokens_of([output]) == expected
            continue
        assert output.completions == ()
        assert output.error is not None and "\n" not in output.error, prompts[index]
    assert str(LLM_VOCABULARY - 1) in str(outputs[2].error)
    assert "300" in str(outputs[9].error) and "256" in str(outputs[9].error)


def test_wrong_calls_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"2 prompts .* 3 sampling"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(InvalidRequestError, match="n to 1"):
        next(iter(llm.stream("a", SamplingParams(n=2))))
    with pytest.raises(InvalidRequestError, match="empty"):
        next(iter(llm.stream([])))
    assert llm.generate([]) == []


def test_no_sampling_parameters_mean_greedy(llm: LLM) -> None:
    assert tokens_of(llm.generate(["abc"])) == tokens_of(llm.generate(["abc"], SamplingParams()))


def test_without_a_tokenizer_token_ids_are_all_there_is(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=1)
    with make_llm(target) as llm:
        assert llm.tokenizer is None
        outputs = llm.generate([[1, 2, 3], "text", [4]], SamplingParams(max_tokens=3))
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "tokenizer" in str(outputs[1].error)
        assert outputs[0].completions[0].text == ""
        assert len(outputs[0].completions[0].token_ids) == 3
        refused = llm.generate([[1]], SamplingParams(stop=("x",)))[0]
        assert "tokenizer" in str(refused.error)
        chunks = list(llm.stream([1, 2, 3], SamplingParams(max_tokens=3)))
        assert all(isinstance(chunk, CompletionDelta) and chunk.text == "" for chunk in chunks)


def test_a_draft_with_another_tokenizer_is_refused_where_it_must_have_the_same(folder: Path, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "draft", folder / "target", 1)
    make_tokenizer(draft, merges=25)
    config = configuration(folder / "target", draft)
    assert config.draft is not None and config.draft.vocabulary == "intersection"
    same = config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": "same"})})
    with pytest.raises(CheckpointError, match="different tokenizers"):
        LLM(config=same)


def test_wrong_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    attempts: list[tuple[dict[str, Any], type[TrtrunError]]] = [
        ({"target": tmp_path / "nothing"}, ConfigError),
        ({"target": folder / "target", "draft": tmp_path / "nothing"}, ConfigError),
        ({"target": folder}, CheckpointError),
        ({"target": folder / "target", "device": "cuda:97"}, ConfigError),
        ({"target": folder / "target", "device": "gpu"}, ConfigError),
        ({}, TrtrunError),
    ]
    for arguments, kind in attempts:
        with pytest.raises(kind) as caught:
            LLM(**arguments)
        assert "\n" not in str(caught.value)


# Life.


def test_the_context_manager_closes_and_closing_twice_is_fine(folder: Path) -> None:
    with LLM(target=folder / "target", draft=folder / "draft", draft_len=2) as llm:
        assert llm.generate(["abc"], SamplingParams(max_tokens=3))[0].error is None
    llm.close()
    llm.close()
    with pytest.raises(TrtrunError, match="closed"):
        llm.generate(["abc"], SamplingParams(max_tokens=3))
    with pytest.raises(TrtrunError, match="closed"):
        next(iter(llm.stream("abc")))


def test_two_llms_live_in_one_process(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=16)
    with LLM(target=folder / "target") as plain, LLM(target=folder / "target", draft=folder / "draft") as speculative:
        streams = [plain.stream("abcdef", sampling), speculative.stream("abcdef", sampling)]
        first = [next(stream).token_ids for stream in streams]
        rest = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert list(first[0]) + rest[0] == list(first[1]) + rest[1]


def test_the_report_says_what_was_read(folder: Path) -> None:
    done: list[tuple[int, int]] = []
    with LLM(
        target=folder / "target",
        draft=folder / "draft",
        on_load_progress=lambda read, total: done.append((read, total)),
    ) as llm:
        (report,) = llm.report.ranks
    sizes = sum((folder / name / "model.safetensors").stat().st_size for name in ("target", "draft"))
    assert 0.95 * sizes < report.bytes_read <= sizes
    assert report.role == "orchestrator+draft+target"
    assert report.kv_tokens > 0 and report.kv_bytes > 0
    assert done[-1][0] == done[-1][1] == report.bytes_read
    assert [read for read, _ in done] == sorted(read for read, _ in done)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_loading_ends_at_the_bytes_that_are_held_whatever_the_files_hold(folder: Path, quantization: str) -> None:
    """The files are float32: neither bfloat16 nor int8 holds what is read."""
    done: list[tuple[int, int]] = []
    with LLM(
        target=folder / "target",
        draft=folder / "draft",
        dtype="bfloat16",
        draft_quantization=quantization,
        on_load_progress=lambda ready, total: done.append((ready, total)),
    ) as llm:
        (report,) = llm.report.ranks
    sizes = {name: (folder / name / "model.safetensors").stat().st_size for name in ("target", "draft")}
    held = sizes["target"] / 2 + sizes["draft"] / 2
    assert report.bytes_read > 1.9 * held
    if quantization == "none":
        assert 0.95 * held < report.shard_bytes <= held
    else:
        assert 0.5 * sizes["target"] < report.shard_bytes < 0.5 * sizes["target"] + 0.45 * sizes["draft"]
    assert done[-1] == (report.shard_bytes, report.shard_bytes)
    assert [ready for ready, _ in done] == sorted(ready for ready, _ in done)


def test_the_package_offers_what_the_readme_says() -> None:
    assert {"LLM", "SamplingParams"} <= set(trtrun.__all__)
