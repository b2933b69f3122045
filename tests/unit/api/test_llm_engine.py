"""The engine core: requests at any time, under the caller's ids; deltas; aborts; a full queue; prompts without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import make_llm, prompt_of, tokens_of

from parallel.watchdog.activity import Phase
from trtrun import LLM, SamplingParams
from trtrun.core.nouns import Step
from trtrun.core.outputs import CompletionDelta, RequestId
from trtrun.errors import ConfigError, InvalidRequestError, QueueFullError

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def run(llm: LLM) -> dict[tuple[RequestId, int], list[CompletionDelta]]:
    """All deltas until no request is left, by request and completion."""
    found: dict[tuple[RequestId, int], list[CompletionDelta]] = {}
    while llm.engine.has_unfinished_requests:
        for delta in llm.engine.step():
            found.setdefault((delta.request_id, delta.index), []).append(delta)
    llm.engine.drain()
    return found


def test_deltas_add_up_to_what_generate_returns(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=4, n=3, logprobs=2, ignore_eos=True)
    expected = llm.generate(["abc", "de"], sampling)
    ids = [llm.engine.add_request("abc", sampling, "mine"), llm.engine.add_request("de", sampling)]
    assert ids[0] == "mine" and ids[1] != "mine"
    found = run(llm)
    assert set(found) == {(request_id, index) for request_id in ids for index in range(3)}
    for request_id, output in zip(ids, expected, strict=True):
        for completion in output.completions:
            deltas = found[request_id, completion.index]
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason == completion.finish_reason == "length"
            assert "".join(delta.text for delta in deltas) == completion.text
            assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids
            assert [entry for delta in deltas for entry in delta.logprobs or ()] == completion.logprobs
            assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
            assert deltas[-1].statistics.num_rounds == completion.statistics.num_rounds


def test_requests_arrive_and_leave_at_any_time(llm: LLM) -> None:
    prompts = [prompt_of(5 + 7 * number, seed=number) for number in range(6)]
    expected = tokens_of(llm.generate(prompts, GREEDY))
    gained: dict[RequestId, list[int]] = {}
    for number, prompt in enumerate(prompts):
        gained[llm.engine.add_request(prompt, GREEDY, f"request {number}")] = []
        for delta in llm.engine.step():
            gained[delta.request_id] += delta.token_ids
    assert llm.engine.abort_request("request 5") and not llm.engine.abort_request("request 5")
    assert not llm.engine.abort_request("unknown")
    for (request_id, _), deltas in run(llm).items():
        gained[request_id] += [token for delta in deltas for token in delta.token_ids]
    assert [tuple(gained[f"request {number}"]) for number in range(5)] == [tokens[0] for tokens in expected[:5]]
    assert tuple(gained["request 5"]) == expected[5][0][: len(gained["request 5"])]
    llm.check_idle()


def test_who_looks_from_outside_sees_what_a_round_is_doing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend has an engine of one process ended when a round stands still."""
    orchestrator, seen = llm.engine.orchestrator, []
    schedule = orchestrator.scheduler.schedule

    def look_and_schedule(*given: Any, **more: Any) -> Any:
        seen.append(orchestrator.look()[0])
        return schedule(*given, **more)

    monkeypatch.setattr(orchestrator.scheduler, "schedule", look_and_schedule)
    llm.engine.add_request("abc", GREEDY)
    assert orchestrator.look()[0].is_idle
    run(llm)
    assert seen[0].phase is Phase.SCHEDULING and all(doing.phase.is_in_round for doing in seen)
    assert orchestrator.look()[0].is_idle and orchestrator.look()[0].round_index > 0


def test_an_id_in_use_is_refused_and_is_free_again_at_the_end(llm: LLM) -> None:
    llm.engine.add_request("abc", GREEDY, "one")
    with pytest.raises(InvalidRequestError, match="'one' is in use"):
        llm.engine.add_request("def", GREEDY, "one")
    run(llm)
    llm.engine.add_request("abc", GREEDY, "one")
    run(llm)


def test_a_full_queue_is_refused_in_words_and_nothing_of_the_request_stays(folder: Path) -> None:
    with make_llm(folder / "target", scheduler={"max_batch_size": 2, "max_waiting": 3}) as llm:
        llm.engine.add_request("a", SamplingParams(n=2, max_tokens=4))
        with pytest.raises(QueueFullError, match=r"2 completions wait, 2 more .* scheduler\.max_waiting is 3; send"):
            llm.engine.add_request("b", SamplingParams(n=2, max_tokens=4))
        llm.engine.add_request("c", GREEDY)
        assert len(run(llm)) == 3
        # What waits inside a call does not count against it; more completions than may ever wait are refused.
        outputs = llm.generate(["x"] * 20, SamplingParams(max_tokens=3))
        assert [output.error for output in outputs] == [None] * 20
        (refused,) = llm.generate(["x"], SamplingParams(n=4, max_tokens=3))
        assert str(refused.error).startswith("4 completions are asked for at once, but scheduler.max_waiting is 3:")
        llm.check_idle()


