"""How long the event loop works at a stretch: which processor time counts, and which does not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from launch.serve.admission.event_loop_stalls import RESOLUTION, LoopStalls, MeasuredLoop


class Clocks:
    """A wall clock and a processor's clock, moved by hand."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.num_readings = 0
        self.stalls = LoopStalls(lambda: self.wall, self.read_cpu)
        self.num_readings = 0

    def read_cpu(self) -> float:
        self.num_readings += 1
        return self.cpu

    def pass_by(self, wall: float, cpu: float) -> None:
        """A callback that took so long; the next one begins."""
        self.wall += wall
        self.cpu += cpu
        self.stalls.mark()


def test_the_longest_callback_counts_by_processor_time_and_waiting_does_not() -> None:
    clocks = Clocks()
    clocks.pass_by(wall=0.030, cpu=0.020)
    clocks.pass_by(wall=60.0, cpu=0.0001)  # the loop had nothing to do
    clocks.pass_by(wall=0.500, cpu=0.010)  # another program had the core
    assert clocks.stalls.longest == pytest.approx(0.020)
    clocks.stalls.begin()
    assert clocks.stalls.longest == 0


def test_short_callbacks_cost_no_reading_of_the_processors_clock_and_do_not_add_up() -> None:
    clocks = Clocks()
    for _ in range(10_000):
        clocks.pass_by(wall=RESOLUTION / 10, cpu=RESOLUTION / 10)
    assert clocks.num_readings <= 1001
    assert clocks.stalls.longest < 2 * RESOLUTION


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        yield runner


def test_a_step_of_a_task_that_works_long_is_a_stretch_and_one_that_rests_is_not(runner: asyncio.Runner) -> None:
    async def work(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass

    async def work_in_parts() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        loop.stalls.begin()
        for _ in range(40):
            await work(0.005)
            await asyncio.sleep(0)
        in_parts = loop.stalls.longest
        await work(0.2)
        await asyncio.sleep(0)
        assert loop.stalls.longest >= 0.2
        return in_parts

    assert runner.run(work_in_parts()) < 0.2


@pytest.mark.parametrize("way", ["files", "timers"])
def test_what_files_and_timers_call_are_stretches_of_their_own(runner: asyncio.Runner, way: str) -> None:
    """Ten at once, of 20 ms each, which have one turn of the loop together."""
    pairs = [socket.socketpair() for _ in range(10)]
    called = []

    def work(place: int) -> None:
        runner.get_loop().remove_reader(pairs[place][0])
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        called.append(place)

    async def work_together() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuredLoop)
        for place, (here, there) in enumerate(pairs):
            there.send(b"1")
            if way == "files":
                loop.add_reader(here, work, place)
            else:
                loop.call_later(0.001, work, place)
        loop.stalls.begin()
        while len(called) < len(pairs):
            await asyncio.sleep(0)
        return loop.stalls.longest

    assert 0.02 <= runner.run(work_together()) < 0.15
    for pair in pairs:
        for end in pair:
            end.close()
