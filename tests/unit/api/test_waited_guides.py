"""Rows whose guide is still built: the others go on, and the row says what it would say without the wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from threading import Event, get_ident
from typing import Any

import pytest
from pipelines import make_llm

from trtrun import LLM, SamplingParams
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.guide import Guide, GuideStart
from trtrun.core.outputs import CompletionDelta
from trtrun.errors import InvalidRequestError
from trtrun.guiding import row_guide as builds
from trtrun.guiding.grammars import Grammars, grammars_of
from trtrun.guiding.row_guides import RowGuides
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.scheduling import guide_registry
from trtrun.scheduling.guide_registry import MOST_AHEAD

LARGE, SMALL = {"regex": "[0-9]{3}-[a-z]{4}"}, {"choice": ["yes", "no"]}
PROMPT = "def main("


def asked(guide: Any = None, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=12, guided=guide, temperature=0.7, seed=3, **changes)


class Held:
    """Builds of LARGE, which do not end until they may, and fail where they are to.

    Attributes:
        has_begun, may_end: of such a build.
        error: what it raises.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = Event(), Event()
        self.error: BaseException | None = None
        build, has = Grammars.matcher, Grammars.has
        large = asked(LARGE).guided

        def matcher(grammars: Grammars, guide: Guide, *, anew: bool = False) -> Any:
            if guide == large and not anew:
                self.has_begun.set()
                assert self.may_end.wait(60)
                if self.error is not None:
                    raise self.error
            return build(grammars, guide, anew=anew)

        # As in a process that is not the door's, where it is built anew.
        patch.setattr(Grammars, "has", lambda grammars, guide: guide != large and has(grammars, guide))
        patch.setattr(Grammars, "matcher", matcher)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.may_end.set()


@pytest.fixture(scope="module", params=[0, 1])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """With two rows, and plans ahead of verdicts or not."""
    scheduler = {"max_batch_size": 2, "plans_ahead": request.param}
    with make_llm(ASSETS / "target", ASSETS / "draft", scheduler=scheduler) as opened:
        yield opened


def run_until_ended(llm: LLM, requests: Sequence[Any]) -> dict[Any, list[CompletionDelta]]:
    """Take steps until these requests have ended; what came of any, by request."""
    deltas: dict[Any, list[CompletionDelta]] = {}
    going_on = set(requests)
    while going_on:
        for delta in llm.engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
            if delta.finish_reason is not None:
                going_on.discard(delta.request_id)
    return deltas


