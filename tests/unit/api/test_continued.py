"""A completion that goes on where another engine left it: the tokens, texts and ends of one that was never cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pipelines import prompt_of

from trtrun import LLM, SamplingParams
from trtrun.api.prompts import Prompt
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, PromptLogprobs, RequestId
from trtrun.errors import InvalidRequestError
from trtrun.tokens.detokenizer import AhoCorasick, CompletionText, IncrementalDetokenizer

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
RECORD: Any = {"regex": "[a-z]{4,9}(-[0-9]{2,4}){2,3}"}
THOUGHTS = ("", "</think>")
END, EASY = {0: 60.0}, {0: 4.0}
CASES = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "seed": SamplingParams(max_tokens=24, temperature=0.9, seed=5, top_k=40, ignore_eos=True),
    "penalties": SamplingParams(max_tokens=24, temperature=0.8, seed=6, ignore_eos=True, **PENALTIES),
    "greedy penalties": SamplingParams(max_tokens=24, ignore_eos=True, **PENALTIES),
    "logprobs": SamplingParams(max_tokens=16, temperature=1.0, seed=8, logprobs=3, ignore_eos=True),
    "min_tokens": SamplingParams(max_tokens=24, min_tokens=12, logit_bias=END),
    "end of sequence": SamplingParams(max_tokens=24, temperature=1.0, seed=2, logit_bias=EASY),
    "guided": SamplingParams(max_tokens=24, temperature=1.0, seed=4, guided=RECORD),
    "thinking": SamplingParams(
        max_tokens=28, temperature=1.0, seed=9, thinking_token_budget=7, thinking_marks=THOUGHTS, ignore_eos=True
    ),
    "bad words": SamplingParams(max_tokens=24, temperature=1.1, seed=3, bad_words=("e", "ab"), ignore_eos=True),
}


def run(
    llm: LLM, prompt: Prompt, sampling: SamplingParams, generated: Mapping[int, tuple[int, ...]] | None = None
) -> dict[int, list[CompletionDelta]]:
    """The deltas of one request, by completion."""
    llm.engine.add_request(prompt, sampling, generated=generated)
    found: dict[int, list[CompletionDelta]] = {}
    while llm.engine.has_unfinished_requests:
        for delta in llm.engine.step():
            found.setdefault(delta.index, []).append(delta)
    llm.engine.drain()
    return found


def run_plain(llm: LLM, prompt: Prompt, sampling: SamplingParams) -> dict[int, list[CompletionDelta]]:
    """The same with the target alone: a token a delta, so that it can be cut behind each."""
    llm.set_speculation(False)
    found = run(llm, prompt, sampling)
    llm.set_speculation(True)
    assert all(len(delta.token_ids) == 1 for deltas in found.values() for delta in deltas)
    return found


def tokens(deltas: list[CompletionDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def values_of(scores: PromptLogprobs) -> list[float]:
    """Of a prompt's tokens but the first."""
    return [entry.logprob for entry in scores.entries() if entry is not None]


def logprobs(deltas: list[CompletionDelta]) -> list[TokenLogprobs]:
    return [entry for delta in deltas for entry in delta.logprobs or ()]


