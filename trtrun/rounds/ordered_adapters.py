"""Adapters that ranks read beside the rounds, and put into a slot between two of them: the orders on their way from the
orchestrator, who has read what, and the thread that reads.

One adapter is loaded at a time. It is put into its slot once every rank has read it, and nowhere where one could not.
It knows numbers, ranks and threads. It does not know files, or who asks for adapters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from trtrun.errors import CheckpointError
from trtrun.rounds.round import Worker
from trtrun.wire.adapter_loads import AdapterOrder, decode_read, encode_order, encode_read

logger = logging.getLogger(__name__)


class AdapterReading:
    """One adapter that a rank reads in a thread of its own."""

    def __init__(self, worker: Worker, name: str, path: Path) -> None:
        """Begin.

        Args:
            worker: of the rank.
            name: of the adapter, for people.
            path: of its directory.
        """
        self.problem = ""
        self._worker, self._name, self._path = worker, name, path
        self._fill: Callable[[int], None] | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._read, name="adapter", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until it is read, or cannot be, `seconds` at most; whether it is."""
        return self._is_over.wait(seconds)

    @property
    def is_over(self) -> bool:
        """Whether it is read, or cannot be: `problem` says so then."""
        return self._is_over.is_set()

    def install(self, slot: int) -> None:
        """Fill a slot that no row has with what was read. In the thread of the rounds."""
        assert self._fill is not None
        self._worker.install_adapter(self._name, slot, self._fill)

    def _read(self) -> None:
        try:
            self._fill = self._worker.read_adapter(self._name, self._path)
        except CheckpointError as error:
            self.problem = str(error)
        except BaseException as error:  # among them panics of the library that reads files
            logger.exception("an adapter could not be read")
            self.problem = f"{self._path} could not be read ({type(error).__name__}: {error})"
        self._is_over.set()


class OrderedAdapters:
    """At the orchestrator: the adapter that is being loaded, and which ranks have answered."""

    def __init__(self) -> None:
        self._number = 0
        self._answers: dict[int, str] = {}

    def begin(self, name: str, path: Path) -> bytes:
        """The message that has all ranks read an adapter."""
        self._number += 1
        self._answers = {}
        return encode_order(AdapterOrder(self._number, name, path))

    def note(self, rank: int, payload: bytes) -> None:
        """A rank has read one, or could not."""
        number, problem = decode_read(payload)
        if number == self._number:
            self._answers[rank] = problem

    def problems(self, num_ranks: int, lost_ranks: frozenset[int]) -> list[str] | None:
        """What is wrong, rank by rank, once all ranks have answered; None until then.

        Args:
            num_ranks: that take plans, lost ones left out.
            lost_ranks: whose answers do not count.
        """
        answers: Mapping[int, str] = {rank: told for rank, told in self._answers.items() if rank not in lost_ranks}
        if len(answers) < num_ranks:
            return None
        return [told for _, told in sorted(answers.items()) if told]

    def end(self, slot: int) -> bytes:
        """The message that has what was read put into a slot, or forgotten where that is 0."""
        return encode_order(AdapterOrder(self._number, slot=slot))


class AdapterDesk:
    """At an engine rank: the adapter that it was told to read."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._reading: AdapterReading | None = None
        self._number = 0
        self._is_due = False

    def take(self, order: AdapterOrder) -> None:
        """Do as a message says: begin to read, which does not wait; fill the slot, or forget what was read."""
        if order.path is not None:
            self._reading = AdapterReading(self._worker, order.name, order.path)
            self._number, self._is_due = order.number, True
            return
        reading, self._reading, self._is_due = self._reading, None, False
        if order.slot and reading is not None:
            reading.install(order.slot)

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        return self._is_due

    def has_answer(self) -> bool:
        """Whether `take_answers` has one. Cheap."""
        return self._is_due and self._reading is not None and self._reading.is_over

    def take_answers(self) -> list[bytes]:
        """Messages to the orchestrator: one, once the adapter is read."""
        if not self.has_answer():
            return []
        assert self._reading is not None
        self._is_due = False
        return [encode_read(self._number, self._reading.problem)]
