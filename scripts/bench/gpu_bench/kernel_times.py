"""Says what each µs of a plain token is, on every rank that has a device: products, other kernels, or nothing.

    python -m scripts.bench.gpu_bench.kernel_times CONFIG FOLDER TOKENS

It starts the ranks of the configuration, as `trtrun` does. torch's profiler notes every kernel; of one row's tokens the
first and the last few are left out. Each rank writes FOLDER/rank-N.json. On CPU ranks operations of torch stand for
kernels.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from launch.jobs.mpi.job import Job, finish_mpi
from scripts.bench.gpu_bench.kernel_sweep import Kernel, Share, is_product, sweep
from trtrun.configuration.config import load_config

if TYPE_CHECKING:
    import torch

    from trtrun import LLM

PROMPT = [11, 222, 33, 444]
EDGE = 8
"""Tokens at the beginning and at the end that do not count."""

WINDOW = "window.json"
PATIENCE = 60.0
"""Seconds that profilers may take to begin and to end."""


class Recorder:
    """torch's profiler on this rank, which begins and ends where SIGUSR2 comes, in the thread that computes.

    It begins late: the profiler keeps so many kernels alone, and a start runs more than a row's tokens.

    Args:
        folder: where this rank says who and how far it is.
        rank: this one.
        is_cuda: whether it has a GPU.
    """

    def __init__(self, folder: Path, rank: int, is_cuda: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._folder, self._rank, self.is_cuda = folder, rank, is_cuda
        self.profile = profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU])
        self._steps = iter((("begun", self.profile.start), ("ended", self.profile.stop)))

    def listen(self) -> None:
        """Hear signals from now on."""
        signal.signal(signal.SIGUSR2, self.go_on)
        (self._folder / f"process-{self._rank}").write_text(str(os.getpid()), encoding="utf-8")

    def go_on(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Begin, and the next time end."""
        word, step = next(self._steps)
        step()
        (self._folder / f"{word}-{self._rank}").touch()


def have_all(folder: Path, word: str) -> None:
    """Have the recorders of all ranks go on, and wait until they have.

    Raises:
        TimeoutError: one has not within PATIENCE.
    """
    processes = {file.name.partition("-")[2]: int(file.read_text()) for file in folder.glob("process-*")}
    for process in processes.values():
        os.kill(process, signal.SIGUSR2)
    deadline = time.monotonic() + PATIENCE
    while not all((folder / f"{word}-{rank}").exists() for rank in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of ranks {', '.join(sorted(processes))} have {word} within {PATIENCE:g} s")
        time.sleep(0.01)


def time_tokens(llm: LLM, max_tokens: int, folder: Path) -> dict[str, int]:
    """Complete one row twice, the second time under the profilers: the span that counts, in nanoseconds since the
    epoch, and its tokens."""
    from trtrun import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    llm.generate([PROMPT], sampling)
    have_all(folder, "begun")
    moments = [time.time_ns() for chunk in llm.stream(PROMPT, sampling) if chunk.token_ids]
    have_all(folder, "ended")
    edge = min(EDGE, len(moments) // 4)
    return {"start": moments[edge], "end": moments[-1 - edge], "tokens": len(moments) - 1 - 2 * edge}


def read_kernels(profile: torch.profiler.profile, is_cuda: bool) -> list[Kernel]:
    """What ran on the device; on the CPU operations."""
    from torch.autograd import DeviceType

    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == wanted
    ]


def describe(kernels: list[Kernel], window: dict[str, int]) -> dict[str, Any]:
    """µs a token by kernel, those that take longest first.

    Where no kernel lies in the window, clocks of the device and the host differ: then as much is taken as ends with the
    last kernel.
    """
    start, end, tokens = window["start"], window["end"], window["tokens"]
    has_moved = not any(kernel.end > start and kernel.start < end for kernel in kernels)
    if has_moved:
        last = max((kernel.end for kernel in kernels), default=end)
        start, end = start + last - end, last
    shares = sweep(kernels, start, end)

    def us(nanoseconds: int) -> float:
        return round(nanoseconds / 1e3 / tokens, 3)

    def line(name: str, share: Share) -> dict[str, Any]:
        return {
            "name": name[:120], "is_product": is_product(name), "calls": round(share.calls / tokens, 2),
            "us": us(share.own), "running_us": us(share.running), "idle_behind_us": us(share.idle_behind),
        }  # fmt: skip

    longest = sorted(shares.items(), key=lambda item: -item[1].own - item[1].idle_behind)
    products = sum(share.own for name, share in shares.items() if is_product(name))
    busy = sum(share.own for share in shares.values())
    return {
        "token_us": us(end - start), "products_us": us(products), "other_kernels_us": us(busy - products),
        "idle_us": us(end - start - busy),
        "tokens": tokens, "window_has_moved": has_moved, "kernels": [line(*item) for item in longest],
    }  # fmt: skip


def main() -> int:
    """Entry of the program: mpirun's parent, or a rank."""
    config = load_config(Path(sys.argv[1]))
    job = Job(config, sys.argv[1:], module="scripts.bench.gpu_bench.kernel_times")
    status = job.enter(lambda: None)
    if status is not None:
        return status
    from launch.batch.run import load_llm
    from parallel.mpi_rank import find_mpi_rank

    folder, mpi_rank = Path(sys.argv[2]), find_mpi_rank()
    rank = 0 if mpi_rank is None else mpi_rank.rank
    slot = job.topology.slot(rank)
    recorder = None if slot is None else Recorder(folder, rank, slot.device.startswith("cuda"))
    if recorder is not None:
        recorder.listen()
    try:
        with load_llm(job.spec) as llm:
            window = time_tokens(llm, int(sys.argv[3]), folder)
            (folder / WINDOW).write_text(json.dumps(window), encoding="utf-8")
        finish_mpi()
    except SystemExit as end:  # of a rank that has served
        if end.code:
            raise
    if recorder is not None and slot is not None:
        window = json.loads((folder / WINDOW).read_text(encoding="utf-8"))
        kernels = read_kernels(recorder.profile, recorder.is_cuda)
        found = {"rank": rank, "device": slot.device, **describe(kernels, window)}
        (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