def test_a_call_takes_its_prompts_whatever_others_have_waiting(folder: Path) -> None:
    with make_llm(folder / "target", scheduler={"max_batch_size": 4}) as llm:
        llm.engine.add_request("a", SamplingParams(n=20, max_tokens=8, ignore_eos=True))
        taken = 0

        def prompts() -> Iterator[tuple[str, SamplingParams]]:
            nonlocal taken
            for _ in range(8):
                taken += 1
                yield "b", SamplingParams(max_tokens=4, ignore_eos=True)

        outputs = llm.generate_as_completed(prompts())
        next(outputs)
        assert taken >= 4, "as many as there are rows, though more than these wait before them"
        assert len(list(outputs)) == 7


def test_max_waiting_is_a_key_of_the_yaml_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.max_waiting: must be greater than or equal to 1"):
        make_llm(folder / "target", scheduler={"max_waiting": 0})


def test_prompts_are_taken_as_rows_become_free(llm: LLM) -> None:
    """Of prompts without end only a window is ever held, and the first output comes long before the last prompt."""
    taken = 0

    def endless() -> Iterator[tuple[Any, SamplingParams]]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield prompt_of(3 + number % 20, seed=number), SamplingParams(max_tokens=1 + number % 7, ignore_eos=True)

    rows = llm.config.scheduler.max_batch_size
    indexes = []
    outputs = llm.generate_as_completed(endless())
    for output in itertools.islice(outputs, 60):
        indexes.append(output.index)
        assert output.error is None
        assert taken - len(indexes) <= 2 * rows + rows
    assert len(set(indexes)) == 60 and set(range(40)) <= set(indexes)
    outputs.close()  # type: ignore[attr-defined]
    llm.check_idle()
    assert not llm._shared.inboxes


def test_logits_that_are_not_finite_end_the_row_with_an_error(llm: LLM) -> None:
    good = tokens_of(llm.generate(["abc"], GREEDY))
    target = llm.engine.orchestrator._ranks._worker.target  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        forward, calls = target.verify_forward, 0

        def damaged(*arguments: Any) -> Step:
            """The first row's logits are no numbers in the third round."""
            nonlocal calls
            calls += 1
            logits = forward(*arguments).logits.clone()
            if calls == 3:
                logits[0] = torch.nan
            return Step(logits)

        patch.setattr(target, "verify_forward", damaged)
        first, second = llm.generate(["abc", "abc"], GREEDY)
    assert first.error is not None and "not finite" in first.error and first.completions == ()
    assert tokens_of([second]) == good
    llm.check_idle()


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = [5, 6, 7, 8]
    expected = tokens_of(llm.generate([ids], GREEDY))
    same: list[Any] = [tuple(ids), torch.tensor(ids), torch.tensor(ids).numpy(), range(5, 9)]
    assert tokens_of(llm.generate(same, GREEDY)) == expected * 4
    assert tokens_of(llm.generate("abc", GREEDY)) == tokens_of(llm.generate(["abc"], GREEDY))
    wrong: list[Any] = [ids, None, 7, {"a": 1}, b"abc", "half a \ud800 pair", [[1]], torch.tensor(3), ["abc"]]
    outputs = llm.generate(wrong, GREEDY)
    assert [output.error is None for output in outputs] == [True] + [False] * 8
    assert all("\n" not in str(output.error) and len(str(output.error)) < 300 for output in outputs)
    assert "a list of token ids, not None" in str(outputs[1].error)
    llm.check_idle()


@pytest.mark.parametrize(
    "groups", [("call", "call", None), (None, None, None)], ids=["a call of two", "three requests"]
)
def test_groups_take_turns_at_rows_and_their_texts_stay(folder: Path, groups: tuple[str | None, ...]) -> None:
    """Two rows: the last request, one completion, waits for none of the many but those that have begun."""
    with make_llm(folder / "target", scheduler={"max_batch_size": 2}) as llm:
        asked = [SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=5, n=n) for n in (6, 2, 1)]
        expected = [llm.generate([[7, 8, 9]], sampling)[0] for sampling in asked]
        for number, (sampling, group) in enumerate(zip(asked, groups, strict=True)):
            llm.engine.add_request([7, 8, 9], sampling, number, group=group)
        found = run(llm)
        llm.check_idle()
    ended = list(dict.fromkeys(key for key, deltas in found.items()))  # in order of their first deltas
    assert [key for key in ended if key[0] == 2] == [(2, 0)] and ended.index((2, 0)) <= 2
    if groups[0] is not None:
        assert [key for key in ended if key[0] != 2] == [*((0, n) for n in range(6)), (1, 0), (1, 1)]
    else:
        assert ended.index((1, 0)) <= 3
    for (request_id, index), deltas in found.items():
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        assert tokens == expected[int(request_id)].completions[index].token_ids
