"""A device that does what was enqueued piece by piece, in turns that are drawn at random (own_turns.py), and
what the kernels of a gate do there: they read a few of the host's letters each turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from hashed_texts import DRAFT_LEN, GUESSES, MAX_ROWS
from own_turns import Turns

from parallel.transports.device_gate import DeviceGate, Question, _mark
from trtrun.core.nouns import RoundPlan
from trtrun.wire.reports import ReportArrays, RoundTimes

Work = Generator[None, None, Any]


class Device:
    """A stream: what was enqueued is done in order, a piece each turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._enqueued: deque[Work] = deque()
        self.is_over = False

    def enqueue(self, work: Work) -> None:
        self._enqueued.append(work)

    def run(self) -> None:
        """Until there is nothing left, once it is over."""
        while self._enqueued or not self.is_over:
            if self._enqueued:
                try:
                    next(self._enqueued[0])
                except StopIteration:
                    self._enqueued.popleft()
            self._turns.give_way()


class SlowGate(DeviceGate):
    """The host's side of a gate, and what the kernels do on a device, which reads a few letters each turn."""

    def __init__(self, turns: Turns, device: Device, seen: Counter[str]) -> None:
        self._words = np.zeros(MAX_ROWS * (1 + DRAFT_LEN), dtype=np.int64)
        self._table_words = np.zeros((2, 2 + GUESSES * (3 + DRAFT_LEN)), dtype=np.int64)
        self._turns = turns
        self._stream = device
        self._seen = seen

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        values = torch.full((count,), -99)

        def work() -> Work:
            yield from self._pass(values, opening, self._turns.now + most_seconds)

        self._stream.enqueue(work())
        return values

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        values = torch.full((len(question.rows) * (1 + question.width),), -99)
        self._stream.enqueue(self._look_up(values, opening, question, most_seconds))
        return values

    def _await(self, words: np.ndarray, at: int, opening: int, end: float) -> Generator[None, None, int | None]:
        while int(words[at]) >> 32 != _mark(opening):
            if self._turns.now >= end:
                return None
            yield
        return int(np.int64(words[at]).astype(np.int32))

    def _pass(self, values: torch.Tensor, opening: int, end: float) -> Generator[None, None, bool]:
        for at in (len(values) - 1, *range(len(values))):
            number = yield from self._await(self._words, at, opening, end)
            if number is None:
                values.zero_()
                self._seen["given up"] += 1
                return False
            values[at] = number
            if self._turns.random.random() < 0.2:
                yield
        return True

    def _load(self, words: np.ndarray, opening: int, end: float) -> Generator[None, None, list[list[int]]]:
        head, numbers = [], []
        for at in range(2):
            head.append((yield from self._await(words, at, opening, end)))
        if None in head:
            return []
        count, width = head[0] or 0, 3 + (head[1] or 0)
        for at in range(2, 2 + count * width):
            numbers.append((yield from self._await(words, at, opening, end)))
            if self._turns.random.random() < 0.1:
                yield
        if None in numbers:
            return []
        return [cast(list[int], numbers[at : at + width]) for at in range(0, count * width, width)]

    def _look_up(self, values: torch.Tensor, opening: int, question: Question, most: float) -> Work:
        end, words = self._turns.now + most, self._table_words[opening % 2]
        is_open, is_told = False, False
        while not (is_open or is_told) and self._turns.now < end:
            is_open = int(self._words[len(values) - 1]) >> 32 == _mark(opening)
            is_told = not is_open and int(words[0]) >> 32 == _mark(opening)
            yield
        entries = (yield from self._load(words, opening, end)) if is_told else []
        answers, missing = [], 0
        for row, wanted, line in question.rows.tolist():
            count = int(question.counts[line]) if line >= 0 else 0
            key = [row, count - 1, int(question.lines[line, count - 1])] if count > 0 else []
            found = next((entry[3 : 3 + max(wanted, 0)] for entry in entries if entry[:3] == key), [])
            answers.append(found)
            missing += wanted > 0 and not found
        if not entries or (missing and missing >= question.fewest_missing):
            yield from self._pass(values, opening, end)
            return
        self._seen["found"] += 1
        self._seen["sat out"] += missing
        values.zero_()
        for of_row, found in zip(values.view(-1, 1 + question.width), answers, strict=True):
            of_row[0] = len(found)
            of_row[1 : 1 + len(found)] = torch.tensor(found)


@dataclass
class DecidedOnDevice:
    """A VerdictRound that is decided on the device."""

    turns: Turns
    plan: RoundPlan
    broken: list[bool]
    arrays: list[np.ndarray]
    may_be_followed = True

    def is_done(self) -> bool:
        return bool(self.arrays)

    def release(self) -> None:
        """Nothing waits."""

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        self.turns.wait(self.is_done)
        return np.where(self.broken, 0, self.arrays[0]), self.arrays[1]

    def finish(self) -> ReportArrays:
        counts, tokens = self.numbers()
        return ReportArrays(
            self.plan.round_index, RoundTimes(verifying=0.01), counts, np.maximum(self.arrays[2], 0), tokens
        )