def text(deltas: list[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def check_every_cut(llm: LLM, prompt: Prompt, sampling: SamplingParams) -> list[CompletionDelta]:
    """Cut the completion behind each of its tokens but the last, and let it go on; returns the whole one's deltas."""
    (whole,) = run_plain(llm, prompt, sampling).values()
    rests: dict[RequestId, list[CompletionDelta]] = {}
    for cut in range(len(whole)):
        llm.engine.add_request(prompt, sampling, cut, {0: tokens(whole[:cut])})
    while llm.engine.has_unfinished_requests:
        for delta in llm.engine.step():
            rests.setdefault(delta.request_id, []).append(delta)
    llm.engine.drain()
    for cut in range(len(whole)):
        rest = rests[cut]
        assert tokens(rest) == tokens(whole[cut:]), cut
        assert text(rest) == text(whole[cut:]), cut
        assert rest[-1].finish_reason == whole[-1].finish_reason
        entries, expected = logprobs(rest), logprobs(whole[cut:])
        assert [entry.token_id for entry in entries] == [entry.token_id for entry in expected]
        assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)
    return whole


@pytest.mark.parametrize("name", CASES)
def test_a_completion_cut_anywhere_goes_on_with_the_same_tokens(llm: LLM, name: str) -> None:
    whole = check_every_cut(llm, "once upon", CASES[name])
    if name == "min_tokens":
        assert len(whole) == 13 and whole[-1].finish_reason == "stop"


def test_stop_strings_are_found_across_the_cut_and_nothing_is_told_twice(llm: LLM) -> None:
    sampling = replace(CASES["seed"], max_tokens=40)
    written = text(*run_plain(llm, "once", sampling).values())
    # A stop string over several tokens, and one that seems to begin again and again.
    stop = written[len(written) // 2 :][:4]
    whole = check_every_cut(llm, "once", replace(sampling, stop=(stop, written[3] + "never")))
    assert whole[-1].finish_reason == "stop" and text(whole) == written[: written.index(stop)]


def test_thoughts_end_at_their_budget_and_stop_strings_count_behind_them(llm: LLM) -> None:
    """As in a text that goes on by itself behind the mark; and thoughts that end before are not touched."""
    sampling, unbounded = CASES["thinking"], replace(CASES["thinking"], thinking_token_budget=None)
    free, bounded = (run_plain(llm, "once", of)[0] for of in (unbounded, sampling))
    assert llm.tokenizer is not None
    mark = tuple(llm.tokenizer.encode("</think>"))
    assert len(mark) > 1 and tokens(bounded)[:7] + mark == tokens(free)[:7] + tokens(bounded)[7 : 7 + len(mark)]
    behind = tokens(bounded)[7 + len(mark) :]
    assert behind and tokens(run(llm, "once", unbounded, {0: tokens(bounded)[: -len(behind)]})[0]) == behind
    assert tokens(run(llm, "once", sampling)[0]) == tokens(bounded)  # with drafts
    spelled = map(llm.tokenizer.decode, [[token] for token in tokens(free)[:12]])
    ended = replace(sampling, thinking_marks=("", next(filter(str.isalnum, spelled))), thinking_token_budget=12)
    assert tokens(run_plain(llm, "once", ended)[0]) == tokens(free)
    # Thoughts that the prompt begins are those of an output that begins within them.
    marked = replace(sampling, thinking_marks=("<think>", "</think>"))
    begun = run(llm, "once <think>\n", replace(sampling, thinking_marks=THOUGHTS))
    assert "</think>" in text(begun[0]) and tokens(run(llm, "once <think>\n", marked)[0]) == tokens(begun[0])
    assert tokens(run(llm, "once", marked)[0]) == tokens(free)
    # A letter of the thoughts ends nothing in them, and the text behind them where it comes again.
    written, end = text(bounded), text(bounded).index("</think>") + len("</think>")
    letters = {letter for letter in written[: end - len("</think>")] if letter.isalnum()}
    stops = tuple(letters.intersection(written[end:]))
    assert stops
    stopping = replace(sampling, stop=stops, stop_in_thoughts=False)
    whole = check_every_cut(llm, "once", stopping)
    first = min(written.index(stop, end) for stop in stops)
    assert text(whole) == written[:first] and whole[-1].finish_reason == "stop"
    assert text(run_plain(llm, "once", replace(stopping, stop_in_thoughts=True))[0]) in written[:end]


def test_a_stop_string_before_min_tokens_ends_nothing_whatever_the_rounds(llm: LLM) -> None:
    """A round may end on either side of min_tokens: what was whole before it must not count then."""
    sampling = replace(CASES["greedy"], max_tokens=16)
    whole = run_plain(llm, "once", sampling)[0]
    letters = [(early, delta.text[0]) for early, delta in enumerate(whole, 1) if delta.text][2:8]
    for early, letter in letters:
        stopping = replace(sampling, stop=(letter,), min_tokens=early + 2)
        assert len(check_every_cut(llm, "once", stopping)) >= early + 2


def test_completions_of_one_prompt_go_on_each_by_itself_and_ended_ones_do_not(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=11, n=3, ignore_eos=True, **PENALTIES)
    whole = run_plain(llm, prompt_of(9), sampling)
    rest = run(llm, prompt_of(9), sampling, {0: tokens(whole[0][:7]), 2: tokens(whole[2][:19])})
    assert {index: tokens(deltas) for index, deltas in rest.items()} == {
        0: tokens(whole[0][7:]),
        2: tokens(whole[2][19:]),
    }


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ({}, "must name completions between 0 and 0"),
        ({1: (5,)}, "must name completions between 0 and 0"),
        ({0: (5, 10**6)}, "not a token id"),
        ({0: (5,) * 24}, r"cannot go on behind 24 tokens: it ended with token 24 \(length\)"),
        ({0: (5, 0, 6)}, r"cannot go on behind 3 tokens: it ended with token 2 \(stop\)"),
    ],
)
def test_what_cannot_go_on_is_refused_and_leaves_nothing(
    llm: LLM, generated: dict[int, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.engine.add_request("abc", SamplingParams(max_tokens=24), generated=generated)
    assert not llm.engine.has_unfinished_requests


def test_where_text_is_taken_has_no_bearing_on_where_it_ends(llm: LLM) -> None:
    """Stop strings over all ways to share tokens out to rounds, for a text whose end repeats its beginning."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("aabaabaac", add_special_tokens=False)

    def told(taken_at: Callable[[int], bool], num_passed: int) -> tuple[str, int]:
        written = CompletionText(IncrementalDetokenizer(llm.tokenizer, ()), AhoCorasick(("aabaac", "ba")))  # type: ignore[arg-type]
        found = ""
        for count, token in enumerate(ids, 1):
            written.append(token)
            if count < num_passed:
                written.pass_stops()
            elif written.cut_at_stop():
                return found + written.finish(), count
            if taken_at(count):
                found += written.take()
        return found + written.finish(), len(ids)

    for num_passed in range(len(ids) + 1):
        ways = {told(lambda count, way=way: bool(way >> count & 1), num_passed) for way in range(2 ** len(ids))}  # type: ignore[misc]
        assert len(ways) == 1, (num_passed, ways)


def test_log_probabilities_of_the_prompt_are_told_once_whichever_engine_goes_on(llm: LLM) -> None:
    """They come with the first tokens: an engine that gets these need not compute them again."""
    prompt, sampling = prompt_of(50), SamplingParams(max_tokens=8, prompt_logprobs=2, ignore_eos=True, n=2)
    whole = run(llm, prompt, sampling)
    told = whole[0][0].prompt_logprobs
    assert told is not None and len(told.entries()) == 50
    assert [delta.prompt_logprobs for delta in (*whole[0][1:], *whole[1])] == [None] * (len(whole[0] + whole[1]) - 1)
    for behind, expected in (({0: tokens(whole[0])[:3], 1: ()}, None), ({0: (), 1: tokens(whole[1])[:3]}, told)):
        again = run(llm, prompt, sampling, behind)
        found = [delta.prompt_logprobs for deltas in again.values() for delta in deltas]
        scores = [values_of(one) for one in found if one is not None]
        assert scores == ([] if expected is None else [pytest.approx(values_of(expected), abs=1e-5)])
        assert {index: behind[index] + tokens(deltas) for index, deltas in again.items()} == {
            index: tokens(deltas) for index, deltas in whole.items()
        }
