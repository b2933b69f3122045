"""What ranks prepare beside the rounds, by order of the orchestrator: adapters that they read, guides that they build.

One adapter is loaded at a time. It is put into its slot between two rounds, once every rank has read it, and nowhere
where one could not. A guide is built once every rank that takes plans has said so; ranks that keep no matchers say so
at once. The orchestrator's side sends orders and counts answers; a rank's desk carries them out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from trtrun.core.guide import GuideStart
from trtrun.errors import CheckpointError
from trtrun.guiding.row_guides import RowGuides
from trtrun.rounds.round import Worker
from trtrun.scheduling.guide_registry import GuideOrders
from trtrun.wire.messages import (
    AdapterOrder,
    GuideMessage,
    decode_built,
    decode_read,
    encode_adapter_order,
    encode_built,
    encode_guide_orders,
    encode_read,
)

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
        return encode_adapter_order(AdapterOrder(self._number, name, path))

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
        return encode_adapter_order(AdapterOrder(self._number, slot=slot))


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


class OrderedGuides:
    """At the orchestrator: what was ordered, and which ranks have answered."""

    def __init__(self) -> None:
        self._next_number = 0
        self._numbers: dict[GuideStart, int] = {}
        self._answers: dict[int, set[int]] = {}

    def encode(self, orders: GuideOrders) -> bytes:
        """The message that tells orders to all ranks."""
        over = [self._numbers.pop(guide) for guide in orders.over]
        for number in over:
            self._answers.pop(number, None)
        begun: dict[int, GuideStart] = {}
        for guide in orders.begun:
            begun[self._next_number] = guide
            self._numbers[guide] = self._next_number
            self._answers[self._next_number] = set()
            self._next_number += 1
        return encode_guide_orders(GuideMessage(over, begun))

    def note(self, rank: int, payload: bytes) -> None:
        """A rank has built a guide, which may have been taken back meanwhile."""
        answers = self._answers.get(decode_built(payload))
        if answers is not None:
            answers.add(rank)

    def take_built(self, num_ranks: int, lost_ranks: frozenset[int]) -> list[GuideStart]:
        """Guides that all ranks have built since the last call.

        Args:
            num_ranks: that take plans, lost ones left out.
            lost_ranks: whose answers do not count.
        """
        if not self._answers:
            return []
        built = {number for number, ranks in self._answers.items() if len(ranks - lost_ranks) >= num_ranks}
        for number in built:
            del self._answers[number]
        return [guide for guide, number in self._numbers.items() if number in built]


class GuideDesk:
    """At an engine rank: what it was told to build, and of what it has not yet said that it is built."""

    def __init__(self, guides: RowGuides | None) -> None:
        """Have guides built by `guides`; None where the rank needs none."""
        self._guides = guides
        self._ordered: dict[int, GuideStart] = {}
        self._due: list[int] = []

    def take(self, message: GuideMessage) -> None:
        """Do as a message says. Does not wait."""
        for number in message.over:
            guide = self._ordered.pop(number)
            if self._guides is not None:
                self._guides.forget(guide)
        self._due = [number for number in self._due if number in self._ordered]
        for number, guide in message.begun.items():
            self._ordered[number] = guide
            self._due.append(number)
            if self._guides is not None:
                self._guides.build(guide)

    @property
    def is_waiting(self) -> bool:
        """Whether answers are due."""
        return bool(self._due)

    def has_answer(self) -> bool:
        """Whether `take_answers` has some. Cheap."""
        return any(map(self._is_built, self._due))

    def take_answers(self) -> list[bytes]:
        """Messages to the orchestrator: of each guide that is built one."""
        built = list(filter(self._is_built, self._due))
        self._due = [number for number in self._due if number not in built]
        return [encode_built(number) for number in built]

    def _is_built(self, number: int) -> bool:
        return self._guides is None or self._guides.is_built(self._ordered[number])
