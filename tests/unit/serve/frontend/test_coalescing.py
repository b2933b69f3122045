"""Requests that come together begin together, and nobody waits for longer than that is of use."""

from __future__ import annotations

import asyncio

import pytest
from fronts import TOKENIZER, NoEngine, make_frontend

from launch.serve.admission.control import AdmissionControl
from launch.serve.frontend.coalescing import MOST_SECONDS, RequestCoalescer
from launch.serve.parsing.parsers import UnencodedRequest
from trtrun.core.sampling_params import SamplingParams


async def turn() -> None:
    """Let the event loop go round once."""
    await asyncio.sleep(0)


def open_admission() -> AdmissionControl:
    return AdmissionControl(max_running=8, max_queue=0, max_streams=8, is_open=True)


class Comers:
    """Requests one after the other, each let in by the admission; what they do, in order."""

    def __init__(self, admission: AdmissionControl, arrivals: RequestCoalescer) -> None:
        self._admission = admission
        self._coalescer = arrivals
        self.log: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    def send(self) -> None:
        """The next one comes."""
        self._tasks.append(asyncio.create_task(self._come(len(self._tasks))))

    async def wait(self) -> list[str]:
        """The log, once all of them have begun."""
        await asyncio.gather(*self._tasks)
        return self.log

    async def _come(self, number: int) -> None:
        self._admission.enter(1)
        self.log.append(f"{number} comes")
        await self._coalescer.wait()
        self.log.append(f"{number} begins")


def test_those_that_come_in_turns_one_after_the_other_begin_when_the_last_is_there() -> None:
    async def work() -> list[str]:
        comers = Comers(admission := open_admission(), RequestCoalescer(admission, clock=lambda: 0.0))
        for _ in range(3):
            comers.send()
            await turn()
        return await comers.wait()

    log = asyncio.run(work())
    assert log[:3] == ["0 comes", "1 comes", "2 comes"]
    assert sorted(entry[:8] for entry in log[3:]) == ["0 begins", "1 begins", "2 begins"]
    assert len(log) == 6


def test_nobody_waits_while_another_one_is_in_work() -> None:
    admission = open_admission()
    admission.enter(1)
    admission.enter(1)
    with pytest.raises(StopIteration):  # without having waited for anything
        RequestCoalescer(admission).wait().send(None)


def test_those_that_keep_coming_hold_up_nobody_for_long() -> None:
    now = 0.0

    async def work() -> list[str]:
        nonlocal now
        comers = Comers(admission := open_admission(), RequestCoalescer(admission, clock=lambda: now))
        while len(comers.log) < 8 and not any("0 begins" in entry for entry in comers.log):
            comers.send()
            await turn()
            now += MOST_SECONDS / 3
        return await comers.wait()

    log = asyncio.run(work())
    assert [entry[:8] for entry in log].index("0 begins") < 6


def test_one_that_was_given_up_counts_no_more() -> None:
    async def work() -> list[str]:
        admission = open_admission()
        arrivals = RequestCoalescer(admission, clock=lambda: 0.0)
        ticket = admission.enter(1)
        waiting = asyncio.create_task(arrivals.wait())
        await turn()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ticket.leave()
        comers = Comers(admission, arrivals)
        comers.send()
        await turn()
        comers.send()
        return await comers.wait()

    assert asyncio.run(work())[:2] == ["0 comes", "1 comes"]


def test_requests_of_a_front_begin_together() -> None:
    engine = NoEngine()
    frontend = make_frontend(TOKENIZER, engine)

    async def work() -> None:
        beginning = []
        for _ in range(3):
            beginning.append(
                asyncio.create_task(frontend.begin(UnencodedRequest.of(["def main("], SamplingParams()), 0.0))
            )
            await turn()
            assert not engine.starts
        for generation in await asyncio.gather(*beginning):
            generation.close()

    asyncio.run(work())
    assert engine.starts == [True, True, True]


def test_all_that_begin_together_reach_the_engine_before_the_first_is_answered() -> None:
    engine = NoEngine()
    frontend = make_frontend(TOKENIZER, engine)

    async def begin() -> int:
        generation = await frontend.begin(UnencodedRequest.of(["def main("], SamplingParams()), 0.0)
        num_started = len(engine.starts)
        generation.close()
        return num_started

    async def work() -> list[int]:
        return await asyncio.gather(*(begin() for _ in range(3)))

    assert asyncio.run(work()) == [3, 3, 3]