def tokens_of(deltas: Sequence[CompletionDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def alone(llm: LLM, sampling: SamplingParams) -> tuple[int, ...]:
    (output,) = llm.generate([PROMPT], sampling)
    assert output.error is None
    return output.completions[0].token_ids


def test_other_rows_go_on_while_a_guide_is_built(llm: LLM, held: Held) -> None:
    held.may_end.set()
    expected = alone(llm, asked(LARGE))
    held.may_end.clear()
    engine = llm.engine
    large = engine.add_request(PROMPT, asked(LARGE))
    others = [engine.add_request(PROMPT, asked(guide)) for guide in (None, SMALL, None)]
    deltas = run_until_ended(llm, others)
    assert held.has_begun.is_set() and not deltas.get(large) and not engine.has_begun(large)
    assert [tokens_of(deltas[other]) for other in others] == [alone_of(llm, guide) for guide in (None, SMALL, None)]
    held.may_end.set()
    assert tokens_of(run_until_ended(llm, [large])[large]) == expected
    llm.check_idle()


def alone_of(llm: LLM, guide: Any) -> tuple[int, ...]:
    """What a request says that runs beside the held one, which has not begun."""
    request = llm.engine.add_request(PROMPT, asked(guide))
    return tokens_of(run_until_ended(llm, [request])[request])


def test_rows_of_one_call_do_not_wait_for_each_other(llm: LLM, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide is built once a row of the same call has ended."""
    ended: list[bool] = []
    step = llm.engine.step

    def watched() -> list[CompletionDelta]:
        deltas = step()
        for delta in deltas:
            ended.append(held.may_end.is_set())
            if delta.finish_reason is not None:
                held.may_end.set()
        return deltas

    monkeypatch.setattr(llm.engine, "step", watched)
    first, second = llm.generate([PROMPT, PROMPT], [asked(LARGE), asked()])
    assert not ended[0] and ended[-1]
    assert first.error is None and second.error is None


def test_a_step_sleeps_where_all_that_is_left_waits(llm: LLM, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    wait = RowGuides.wait_for_any

    def watched(guides: RowGuides, due: Sequence[GuideStart], seconds: float) -> None:
        waited.append(seconds)
        wait(guides, due, seconds)
        if len(waited) == 3:
            held.may_end.set()

    monkeypatch.setattr(RowGuides, "wait_for_any", watched)
    request = llm.engine.add_request(PROMPT, asked(LARGE))
    for number in range(3):
        assert llm.engine.step() == [] and len(waited) == number + 1 and waited[-1] > 0
    assert run_until_ended(llm, [request])[request]
    llm.check_idle()


def test_who_waits_for_a_guide_can_be_cancelled(llm: LLM, held: Held) -> None:
    engine = llm.engine
    request = engine.add_request(PROMPT, asked(LARGE, n=2))
    assert engine.step() == []
    assert held.has_begun.wait(60)
    assert engine.abort_request(request) and not engine.has_unfinished_requests
    llm.check_idle()
    run_until_ended(llm, [engine.add_request(PROMPT, asked())])
    # It is ordered again, and its first build, which nobody waits for any more, is not taken for the second.
    again = engine.add_request(PROMPT, asked(LARGE))
    other = engine.add_request(PROMPT, asked())
    assert again not in run_until_ended(llm, [other])
    held.may_end.set()
    assert len(tokens_of(run_until_ended(llm, [again])[again])) > 5
    llm.check_idle()


@pytest.mark.parametrize("error", [InvalidRequestError("too large here"), RuntimeError("a defect"), MemoryError()])
def test_a_build_that_fails_ends_its_own_row(
    llm: LLM, held: Held, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    held.error = error
    held.may_end.set()
    with caplog.at_level(logging.CRITICAL):
        bad, good = llm.generate([PROMPT, PROMPT], [asked(LARGE), asked(SMALL)])
    assert bad.error is not None and "guide" in bad.error
    assert good.error is None and good.completions[0].token_ids == alone(llm, asked(SMALL))


def test_more_guides_than_are_built_at_a_time_are_all_followed(llm: LLM) -> None:
    guides = [{"choice": [f"{number} is it"]} for number in range(2 * MOST_AHEAD + 1)]
    outputs = llm.generate([PROMPT] * len(guides), [asked(guide) for guide in guides])
    assert [output.completions[0].text for output in outputs] == [guide["choice"][0] for guide in guides]
    llm.check_idle()


def test_guides_of_rows_that_run_leave_room_for_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_registry, "MOST_AHEAD", 1)
    wanted = [SamplingParams(max_tokens=40, guided={"regex": f"[{letters}]*"}) for letters in ("a-y", "b-z")]
    first, second = (llm.engine.add_request(PROMPT, sampling) for sampling in wanted)
    while not llm.engine.has_begun(second):
        assert all(delta.finish_reason is None for delta in llm.engine.step())
    run_until_ended(llm, [first, second])
    llm.check_idle()


def test_rows_that_lose_their_place_find_their_guide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks, so that rows are preempted: where they go on is built beside the rounds, of a grammar that was
    compiled once."""
    built: list[Guide] = []
    build, behind, main = Grammars._compile, builds.go_on, get_ident()

    def compile_grammar(grammars: Grammars, guide: Guide) -> Any:
        built.append(guide)
        return build(grammars, guide)

    def go_on(matcher: Any, output: Sequence[int], *more: Any) -> bool:
        assert get_ident() != main
        return behind(matcher, output, *more)

    monkeypatch.setattr(Grammars, "_compile", compile_grammar)
    monkeypatch.setattr(builds, "go_on", go_on)
    wanted = [SamplingParams(max_tokens=40, guided={"regex": f"([a-z]{{{n + 1}}} )*"}, seed=n) for n in range(4)]
    with make_llm(ASSETS / "target", scheduler={"max_batch_size": 4}) as roomy:
        expected = [output.completions[0].token_ids for output in roomy.generate([PROMPT] * 4, wanted)]
    few = {"max_tokens": 96, "block_size": 8}
    with make_llm(ASSETS / "target", scheduler={"max_batch_size": 4}, kv_cache=few) as tight:
        grammars_of.cache_clear()
        built.clear()
        outputs = tight.generate([PROMPT] * 4, wanted)
        tight.check_idle()
    assert sum(output.completions[0].statistics.num_preemptions for output in outputs) > 0
    assert [output.completions[0].token_ids for output in outputs] == expected
    assert sorted(built) == sorted(sampling.guided for sampling in wanted if sampling.guided is not None)


def test_what_has_not_begun_at_the_end_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, built, build = Event(), list[Guide](), Grammars.matcher

    def matcher(grammars: Grammars, guide: Guide, *, anew: bool = False) -> Any:
        if guide.kind == "regex":
            built.append(guide)
            assert may_end.wait(60)
        return build(grammars, guide, anew=anew)

    monkeypatch.setattr(Grammars, "has", lambda *_: False)
    monkeypatch.setattr(Grammars, "matcher", matcher)
    with make_llm(ASSETS / "target") as llm:
        for number in range(6):
            llm.engine.add_request(PROMPT, asked({"regex": f"[0-9]{{{number + 1}}}"}))
        assert llm.engine.step() == []
        ranks = llm.engine.orchestrator._ranks
        assert isinstance(ranks, SoloRanks) and ranks._worker.guides is not None
        builders = ranks._worker.guides._builds._pool
    may_end.set()
    assert builders is not None
    builders.shutdown()
    assert len(built) < 6
