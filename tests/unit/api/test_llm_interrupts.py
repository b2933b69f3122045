"""After any exception in a call, at any place, the next call works; threads share an LLM without mixing anything up."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pipelines import interrupt_call, make_llm, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.api.interrupts import FairLock, held_interrupts
from trtrun.errors import InvalidRequestError, RankFailedError
from trtrun.tokens.detokenizer import CompletionText

PROMPTS = ["abc", "a longer prompt, which takes two chunks of a prefill, or three", "x"]
SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=[0, 1], ids=["plans_ahead=0", "plans_ahead=1"])
def small(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Prompts are computed in chunks, and two rows run at a time."""
    scheduler = {"max_batch_size": 2, "max_num_tokens": 24, "plans_ahead": request.param}
    with make_llm(folder / "target", folder / "draft", scheduler=scheduler) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(small: LLM) -> list[Any]:
    return tokens_of(small.generate(PROMPTS, SAMPLING))


def places(llm: LLM) -> dict[str, tuple[Any, str]]:
    """Where a call can be when something goes wrong."""
    ranks = llm.engine.orchestrator._ranks
    return {
        "encoding": (llm.engine._prompts, "encode"),
        "adding": (llm.engine.scheduler, "add"),
        "scheduling": (llm.engine.scheduler, "schedule"),
        "publishing": (ranks, "publish"),
        "drafting": (ranks._worker.drafter, "propose"),  # type: ignore[attr-defined]
        "sending a draft": (ranks._worker.exchange, "transfer_draft"),  # type: ignore[attr-defined]
        "verifying": (ranks._worker.target, "verify_forward"),  # type: ignore[attr-defined]
        "advancing": (ranks._worker.target.rows, "advance"),  # type: ignore[attr-defined]
        "collecting": (ranks, "collect"),
        "committing": (llm.engine.scheduler, "commit"),
        "making text": (CompletionText, "extend"),
    }


PLACES = (
    "encoding", "adding", "scheduling", "publishing", "drafting", "sending a draft", "verifying", "advancing",
    "collecting", "committing", "making text",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (MemoryError, 1),
        (MemoryError, 3),
        # Held back to the end of a step, so that it matters little which call of a step it comes in.
        (KeyboardInterrupt, 2),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_after_an_exception_anywhere_the_next_call_works(
    small: LLM, expected: list[Any], kind: type[BaseException], place: str, number: int
) -> None:
    owner, name = places(small)[place]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind):
        interrupt_call(patch, owner, name, number, None if kind is KeyboardInterrupt else kind("no memory left"))
        small.generate(PROMPTS, SAMPLING)
    small.check_idle()
    assert tokens_of(small.generate(PROMPTS, SAMPLING)) == expected
    small.check_idle()


def test_what_another_call_lost_to_an_exception_is_said(small: LLM, expected: list[Any]) -> None:
    stream = small.stream(PROMPTS[0], SAMPLING)
    next(stream)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        interrupt_call(patch, small.engine.scheduler, "commit", 1, MemoryError("no memory left"))
        small.generate(PROMPTS[1:], SAMPLING)
    with pytest.raises(InvalidRequestError, match="lost when another call"):
        list(stream)
    small.check_idle()
    assert tokens_of(small.generate(PROMPTS, SAMPLING)) == expected


def test_an_interrupt_during_one_call_costs_no_other_one_a_token(small: LLM, expected: list[Any]) -> None:
    stream = small.stream(PROMPTS[0], SAMPLING)
    tokens = list(next(stream).token_ids)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_call(patch, small.engine.scheduler, "commit", 2)
        small.generate(PROMPTS[1:], SAMPLING)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tuple(tokens) == expected[0][0]
    small.check_idle()


def test_an_error_of_the_prompts_iterator_ends_the_call_alone(small: LLM, expected: list[Any]) -> None:
    def broken() -> Iterator[Any]:
        yield PROMPTS[1], SAMPLING
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(small.generate_as_completed(broken()))
    small.check_idle()
    assert tokens_of(small.generate(PROMPTS, SAMPLING)) == expected


@pytest.mark.parametrize("ending", ["close", "forget"])
def test_abandoned_iterators_hold_nothing(small: LLM, expected: list[Any], ending: str) -> None:
    stream: Any = small.stream(PROMPTS[0], SAMPLING)
    outputs: Any = small.generate_as_completed((prompt, SAMPLING) for prompt in PROMPTS * 3)
    next(stream), next(outputs), next(stream)
    if ending == "close":
        stream.close()
        outputs.close()
    del stream, outputs
    gc.collect()
    small.check_idle()
    assert tokens_of(small.generate(PROMPTS, SAMPLING)) == expected


def test_a_failed_rank_is_an_exception_with_its_name_from_then_on(folder: Path) -> None:
    with make_llm(folder / "target") as llm:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RankFailedError, match="target rank 2"):
            interrupt_call(
                patch, llm.engine.orchestrator._ranks, "collect", 2, RankFailedError("target rank 2 failed: fire")
            )
            llm.generate(PROMPTS, SAMPLING)
        with pytest.raises(RankFailedError, match="target rank 2 failed: fire"):
            llm.generate(PROMPTS, SAMPLING)


def test_reading_a_stream_after_close_is_refused(folder: Path) -> None:
    with make_llm(folder / "target") as llm:
        stream = llm.stream(PROMPTS[0], SAMPLING)
        next(stream)
    with pytest.raises(InvalidRequestError, match="closed"):
        list(stream)


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; the first error of any is raised here."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_share_the_engine_and_get_their_own(small: LLM, expected: list[Any]) -> None:
    found: dict[int, list[Any]] = {}

    def generate(number: int) -> None:
        mine = PROMPTS[number % 3 :] + PROMPTS[: number % 3]
        outputs = [tokens_of(small.generate(mine, SAMPLING)) for _ in range(3)]
        found[number] = [
            tokens[-(number % 3) :] + tokens[: -(number % 3)] if number % 3 else tokens for tokens in outputs
        ]

    def stream() -> None:
        for _ in range(4):
            tokens = tuple(token for delta in small.stream(PROMPTS[0], SAMPLING) for token in delta.token_ids)
            assert tokens == expected[0][0]

    in_threads(*(lambda number=number: generate(number) for number in range(4)), stream)  # type: ignore[misc]
    assert found == {number: [expected] * 3 for number in range(4)}
    small.check_idle()


def test_a_thread_that_closes_ends_the_calls_of_others(folder: Path) -> None:
    with make_llm(folder / "target") as llm:
        begun = threading.Event()

        def read() -> None:
            with pytest.raises(InvalidRequestError, match="closed"):
                for _ in llm.stream(prompt_of(5), SamplingParams(max_tokens=200, ignore_eos=True)):
                    begun.set()

        in_threads(read, lambda: (begun.wait(60), llm.close())[1])


# The two pieces by themselves.


def test_an_interrupt_is_held_back_until_the_end_and_the_second_is_not() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")
        seen.append("never")
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        seen.append("never")
    assert seen == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_lock_goes_round() -> None:
    lock, order = FairLock(), []
    ready = [threading.Event() for _ in range(3)]

    def take(number: int) -> None:
        if number:
            ready[number - 1].wait(60)
        ready[number].set()
        for _ in range(3):
            with lock:
                order.append(number)
                if len(order) == 1:
                    while len(lock._waiting) < 2:
                        ready[2].wait(0.001)

    in_threads(*(lambda number=number: take(number) for number in range(3)))  # type: ignore[misc]
    assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(one != other for one, other in pairwise(order[:6]))
    assert lock.try_acquire() and not lock.try_acquire()
