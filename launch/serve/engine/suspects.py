"""Which requests may be what ends engines: told from who was in work when engines were lost.

Most engines are lost for reasons of their own, and requests go on with the next one. A request that loses engine after
engine without a token in between is suspected:

- alone in work, it is given up behind the second engine in a row;
- beside others, the engine behind the second gets the suspects one at a time, each once the one before has a token or
  has ended, so that a third loss shows which one it was.

Requests that came together, the prompts of one client's request, are one: they are alone together, and given up
together.

It knows requests and numbers of engines. It does not know connections or processes, or what restarts are counted for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launch.serve.engine.open_requests import OpenRequest

LOSSES_ALONE = 2
"""Engines in a row that a request may lose without a token in between, and without another one in work."""

MOST_LOSSES = 3
"""The same beside other requests. No more than the restarts that a server has by default: the others go on."""

_END = "it is not tried again"


@dataclass(frozen=True)
class Blame:
    """A request that is given up, with those that came with it.

    Attributes:
        group: of them.
        engines: numbers of those that it has ended.
        is_certain: whether nothing else was in work; else it is once another request gets on.
        reason: what its reader is told.
    """

    group: str
    engines: frozenset[int]
    is_certain: bool
    reason: str


class Suspects:
    """What is known of one engine after the other.

    Attributes:
        engine: number of the one that is there, or was there last.
    """

    def __init__(self) -> None:
        self.engine = 0
        self._waiting: deque[str] = deque()
        self._tried: str | None = None

    def begin(self, requests: Mapping[str, OpenRequest]) -> list[OpenRequest]:
        """An engine is there: which requests it gets now. `next_behind` tells of the others."""
        self.engine += 1
        suspects = [opened for opened in requests.values() if len(opened.lost) >= MOST_LOSSES - 1]
        self._waiting = deque(opened.request_id for opened in suspects[1:])
        self._tried = suspects[0].request_id if suspects else None
        return self._had(requests)

    def next_behind(self, request_id: str, requests: Mapping[str, OpenRequest]) -> OpenRequest | None:
        """A request has a token, or has ended: which one the engine gets for that."""
        if request_id != self._tried:
            return None
        self._tried = None
        while self._waiting:
            opened = requests.get(self._waiting.popleft())
            if opened is not None:
                self._tried = opened.request_id
                return opened
        return None

    def lose(self, requests: Mapping[str, OpenRequest]) -> list[Blame]:
        """The engine is gone: who of those that go on is given up."""
        had = self._had(requests)
        self._waiting.clear()
        self._tried = None
        was_alone = len({opened.group for opened in requests.values()}) == 1
        for opened in had:
            opened.lose_engine(self.engine, was_alone)
        blames = [blame for opened in had if (blame := _judge(opened)) is not None]
        return list({blame.group: blame for blame in blames}.values())

    def find_culprit(self, engines: Collection[int | None], requests: Mapping[str, OpenRequest]) -> Blame | None:
        """The request that was alone in work when each of several engines was lost, whatever it got in between.

        Args:
            engines: their numbers, None for those that were never there.
            requests: that go on.
        """
        ended = frozenset(engine for engine in engines if engine is not None)
        if len(ended) < LOSSES_ALONE or None in engines:
            return None
        for opened in requests.values():
            if ended <= opened.lost_alone:
                reason = f"the engine ended {len(ended)} times while it had this request alone: {_END}"
                return Blame(opened.group, ended, True, reason)
        return None

    def _had(self, requests: Mapping[str, OpenRequest]) -> list[OpenRequest]:
        """Those that the engine has got so far."""
        waiting = set(self._waiting)
        return [opened for opened in requests.values() if opened.request_id not in waiting]


def _judge(opened: OpenRequest) -> Blame | None:
    """Whether a request is given up for the engines that it has lost."""
    alone = frozenset(opened.lost) & opened.lost_alone
    count = len(opened.lost)
    if len(alone) >= LOSSES_ALONE:
        had = "had this request alone" if len(alone) == count else "had this request"
        return Blame(opened.group, alone, True, f"the engine ended {count} times in a row while it {had}: {_END}")
    if count >= MOST_LOSSES:
        reason = f"the engine ended {count} times in a row while it had this request: {_END}"
        return Blame(opened.group, frozenset(opened.lost), False, reason)
    return None
