"""Says what each µs of a plain token is, on every rank that has a device: products, other kernels, or nothing.

    python -m scripts.bench.gpu_bench.kernel_times CONFIG FOLDER TOKENS

It starts the ranks of the configuration, as `trtrun` does. torch's profiler notes every kernel; of one row's tokens the
first and the last few are left out. Each rank writes FOLDER/rank-N.json. On CPU ranks operations of torch stand for
kernels.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
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


def time_tokens(llm: LLM, max_tokens: int) -> dict[str, int]:
    """Complete one row twice; of the second time the span that counts: nanoseconds since the epoch, and its tokens."""
    from trtrun import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for _ in range(2):
        moments = [time.time_ns() for chunk in llm.stream(PROMPT, sampling) if chunk.token_ids]
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
    import torch
    from torch.profiler import ProfilerActivity

    from launch.batch.run import load_llm
    from parallel.mpi_rank import find_mpi_rank

    folder, mpi_rank = Path(sys.argv[2]), find_mpi_rank()
    rank = 0 if mpi_rank is None else mpi_rank.rank
    slot = job.topology.slot(rank)
    is_cuda = slot is not None and slot.device.startswith("cuda")
    # From the start on: kernels in a graph are told of where the profiler was there when it was captured.
    profile = torch.profiler.profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU])
    if slot is not None:
        profile.start()
    try:
        with load_llm(job.spec) as llm:
            (folder / WINDOW).write_text(json.dumps(time_tokens(llm, int(sys.argv[3]))), encoding="utf-8")
        finish_mpi()
    except SystemExit as end:  # of a rank that has served
        if end.code:
            raise
    if slot is not None:
        profile.stop()
        window = json.loads((folder / WINDOW).read_text(encoding="utf-8"))
        found = {"rank": rank, "device": slot.device, **describe(read_kernels(profile, is_cuda), window)}
        (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
