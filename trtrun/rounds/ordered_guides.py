"""Guides that ranks build before rows need them: the orders on their way from the orchestrator, and who has built what.

A guide is built once every rank has said so that takes plans; those that keep no matchers say so at once. It knows
numbers and ranks. It does not know who waits for guides, or how they are built.
"""

from __future__ import annotations

from trtrun.core.guide import GuideStart
from trtrun.guiding.row_guides import RowGuides
from trtrun.scheduling.guide_books import GuideOrders
from trtrun.wire.guide_orders import GuideMessage, decode_built, encode_built, encode_orders


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
        return encode_orders(GuideMessage(over, begun))

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
