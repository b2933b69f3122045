"""The Python API: text as it streams, stop strings, completions, log probabilities, statistics, errors, closing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft, make_tokenizer
from pipelines import Reference, noisy_copy, open_llm, prompt_of, tokens_of

import trtrun
from trtrun import LLM, SamplingParams
from trtrun.errors import CheckpointError, ConfigError, InvalidRequestError, TrtrunError
from trtrun.outputs import StreamChunk

# Bytes and pairs of letters: the random model writes any bytes, among them halves of characters.
VOCAB = 257 + 26


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `draft`, whose tokenizer has all bytes and 26 pairs of letters; token 0 ends a text."""
    folder = tmp_path_factory.mktemp("llm")
    make_checkpoint(folder / "target", seed=1, vocab_size=VOCAB, num_hidden_layers=3, eos_token_id=0)
    make_tokenizer(folder / "target", merges=26)
    noisy_copy(folder / "draft", folder / "target", 0.05)
    return folder


@pytest.fixture(scope="module", params=[0, 1], ids=["plans_ahead=0", "plans_ahead=1"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A speculating LLM."""
    settings: dict[str, Any] = {
        "scheduler": {"max_batch_size": 8, "max_num_tokens": 128, "plans_ahead": request.param},
        "speculation": {"draft_len": 4},
        "kv_cache": {"max_tokens": 2048, "block_size": 8},
    }
    with open_llm(folder / "target", folder / "draft", **settings) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _idle_is_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test all blocks of the shared LLM are free or cached."""
    yield
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").check_idle()


def text_of(llm: LLM, prompt: str | list[int], sampling: SamplingParams) -> str:
    return llm.generate([prompt], sampling)[0].completions[0].text


# Streams.


@pytest.mark.parametrize("seed", range(12))
def test_streamed_text_joins_to_generated_text_and_never_ends_in_half_a_character(llm: LLM, seed: int) -> None:
    # Bytes of multi-byte characters are made likely, so that many tokens are parts of a character.
    names = {name: index for name, index in llm.tokenizer.vocabulary().items()} if llm.tokenizer else {}
    likely = [names[name] for name in ("Ã", "©", "â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ")]
    sampling = SamplingParams(
        max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True, logit_bias=dict.fromkeys(likely, 4.0)
    )
    expected = llm.generate(["é€😀 text"], sampling)[0].completions[0]
    chunks = list(llm.stream("é€😀 text", sampling))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == expected.finish_reason == "length"
    assert llm.tokenizer is not None
    assert expected.text == llm.tokenizer.decode(expected.token_ids)
    # What is shown never has to be taken back: it begins the text of all tokens, whatever follows.
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert expected.text.startswith(shown)


def test_a_character_in_several_tokens_comes_whole(llm: LLM) -> None:
    assert llm.tokenizer is not None
    pieces = llm.tokenizer.encode("😀")
    assert len(pieces) == 4
    # The four bytes in turn and nothing else: each is forced by banning the others after it.
    for ban in range(4):
        sampling = SamplingParams(
            max_tokens=12,
            logit_bias=dict.fromkeys(pieces, 100.0),
            repetition_penalty=1.0,
            frequency_penalty=2.0 - ban / 4,
        )
        chunks = list(llm.stream("x", sampling))
        whole = llm.tokenizer.decode([token for chunk in chunks for token in chunk.token_ids])
        assert "".join(chunk.text for chunk in chunks) == whole
        assert all(not chunk.text.endswith("\ufffd") for chunk in chunks[:1])


def test_streams_can_be_read_in_turn(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=25, seed=1)
    prompts = ["first", "the second one", "3"]
    expected = [output.completions[0].text for output in llm.generate(prompts, sampling)]
    streams = [llm.stream(prompt, sampling) for prompt in prompts]
    texts = [""] * len(prompts)
    unfinished = set(range(len(prompts)))
    while unfinished:
        for index in sorted(unfinished):
            chunk = next(streams[index], None)
            if chunk is None:
                unfinished.discard(index)
            else:
                texts[index] += chunk.text
    assert texts == expected


def test_ending_the_iteration_early_cancels_the_request(llm: LLM) -> None:
    llm.reset_statistics()
    stream = llm.stream("a long story", SamplingParams(max_tokens=150, ignore_eos=True))
    chunks = [next(stream) for _ in range(3)]
    stream.close()
    llm.check_idle()
    assert chunks[-1].finish_reason is None
    assert llm.statistics()["num_tokens"] < 40
    for chunk in llm.stream("another", SamplingParams(max_tokens=150, ignore_eos=True)):
        if chunk.token_ids:
            break
    del chunk
    llm.check_idle()


def test_a_stream_that_is_never_read_holds_nothing(llm: LLM) -> None:
    llm.stream("never read", SamplingParams(max_tokens=5))
    llm.check_idle()


def test_one_stream_among_a_batch(llm: LLM) -> None:
    """A stream goes on while generate runs, and its text is whole."""
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = text_of(llm, "alpha", sampling)
    stream = llm.stream("alpha", sampling)
    text = next(stream).text
    llm.generate(["beta", "gamma"], SamplingParams(max_tokens=10))
    assert text + "".join(chunk.text for chunk in stream) == expected


# Stop strings.


@pytest.fixture(scope="module")
def story(folder: Path) -> tuple[str, SamplingParams]:
    """A long text of the target alone, with letters made likely, and how it was made."""
    with open_llm(folder / "target") as plain:
        assert plain.tokenizer is not None
        letters = plain.tokenizer.encode("abcdefghijklmnop ")
        sampling = SamplingParams(
            max_tokens=70, temperature=0.9, seed=5, ignore_eos=True, logit_bias=dict.fromkeys(letters, 7.0)
        )
        return text_of(plain, "once", sampling), sampling


def test_a_stop_string_is_cut_wherever_it_stands(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    """Every piece of the text as a stop string: inside a token, across tokens, across rounds."""
    text, sampling = story
    starts = range(2, min(len(text) - 6, 60), 3)
    stops = [text[start : start + 1 + start % 5] for start in starts]
    outputs = llm.generate(["once"] * len(stops), [replace(sampling, stop=(stop,)) for stop in stops])
    for stop, output in zip(stops, outputs, strict=True):
        completion = output.completions[0]
        assert completion.text == text[: text.index(stop)]
        assert completion.finish_reason == "stop"
        assert llm.tokenizer is not None
        # The tokens are kept up to the one that completed the stop string, and none after it.
        assert stop in llm.tokenizer.decode(completion.token_ids)
        assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])


def test_the_first_of_several_stop_strings_counts(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    text, sampling = story
    late, early = text[30:33], text[12:15]
    expected = min(text.index(late), text.index(early))
    output = text_of(llm, "once", replace(sampling, stop=(late, early, "never written")))
    assert output == text[:expected]


def test_streams_never_show_the_beginning_of_a_stop_string(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    text, sampling = story
    stop = text[20:26]
    shown = ""
    for chunk in llm.stream("once", replace(sampling, stop=(stop,))):
        shown += chunk.text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    text, sampling = story
    stops = (*(text[start : start + 3] + "\n\n\n" for start in range(0, len(text), 2)), text[-2:] + "????")
    assert text_of(llm, "once", replace(sampling, stop=stops)) == text
    assert "".join(chunk.text for chunk in llm.stream("once", replace(sampling, stop=stops))) == text


def test_stop_strings_wait_for_min_tokens(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    text, sampling = story
    letter = max("abcdefghijklmnop", key=text.count)
    assert text.count(letter) > 5
    early = llm.generate(["once"], replace(sampling, stop=(letter,)))[0].completions[0]
    late = llm.generate(["once"], replace(sampling, stop=(letter,), min_tokens=25))[0].completions[0]
    assert len(early.token_ids) < 25 <= len(late.token_ids)
    assert late.finish_reason == "stop"
    assert text.startswith(late.text)
    assert text[len(late.text)] == letter


def test_end_of_sequence_ends_a_text_and_can_be_ignored(llm: LLM) -> None:
    push = {0: 100.0}
    ended = llm.generate(["x"], SamplingParams(max_tokens=9, logit_bias=push))[0].completions[0]
    assert (ended.token_ids, ended.finish_reason, ended.text) == ((0,), "stop", "")
    later = llm.generate(["x"], SamplingParams(max_tokens=9, min_tokens=4, logit_bias=push))[0].completions[0]
    assert len(later.token_ids) == 5
    assert later.token_ids[-1] == 0
    assert 0 not in later.token_ids[:-1]
    ignored = llm.generate(["x"], SamplingParams(max_tokens=9, logit_bias=push, ignore_eos=True))[0].completions[0]
    assert (ignored.token_ids, ignored.finish_reason) == ((0,) * 9, "length")


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


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2}])
def test_logprobs_equal_transformers_at_every_position(llm: LLM, folder: Path, values: dict[str, Any]) -> None:
    """They are of the target's raw distribution, before penalties and temperature."""
    reference = Reference(folder / "target")
    prompts = [prompt_of(length, seed=length, vocab_size=VOCAB) for length in (1, 20, 77)]
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
    prompts: list[Any] = ["", [], [1, VOCAB], [-1], [1.5], [True], "fine", "x", "x", "x" * 300]
    sampling = [good] * 7 + [replace(good, stop_token_ids=(VOCAB,)), replace(good, logit_bias={VOCAB: 1.0}), good]
    outputs = llm.generate(prompts, sampling)
    for index, output in enumerate(outputs):
        if index == 6:
            assert tokens_of([output]) == expected
            continue
        assert output.completions == ()
        assert output.error is not None and "\n" not in output.error, prompts[index]
    assert str(VOCAB - 1) in str(outputs[2].error)
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
    with open_llm(target) as llm:
        assert llm.tokenizer is None
        outputs = llm.generate([[1, 2, 3], "text", [4]], SamplingParams(max_tokens=3))
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "tokenizer" in str(outputs[1].error)
        assert outputs[0].completions[0].text == ""
        assert len(outputs[0].completions[0].token_ids) == 3
        refused = llm.generate([[1]], SamplingParams(stop=("x",)))[0]
        assert "tokenizer" in str(refused.error)
        chunks = list(llm.stream([1, 2, 3], SamplingParams(max_tokens=3)))
        assert all(isinstance(chunk, StreamChunk) and chunk.text == "" for chunk in chunks)


def test_a_draft_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    draft = make_draft(tmp_path / "draft", folder / "target", 1)
    make_tokenizer(draft, merges=25)
    with pytest.raises(CheckpointError, match="tokenizer"):
        open_llm(folder / "target", draft)


def test_wrong_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    attempts: list[tuple[dict[str, Any], type[TrtrunError]]] = [
        ({"target": tmp_path / "nothing"}, ConfigError),
        ({"target": folder / "target", "draft": tmp_path / "nothing"}, ConfigError),
        ({"target": folder}, CheckpointError),
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


def test_the_package_offers_what_the_readme_says() -> None:
    assert {"LLM", "SamplingParams"} <= set(trtrun.__all__)
