"""`generate(seconds_left=…)`: no prompt is begun any more, what has begun finishes or is given up, and all is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipelines import make_llm, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.core.outputs import RequestOutput

VOCABULARY = 250
PROMPTS = [prompt_of(12, seed=number, vocab_size=VOCABULARY) for number in range(8)]


def greedy(length: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True, n=n, temperature=1.0 if n > 1 else 0.0, seed=3)


@pytest.fixture(params=[0, 1], ids=["plans_ahead=0", "plans_ahead=1"])
def narrow(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An LLM that runs two rows at a time, and whose blocks hardly hold two."""
    settings: dict[str, Any] = {
        "scheduler": {"max_batch_size": 2, "plans_ahead": request.param},
        "kv_cache": {"max_tokens": 128, "block_size": 8},
    }
    with make_llm(folder / "target", folder / "draft", **settings) as llm:
        yield llm


def when(finished: list[int], index: int, seconds: float) -> Callable[[], float | None]:
    """Time is up, or limited, once the prompt `index` has finished."""
    return lambda: seconds if index in finished else None


def run(llm: LLM, lengths: list[int], seconds: float, index: int = 0) -> list[RequestOutput]:
    finished: list[int] = []
    outputs = llm.generate(
        PROMPTS[: len(lengths)],
        [greedy(length) for length in lengths],
        on_finish=lambda output: finished.append(output.index),
        seconds_left=when(finished, index, seconds),
    )
    llm.check_idle()
    assert sorted(finished) == [output.index for output in outputs]
    return outputs


def test_what_has_begun_finishes_and_nothing_else_begins(narrow: LLM) -> None:
    lengths = [4, 60, 4, 4, 4, 4, 4, 4]
    alone = tokens_of(narrow.generate(PROMPTS, [greedy(length) for length in lengths]))
    outputs = run(narrow, lengths, seconds=1.0)
    indexes = [output.index for output in outputs]
    # Prompt 1 runs far longer than all others would; with plans ahead prompt 2 has begun when 0 is seen to have ended.
    assert indexes in ([0, 1], [0, 1, 2])
    assert tokens_of(outputs) == [alone[index] for index in indexes]
    assert tokens_of(run(narrow, lengths, seconds=1.0, index=7)) == alone  # the engines go on as if nothing had been


def test_without_time_left_what_has_begun_is_given_up(narrow: LLM) -> None:
    outputs = run(narrow, [4, 60, 60, 4], seconds=0.0)
    assert [output.index for output in outputs] == [0]
    again = run(narrow, [4, 9, 9, 40], seconds=0.0, index=3)  # the longest ends last: nothing is left to give up
    assert [len(tokens[0]) for tokens in tokens_of(again)] == [4, 9, 9, 40]


def test_an_order_from_the_start_begins_nothing(narrow: LLM) -> None:
    assert narrow.generate(PROMPTS, greedy(4), seconds_left=lambda: 100.0) == []
    narrow.check_idle()
    assert narrow.statistics()["num_rounds"] == 0


def test_a_preempted_row_has_begun(narrow: LLM) -> None:
    """128 tokens of blocks do not hold two rows of 12 + 80: the second is preempted, waits, and still finishes."""
    lengths = [80, 80, 4, 4]
    alone = tokens_of(narrow.generate(PROMPTS[:2], [greedy(80)] * 2))
    asked = 0

    def seconds_left() -> float | None:
        nonlocal asked
        asked += 1
        return 5.0 if asked > 3 else None  # both rows run by then

    outputs = narrow.generate(PROMPTS[:4], [greedy(length) for length in lengths], seconds_left=seconds_left)
    narrow.check_idle()
    assert tokens_of(outputs) == alone
    assert [output.index for output in outputs] == [0, 1]
    assert max(output.completions[0].statistics.num_preemptions for output in outputs) > 0


def test_a_prompt_of_several_completions_is_one(narrow: LLM) -> None:
    """Two of five completions run: the other three are admitted, though no other prompt is."""
    asked = 0

    def seconds_left() -> float | None:
        nonlocal asked
        asked += 1
        return 5.0 if asked > 2 else None

    outputs = narrow.generate(PROMPTS[:3], [greedy(20, n=5), greedy(4), greedy(4)], seconds_left=seconds_left)
    narrow.check_idle()
    assert [output.index for output in outputs] == [0]
    assert [len(completion.token_ids) for completion in outputs[0].completions] == [20] * 5


def test_refused_prompts_keep_their_outputs(narrow: LLM) -> None:
    answers = iter([None, 0.0])
    outputs = narrow.generate([[], PROMPTS[0]], greedy(4), seconds_left=lambda: next(answers))
    assert [(output.index, output.error is None) for output in outputs] == [(0, False)]
