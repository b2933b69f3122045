"""A user's program over several ranks that goes wrong as the environment says: which rank raises, or none.

JOB_DRAFT, JOB_TARGET: model directories. JOB_TARGET_RANKS: ranks of the target, 1 or 2.
JOB_FAILS: draft, target leader, target follower, orchestrator, program (the user's own code between two calls), kill 0
to kill 3 (that rank dies of SIGKILL in the middle of a text) or nothing.
JOB_STYLE: with (a context manager), bare (no context manager), forgotten (ends well, but never closes), catch (it
catches the failure of a rank, twice, and goes on without the LLM).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # what tests share
from pipelines import configuration, prompt_of

from trtrun import LLM, SamplingParams, open_llm
from trtrun.engine.runner import Engine
from trtrun.errors import RankFailedError
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.drafter import AheadDrafter

FAILS, STYLE = os.environ["JOB_FAILS"], os.environ.get("JOB_STYLE", "with")
ROUNDS = 4


def fail() -> None:
    print(f"failing at {time.time()}", flush=True)
    raise ValueError("request 7:\nthe device is on fire")


def fail_later(owner: type, name: str) -> None:
    """Let a method of `owner` raise in its ROUNDS-th call of a round with rows."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == ROUNDS + 3:  # warm-up verifies up to three times
            fail()
        return original(self, *arguments, **options)

    setattr(owner, name, changed)


def use(llm: LLM) -> None:
    print("pids", *PROCESSES, flush=True)
    llm.generate([prompt_of(9)], SamplingParams(max_tokens=40))
    if FAILS == "program":
        fail()
    if STYLE == "forgotten":
        return
    rounds = 0
    for _ in llm.stream(prompt_of(9), SamplingParams(max_tokens=1_000_000, ignore_eos=True)):
        rounds = rounds + 1
        if FAILS.startswith("kill") and rounds == ROUNDS:
            print(f"failing at {time.time()}", flush=True)
            os.kill(PROCESSES[int(FAILS[-1])], signal.SIGKILL)


def use_and_catch(llm: LLM) -> None:
    atexit.register(lambda: print("the program is over, and its own last work is done", flush=True))
    for _ in range(2):
        try:
            use(llm)
        except RankFailedError as error:
            print(f"caught: {error}", flush=True)
    started = time.monotonic()
    llm.close()
    while time.monotonic() - started < 2.0:  # long enough for another rank to end the job, were it in its power
        time.sleep(0.1)


WORLD = MPI.COMM_WORLD
PROCESSES = WORLD.allgather(os.getpid())
failing = {"draft": 1, "target leader": 2, "target follower": 3, "orchestrator": 0}.get(FAILS)
if failing == WORLD.rank:
    if FAILS == "draft":
        fail_later(AheadDrafter, "propose")
    elif FAILS == "orchestrator":
        fail_later(Scheduler, "schedule")
    else:
        fail_later(Engine, "verify_forward")
config = configuration(
    os.environ["JOB_TARGET"],  # type: ignore[arg-type]
    os.environ["JOB_DRAFT"],  # type: ignore[arg-type]
    devices=(("cpu:0",), ("cpu:1", "cpu:2")[: int(os.environ.get("JOB_TARGET_RANKS", "1"))]),
    kv_cache={"max_tokens": 70_000},
    scheduler={"max_batch_size": 2, "plans_ahead": int(os.environ.get("JOB_PLANS_AHEAD", "0"))},
)
if STYLE == "with":
    with open_llm(config) as llm:
        if llm is not None:
            use(llm)
elif STYLE == "catch":
    llm = LLM.open(config)
    if llm is not None:
        use_and_catch(llm)
else:
    llm = LLM.open(config)
    if llm is not None:
        use(llm)
