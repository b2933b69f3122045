"""The Python API's text: as it streams, and where stop strings and end of sequence end it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import make_checkpoint, make_tokenizer
from pipelines import make_llm, text_of
from tokenizer_layouts import layout

from trtrun import LLM, SamplingParams
from trtrun.api.prompts import PromptReader
from trtrun.errors import InvalidRequestError

# Streams.


@pytest.mark.parametrize("seed", range(6))
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
        assert whole.count("\U0001f600") == sum(chunk.text.count("\U0001f600") for chunk in chunks)


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
    with make_llm(folder / "target") as plain:
        assert plain.tokenizer is not None
        letters = plain.tokenizer.encode("abcdefghijklmnop ")
        sampling = SamplingParams(
            max_tokens=70, temperature=0.9, seed=5, ignore_eos=True, logit_bias=dict.fromkeys(letters, 7.0)
        )
        return text_of(plain, "once", sampling), sampling


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_a_stop_string_is_cut_wherever_it_stands(llm: LLM, story: tuple[str, SamplingParams], keeps_stop: bool) -> None:
    """Every piece of the text as a stop string: inside a token, across tokens, across rounds."""
    text, sampling = story
    sampling = replace(sampling, include_stop_str_in_output=keeps_stop)
    starts = range(2, min(len(text) - 6, 60), 3)
    stops = [text[start : start + 1 + start % 5] for start in starts]
    outputs = llm.generate(["once"] * len(stops), [replace(sampling, stop=(stop,)) for stop in stops])
    for stop, output in zip(stops, outputs, strict=True):
        completion = output.completions[0]
        assert completion.text == text[: text.index(stop) + (len(stop) if keeps_stop else 0)]
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


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_streams_never_show_the_beginning_of_a_stop_string(
    llm: LLM, story: tuple[str, SamplingParams], keeps_stop: bool
) -> None:
    text, sampling = story
    stop = text[20:26]
    shown, end = "", text.index(stop) + (len(stop) if keeps_stop else 0)
    for chunk in llm.stream("once", replace(sampling, stop=(stop,), include_stop_str_in_output=keeps_stop)):
        shown += chunk.text
        assert text[:end].startswith(shown)
    assert shown == text[:end]


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end(llm: LLM, story: tuple[str, SamplingParams]) -> None:
    text, sampling = story
    stops = (*(text[start : start + 3] + "\n\n\n" for start in range(0, len(text), 2)), text[-2:] + "????")
    assert text_of(llm, "once", replace(sampling, stop=stops)) == text
    assert "".join(chunk.text for chunk in llm.stream("once", replace(sampling, stop=stops))) == text


def test_a_stop_string_that_only_the_end_makes_whole_is_cut(llm: LLM) -> None:
    """A half character becomes text when no token follows."""
    assert llm.tokenizer is not None
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, logit_bias={llm.tokenizer.encode("é")[0]: 100.0})
    plain = llm.generate(["x"], sampling)[0].completions[0]
    assert (plain.text, plain.finish_reason) == ("\ufffd", "length")
    for completion in llm.generate(["x"], replace(sampling, stop=("\ufffd",), n=2))[0].completions:
        assert (completion.text, completion.finish_reason) == ("", "stop")
    kept = replace(sampling, stop=("\ufffd",), include_stop_str_in_output=True)
    assert text_of(llm, "x", kept) == "\ufffd"


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


# Other tokenizers than byte-level ones.


@pytest.mark.parametrize("name", ["byte-fallback", "WordPiece", "Metaspace"])
def test_text_is_what_the_tokenizer_makes_of_prompt_and_output(tmp_path: Path, name: str) -> None:
    """Random tokens of a random model, behind prompts that end in bytes; whole, in streams, and up to a stop string."""
    tokenizer = layout(name)
    make_checkpoint(tmp_path, vocab_size=tokenizer.vocab_size + 3, scale=0.2)
    (tmp_path / "tokenizer.json").write_text(tokenizer._backend.to_str(), encoding="utf-8")
    prompts = ["it is", "\u4f60\u597d", "it \U0001f44d\U0001f44d", ""]
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, n=3)
    with make_llm(tmp_path) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
            of_prompt = tokenizer.decode(output.prompt_token_ids)
            for completion in output.completions:
                of_all = tokenizer.decode([*output.prompt_token_ids, *completion.token_ids])
                if of_all.startswith(of_prompt):
                    assert completion.text == of_all[len(of_prompt) :]
                else:
                    assert of_all.endswith(completion.text)
            text = output.completions[0].text
            alone = replace(sampling, n=1)
            assert "".join(chunk.text for chunk in llm.stream(prompt, alone)) == text
            stop = text[len(text) // 2 :][:3]
            stopped = llm.generate([prompt], replace(alone, stop=(stop,)))[0].completions[0]
            assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


# Special tokens.


def test_special_tokens_are_in_a_text_where_they_are_asked_for(tmp_path: Path) -> None:
    names = ("<mark>", "<|end|>")
    make_checkpoint(tmp_path, seed=1, vocab_size=257 + len(names), eos_token_id=[0, 2])
    make_tokenizer(tmp_path, special=names)
    with make_llm(tmp_path) as llm:
        assert llm.tokenizer is not None
        letter = llm.tokenizer.encode("a")[0]
        likely = {1: 100.0, letter: 100.0, 2: 100.0}
        sampling = SamplingParams(max_tokens=40, temperature=5.0, seed=3, logit_bias=likely, ignore_eos=True)
        found = llm.generate(["x"], replace(sampling, skip_special_tokens=False))[0].completions[0]
        skipped = llm.generate(["x"], sampling)[0].completions[0]
        assert found.token_ids == skipped.token_ids and {1, 2} <= set(found.token_ids)
        # Those that end a text are never in it.
        shown = [token for token in found.token_ids if token not in (0, 2)]
        assert found.text == llm.tokenizer.decode(shown, skip_special_tokens=False)
        assert skipped.text == llm.tokenizer.decode(shown) == found.text.replace("<mark>", "")
        chunks = list(llm.stream("x", replace(sampling, skip_special_tokens=False, stop=("<mark>",))))
        assert "".join(chunk.text for chunk in chunks) == found.text.partition("<mark>")[0]
        assert chunks[-1].finish_reason == "stop"


def test_a_mark_that_the_tokenizer_cannot_write_bounds_no_thoughts() -> None:
    reader = PromptReader(SimpleNamespace(vocab_size=300, eos_token_ids=(0,)), layout("WordPiece"))
    with pytest.raises(InvalidRequestError, match=r'thinking_marks: this .* cannot write "</think>"'):
        reader.check(SamplingParams(thinking_token_budget=5))
    reader.check(SamplingParams())
    with pytest.raises(InvalidRequestError, match="thinking_token_budget needs a tokenizer"):
        PromptReader(SimpleNamespace(vocab_size=300, eos_token_ids=(0,)), None).check(
            SamplingParams(thinking_token_budget=5)
        )
