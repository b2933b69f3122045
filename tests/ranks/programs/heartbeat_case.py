"""A user's program over three or four ranks in which one rank stands still, as the environment says. Limits are in
seconds.

HEARTBEAT_TARGET, HEARTBEAT_DRAFT: model directories. HEARTBEAT_LIMIT, HEARTBEAT_START: launch.heartbeat_seconds and
launch.start_seconds. HEARTBEAT_RANK: which rank stands still; -2 is every rank. HEARTBEAT_KIND: how and where:

- python, native: in the middle of a round, in Python or in a call that keeps the interpreter's lock.
- layer: the same as python, in the middle of a forward.
- slow: not for ever, but for the better part of the limit, in several rounds; every rank in rounds of its own. Behind
  them the program does nothing for longer than the limit, between two calls.
- slow-layers: for as long in every layer of one forward.
- endless: it does not; the text has no end.
- unreachable: nobody listens where rank 0 says that it does.
- loading, warming, missing: in the start: in the weights, in warm-up, or before it has anything to do with the others.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mpi4py import MPI

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # what tests share
from pipelines import configuration, prompt_of

from parallel.watchdog.addresses import listen
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun import LLM, SamplingParams, open_llm
from trtrun.engine.runner import Engine
from trtrun.layers.decoder_layer import DecoderLayer
from trtrun.models.decoder import CausalLM
from trtrun.models.weight_reader import WeightReader
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.start import engine_maker, job

RANK, KIND = int(os.environ["HEARTBEAT_RANK"]), os.environ["HEARTBEAT_KIND"]
EVERY_RANK = -2
LIMIT = float(os.environ["HEARTBEAT_LIMIT"])
SLOW_ROUNDS = 2
SLOW_FORWARD = 6
"""Of rounds."""


def stuck_in_python() -> None:
    print(f"standing still at {time.time()}", flush=True)
    while True:
        time.sleep(0.01)


def stuck_in_native_code() -> None:
    print(f"standing still at {time.time()}", flush=True)
    ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, PyDLL keeps the interpreter's lock


def be_slow() -> None:
    time.sleep(0.6 * LIMIT)


def slow_forward() -> None:
    """Let every layer of one forward be slow, once the start is over, and print how long the forward took."""
    original: Callable[..., Any] = CausalLM.forward
    calls = 0

    def changed(self: CausalLM, *arguments: Any) -> Any:
        nonlocal calls
        calls += start_is_over()
        if calls != SLOW_FORWARD:
            return original(self, *arguments)
        started = time.monotonic()
        change(DecoderLayer, "attend", lambda call: call <= len(self._layers), be_slow)
        hidden = original(self, *arguments)
        print(f"a forward of {time.monotonic() - started:.1f} s", flush=True)
        return hidden

    CausalLM.forward = changed  # type: ignore[method-assign]


def closed_port(server: HeartbeatServer, everywhere: bool) -> int:
    with listen(everywhere) as listener:
        return int(listener.getsockname()[1])


def change(
    owner: Any, name: str, when: Callable[[int], bool], what: Callable[[], object], in_start: bool = False
) -> None:
    """Let a function of `owner` do `what` first, in the calls whose number `when` picks; those of the start count only
    `in_start`, however long it takes."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def changed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        if in_start or start_is_over():
            calls += 1
            if when(calls):
                what()
        return original(*arguments, **keywords)

    setattr(owner, name, changed)


@cache
def began() -> float:
    """When this was asked first: once this rank's start is over."""
    return time.monotonic()


def start_is_over() -> bool:
    """Whether this rank runs rounds, or gives others some to run."""
    return began.cache_info().currsize > 0


def has_run_for_a_second() -> bool:
    """So that beats have told of some rounds."""
    return start_is_over() and time.monotonic() > began() + 1


def stand_still() -> None:
    """Prepare this rank for what the environment says."""
    change(job, "serve", lambda call: True, began, in_start=True)
    if KIND == "missing":
        stuck_in_python()
    elif KIND == "loading":
        # The target's third layer: some of the weights are read by then.
        change(WeightReader, "linear", lambda call: call == 6, stuck_in_python, in_start=True)
    elif KIND == "warming":
        change(engine_maker, "warm_up", lambda call: True, stuck_in_python, in_start=True)
    elif KIND == "unreachable":
        HeartbeatServer.listen = closed_port  # type: ignore[assignment,method-assign]
    elif KIND == "slow-layers":
        slow_forward()
    elif KIND == "layer":
        change(DecoderLayer, "attend", lambda call: has_run_for_a_second(), stuck_in_python)
    elif KIND in ("python", "native", "slow"):
        what = {"python": stuck_in_python, "native": stuck_in_native_code, "slow": be_slow}[KIND]
        owner, name = {0: (Scheduler, "schedule"), 1: (AheadDrafter, "propose")}.get(
            WORLD.rank, (Engine, "verify_forward")
        )
        if KIND == "slow":
            turn = WORLD.rank % 4
            change(owner, name, lambda call: call % 4 == turn and 4 <= call < 4 * SLOW_ROUNDS + 4, what)
        else:
            change(owner, name, lambda call: has_run_for_a_second(), what)


def use(llm: LLM) -> None:
    endless = KIND in ("python", "native", "layer", "endless")
    sampling = SamplingParams(max_tokens=1_000_000 if endless else 60, ignore_eos=True)
    told = False
    began()
    for _ in llm.stream(prompt_of(9), sampling):
        if not told and has_run_for_a_second():
            told = True
            print("running", flush=True)
    if KIND == "slow":
        started = time.monotonic()
        while time.monotonic() - started < 2 * LIMIT:
            time.sleep(0.1)
        llm.generate([prompt_of(9)], SamplingParams(max_tokens=8))
    print(f"all is well after {llm.statistics()['num_rounds']} rounds", flush=True)


WORLD = MPI.COMM_WORLD
print("pids", *WORLD.allgather(os.getpid()), flush=True)
if RANK in (WORLD.rank, EVERY_RANK):
    stand_still()
config = configuration(
    os.environ["HEARTBEAT_TARGET"],  # type: ignore[arg-type]
    os.environ["HEARTBEAT_DRAFT"],  # type: ignore[arg-type]
    devices=(("cpu:0",), ("cpu:1", "cpu:2")[: WORLD.size - 2]),
    kv_cache={"max_tokens": 70_000},
    scheduler={"max_batch_size": 2, "plans_ahead": int(os.environ.get("HEARTBEAT_PLANS_AHEAD", "0"))},
    launch={"heartbeat_seconds": LIMIT, "start_seconds": float(os.environ.get("HEARTBEAT_START", "120"))},
)
with open_llm(config) as llm:
    if llm is not None:
        use(llm)
