"""A gate in a stream: what is enqueued behind it waits for numbers that the host has yet to learn.

So a host enqueues all of its work before it knows what the work is about, and the device goes on within microseconds
of the host's word. The kernel (`device_gate.cu`) is compiled by CuPy's NVRTC at first use and kept by CuPy on disk. It
reads pinned memory of the host, and it stops waiting after some seconds: whatever becomes of the host, the stream ends.

It knows numbers. It does not know what they mean, nor who opens the gate.
"""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_THREADS = 256
_OPENINGS = 2**31 - 1
"""That letters tell apart; 0 is what they bear before the first."""


class DeviceGate:
    """A gate of one device. For one stream, and one opening at a time: the host must know that the stream is past the
    one before when it opens the next."""

    def __init__(self, device: torch.device, most_numbers: int) -> None:
        """Compile the kernel.

        Args:
            device: a CUDA device.
            most_numbers: that are handed over at once.
        """
        self._device = device
        self._letters = torch.zeros(most_numbers, dtype=torch.int64, pin_memory=True)
        self._words: npt.NDArray[np.int64] = self._letters.numpy()
        cupy: Any = importlib.import_module("cupy")
        source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
        with torch.cuda.device(device), cupy.cuda.Device(torch.cuda.current_device()):
            self._module = cupy.RawModule(code=source, options=("-std=c++17",))
            self._kernel = int(self._module.get_function("pass_gate").kernel.ptr)
        self._driver: Any = importlib.import_module("cupy.cuda").driver

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        """Enqueue the wait for an opening on torch's current stream. Does not wait.

        Args:
            opening: its number, at least 0; another one than those of the last rounds.
            count: how many numbers it hands over.
            most_seconds: after which the stream goes on without them.

        Returns:
            [count] int64 on the device: the numbers, or zeros where the wait was given up.

        Raises:
            ValueError: more numbers than the gate has room for.
        """
        if count > len(self._words):
            raise ValueError(f"{count} numbers do not go through a gate for {len(self._words)}")
        values = torch.empty(count, dtype=torch.int64, device=self._device)
        if not count:
            return values
        most = int(most_seconds * 1e9)
        numbers = (self._letters.data_ptr(), values.data_ptr(), count, _mark(opening), most)
        array = (ctypes.c_uint64 * len(numbers))(*numbers)
        first = ctypes.addressof(array)
        places = (ctypes.c_void_p * len(numbers))(*range(first, first + 8 * len(numbers), 8))
        with torch.cuda.device(self._device):  # the driver wants its context to be the current one
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._driver.launchKernel(
                self._kernel, 1, 1, 1, _THREADS, 1, 1, 0, stream, ctypes.addressof(places), 0
            )  # fmt: skip
        return values

    def open(self, opening: int, numbers: npt.NDArray[np.int64]) -> None:
        """Let the stream go on.

        Args:
            opening: what `enqueue` was or will be told.
            numbers: [count] int64, each of 32 bits with its sign.
        """
        self._words[: len(numbers)] = (numbers & 0xFFFFFFFF) | (np.int64(_mark(opening)) << 32)


def _mark(opening: int) -> int:
    """What letters of an opening bear: never 0."""
    return opening % _OPENINGS + 1
