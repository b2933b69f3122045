"""A gate in a stream: what is enqueued behind it waits for numbers that the host has yet to learn.

So a host enqueues all of its work before it knows what the work is about, and the device goes on within microseconds
of the host's word. Where the numbers follow from what the device computes before the gate, the host may send a table of
answers ahead, and the device goes on at once where its answers are there. The kernels (`device_gate.cu`) are compiled
by CuPy's NVRTC at first use and kept by CuPy on disk. They read pinned memory of the host, and stop waiting after some
seconds: whatever becomes of the host, the stream ends.

It knows numbers. It does not know what they mean, nor who opens the gate.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_THREADS = 256
_OPENINGS = 2**31 - 1
"""Openings that letters tell apart; 0 is what they bear before the first."""

KEY_NUMBERS = 3
"""Numbers of a table's entry, in front of its answer: a name, how many numbers a line has but for the last, and that
one."""

_TABLES = 2
"""The device may still read one when the next is written."""


@dataclass(frozen=True)
class Question:
    """What is looked up in a table for some rows.

    Attributes:
        rows: [rows, 3] int64 on the device: a name, how many numbers of an answer are wanted, and which of the lines
            belongs to it; -1 for none.
        counts: [lines] int64 on the device: how many numbers of a line are there.
        lines: [lines, any] int64 on the device, contiguous.
        width: numbers of an answer, at most.
        fewest_missing: where so many rows that want an answer have none, or more, the opening is waited for.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    lines: torch.Tensor
    width: int
    fewest_missing: int


class DeviceGate:
    """A gate of one device. For one stream, and one opening at a time: the host must know that the stream is past the
    one before when it opens the next, and past the last but one when it sends a table."""

    def __init__(self, device: torch.device, most_numbers: int, most_rows: int = 0, most_in_table: int = 0) -> None:
        """Compile the kernels.

        Args:
            device: a CUDA device.
            most_numbers: that are handed over at once.
            most_rows: that look something up at once.
            most_in_table: numbers of a table, at most.
        """
        self._device = device
        self._letters = torch.zeros(most_numbers, dtype=torch.int64, pin_memory=True)
        self._words: npt.NDArray[np.int64] = self._letters.numpy()
        self._tables = torch.zeros((_TABLES, 2 + most_in_table), dtype=torch.int64, pin_memory=True)
        self._table_words: npt.NDArray[np.int64] = self._tables.numpy()
        self._entries = torch.empty(most_in_table, dtype=torch.int32, device=device)
        self._found = torch.empty(most_rows, dtype=torch.int32, device=device)
        cupy: Any = importlib.import_module("cupy")
        source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
        with torch.cuda.device(device), cupy.cuda.Device(torch.cuda.current_device()):
            self._module = cupy.RawModule(code=source, options=("-std=c++17",))
            self._pass = int(self._module.get_function("pass_gate").kernel.ptr)
            self._look_up = int(self._module.get_function("look_up").kernel.ptr)
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
        self._check(count)
        values = torch.empty(count, dtype=torch.int64, device=self._device)
        if count:
            numbers = (self._letters.data_ptr(), values.data_ptr(), count, _mark(opening), int(most_seconds * 1e9))
            array = (ctypes.c_uint64 * len(numbers))(*numbers)
            first = ctypes.addressof(array)
            self._launch(self._pass, range(first, first + 8 * len(numbers), 8))
        return values

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        """Enqueue the wait for a table that `send` was or will be given, or for an opening, on torch's current stream:
        what is there first. Does not wait.

        Args:
            opening: as `enqueue`; each is one more than the one before.
            question: what is looked up; the opening hands over as many numbers as are returned.
            most_seconds: after which the stream goes on without either.

        Returns:
            [rows * (1 + width)] int64 on the device: of each row how many numbers of its answer count, and they; zeros
            where nothing came in time.

        Raises:
            ValueError: more numbers, or rows, than the gate has room for.
        """
        rows, count = len(question.rows), len(question.rows) * (1 + question.width)
        self._check(count)
        if rows > len(self._found):
            raise ValueError(f"{rows} rows do not go through a gate for {len(self._found)}")
        values = torch.empty(count, dtype=torch.int64, device=self._device)
        if count:
            table = self._tables[opening % _TABLES]
            array = (ctypes.c_uint64 * 14)(
                self._letters.data_ptr(),
                table.data_ptr(),
                question.rows.data_ptr(),
                question.counts.data_ptr(),
                question.lines.data_ptr(),
                question.lines.shape[1],
                values.data_ptr(),
                self._entries.data_ptr(),
                self._found.data_ptr(),
                rows,
                question.width,
                question.fewest_missing,
                _mark(opening),
                int(most_seconds * 1e9),
            )  # as struct Lookup has them
            self._launch(self._look_up, [ctypes.addressof(array)])
        return values

    def open(self, opening: int, numbers: npt.NDArray[np.int64]) -> None:
        """Let the stream go on.

        Args:
            opening: what `enqueue` was or will be told.
            numbers: [count] int64, each of 32 bits with its sign.
        """
        self._words[: len(numbers)] = _letters(opening, numbers)

    def send(self, opening: int, table: npt.NDArray[np.int64]) -> None:
        """Let the stream go on where its answers are in a table.

        Args:
            opening: what `enqueue_lookup` was or will be told.
            table: [entries, KEY_NUMBERS + steps] int64, each of 32 bits with its sign; one entry at least. Of entries
                with the same key the first counts.

        Raises:
            ValueError: more numbers than the gate has room for.
        """
        entries, columns = table.shape
        words = self._table_words[opening % _TABLES]
        if table.size + 2 > len(words):
            raise ValueError(f"a table of {table.size} numbers does not go through a gate for {len(words) - 2}")
        words[2 : 2 + table.size] = _letters(opening, table.reshape(-1))
        words[:2] = _letters(opening, np.array([entries, columns - KEY_NUMBERS], dtype=np.int64))

    def _check(self, count: int) -> None:
        if count > len(self._words):
            raise ValueError(f"{count} numbers do not go through a gate for {len(self._words)}")

    def _launch(self, kernel: int, arguments: Sequence[int]) -> None:
        """Launch one block on torch's current stream; the driver copies the arguments, which are at these addresses."""
        places = (ctypes.c_void_p * len(arguments))(*arguments)
        with torch.cuda.device(self._device):  # the driver wants its context to be the current one
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._driver.launchKernel(
                kernel, 1, 1, 1, _THREADS, 1, 1, 0, stream, ctypes.addressof(places), 0
            )  # fmt: skip


def _letters(opening: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The words that bear an opening's mark beside each number."""
    return (numbers & 0xFFFFFFFF) | (np.int64(_mark(opening)) << 32)


def _mark(opening: int) -> int:
    """What letters of an opening bear: never 0."""
    return opening % _OPENINGS + 1
