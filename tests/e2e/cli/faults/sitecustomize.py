"""Makes one rank of a real job misbehave: Python imports this module by itself where it stands on PYTHONPATH.

TRTRUN_TEST_FAULT is "RANK KIND", or "alone KIND" for a job of one process, with one of these kinds:

    corrupt    the rank flips one bit of every MPI message of 4096 bytes that it sends
    wrong-sum  the rank adds 1 to the last element of every sum over MPI
    no-group   the rank fails when it opens a group of ranks
    stop       the rank stops itself (SIGSTOP) when it is about to send a message of 4096 bytes
    sleep      the rank never returns from its first look at a model directory, though its threads go on
    torch      the rank has another version of torch
    raise      the rank's third verification of a round raises ZeroDivisionError
    endless    the rank never returns from its third verification
    endless-step   the rank never returns from its fourth step of a training run, where ranks may stand still for three
                   times launch.heartbeat_seconds, not ten
    raise-in-step  the rank's fourth step of a training run raises MemoryError
    slow       the rank sleeps 0.05 s before each verification, and leaves its core to others

Nothing of trtrun knows this module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

rank, _, kind = os.environ.get("TRTRUN_TEST_FAULT", "").partition(" ")


def break_mpi(module: ModuleType) -> None:
    """Change what the transport sends or sums."""
    communicator: Any = module.MpiCommunicator
    send, all_reduce = communicator.send, communicator.all_reduce

    def bad_send(self: Any, tensor: Any, destination: int) -> None:
        if tensor.numel() == 4096 and kind == "stop":
            time.sleep(2.0)  # by then a beat has told which step this is, also on a busy machine
            os.kill(os.getpid(), signal.SIGSTOP)
        if tensor.numel() == 4096 and kind == "corrupt":
            tensor = tensor.clone()
            tensor[-1] ^= 1
        send(self, tensor, destination)

    def bad_sum(self: Any, tensor: Any) -> Any:
        result = all_reduce(self, tensor)
        result.view(-1)[-1] += 1
        return result

    def fail(self: Any) -> None:
        raise RuntimeError("no way to the others")

    if kind == "no-group":
        communicator.warm_up = fail
    if kind in ("stop", "corrupt"):
        communicator.send = bad_send
    elif kind == "wrong-sum":
        communicator.all_reduce = bad_sum


def break_checkpoint(module: Any) -> None:
    """A file system that hangs."""
    if kind == "sleep":
        module.read_json = lambda *_, **__: time.sleep(600)


def break_torch(module: Any) -> None:
    """Another version."""
    if kind == "torch":
        module.__version__ = "2.0.0"


def break_engine(module: Any) -> None:
    """A defect in the middle of a run."""
    if kind not in ("raise", "endless", "slow"):
        return
    original, calls = module.Engine.verify_forward, 0

    def changed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if kind == "slow":
            time.sleep(0.05)
        elif calls >= 6:  # warm-up verifies up to three times
            if kind == "raise":
                raise ZeroDivisionError("one of the defects\nof this world")
            while True:
                time.sleep(0.01)
        return original(*arguments)

    module.Engine.verify_forward = changed


def break_training(module: Any) -> None:
    """A step that does not end, or not well. With one micro batch a rank in each step."""
    if kind not in ("endless-step", "raise-in-step"):
        return
    original, calls = module.Eagle3Method.losses, 0

    def changed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4 and kind == "raise-in-step":
            raise MemoryError("no room for\nthis batch")
        while calls == 4:
            time.sleep(0.01)
        return original(*arguments)

    module.Eagle3Method.losses = changed


def break_training_watch(module: Any) -> None:
    """Less patience: a rank that waits for another one keeps a core busy."""
    if kind == "endless-step":
        module.STILL_FACTOR = 3


BREAKERS = {
    "launch.train.watch": break_training_watch,
    "trtrun.tools.training.methods.eagle3": break_training,
    "trtrun.engine.runner": break_engine,
    "parallel.transports.mpi": break_mpi,
    "trtrun.weights.checkpoint": break_checkpoint,
    "launch.jobs.check.inventory": break_checkpoint,  # has the name already, where it was imported before
    "torch": break_torch,
}


class BreakingFinder(importlib.abc.MetaPathFinder):
    """Lets the breaker of a module run behind its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, as the base has it."""
        if name not in BREAKERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_break(module: ModuleType) -> None:
            execute(module)
            BREAKERS[name](module)

        loader.exec_module = execute_and_break
        return spec


if rank and os.environ.get("OMPI_COMM_WORLD_RANK", "alone") == rank:
    for name in BREAKERS.keys() & sys.modules.keys():  # of a rank that was forked from a process that has them
        BREAKERS[name](sys.modules[name])
    sys.meta_path.insert(0, BreakingFinder())
