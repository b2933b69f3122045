"""Ranks as threads of which one runs at a time, in an order that is drawn at random, with a clock of their own: a
seed gives one run. Whoever waits lets others run; a run in which nobody gets further is a hang, and ends."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable

_TURN_SECONDS = 1e-3


class Ended(BaseException):
    """In a thread whose run is over, because another one failed."""


class Turns:
    """Who runs.

    Attributes:
        random: what is drawn in a run.
        now: seconds.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._threads: dict[str, threading.Thread] = {}
        self._mays: dict[str, threading.Semaphore] = {}
        self._weights: dict[str, float] = {}
        self._back = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._is_over = False
        self._own = threading.local()

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Have `run` take turns from now on."""

        def body() -> None:
            self._own.name = name
            try:
                self._await_turn(name)
                run()
            except Ended:
                pass
            except BaseException as error:
                self._errors.append(error)
            finally:
                del self._mays[name]
                self._back.release()

        self._mays[name] = threading.Semaphore(0)
        self._threads[name] = threading.Thread(target=body, daemon=True)
        self._threads[name].start()

    def run(self, most_turns: int) -> None:
        """Give turns until all have ended.

        Raises:
            AssertionError: they have not after so many.
        """
        for number in range(most_turns):
            if not self._mays or self._errors:
                break
            if number % 50 == 0:  # for a while one is slow, and another one fast
                self._weights = {name: self.random.choice((0.05, 1.0, 1.0, 4.0)) for name in self._mays}
            names = sorted(self._mays)
            name = self.random.choices(names, [self._weights.get(one, 1.0) for one in names])[0]
            self.now += _TURN_SECONDS * self.random.random()
            self._mays[name].release()
            self._back.acquire()
        hung = [] if self._errors else sorted(self._mays)
        self._is_over = True
        for name in sorted(self._mays):
            self._mays[name].release()
            self._back.acquire()
        if self._errors:
            raise self._errors[0]
        assert not hung, f"{hung} wait for ever"

    def give_way(self) -> None:
        """Let others run."""
        self._back.release()
        self._await_turn(self._own.name)

    def wait(self, test: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let others run until `test` is true, or so many seconds have passed; whether it is."""
        start = self.now
        while not test():
            if timeout is not None and self.now - start >= timeout:
                return test()
            self.give_way()
        return True

    def _await_turn(self, name: str) -> None:
        self._mays[name].acquire()
        if self._is_over:
            raise Ended


class Post:
    """Messages on their way between ranks. Those from one rank to another under one tag keep their order."""

    def __init__(self, turns: Turns, most_seconds: float) -> None:
        self._turns = turns
        self._most_seconds = most_seconds
        self._sent: defaultdict[tuple[int, int, int], deque[tuple[float, bytes]]] = defaultdict(deque)

    def send(self, source: int, target: int, tag: int, payload: bytes) -> None:
        """It is there some time later."""
        queue, drawn = self._sent[source, target, tag], self._turns.random
        quick = self._most_seconds * drawn.choice((0.0, 0.02, 0.1, 1.0)) * drawn.random()
        queue.append((max(self._turns.now + quick, queue[-1][0] if queue else 0.0), payload))

    def take(self, source: int, target: int, tag: int) -> bytes | None:
        """What is there of it."""
        queue = self._sent[source, target, tag]
        return queue.popleft()[1] if queue and queue[0][0] <= self._turns.now else None

    def count_untaken(self, source: int, target: int, tag: int) -> int:
        """Messages that are there."""
        return sum(there <= self._turns.now for there, _ in self._sent[source, target, tag])


class Letterbox:
    """One rank's parallel.mailbox.Mailbox."""

    def __init__(self, post: Post, turns: Turns, rank: int) -> None:
        self._post = post
        self._turns = turns
        self._rank = rank

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        """Send a message."""
        self._post.send(self._rank, rank, tag, payload)
        self._turns.give_way()

    def num_unsent_bytes(self) -> int:
        """Bytes that are on their way: none, as a message arrives at once."""
        return 0

    def take(self, rank: int, tag: int) -> bytes | None:
        """A message that has come, or None."""
        return self._post.take(rank, self._rank, tag)

    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        """A message, once it has come, or None."""
        found: list[bytes] = []

        def look() -> bool:
            if (message := self.take(rank, tag)) is not None:
                found.append(message)
            return bool(found) or (until is not None and until())

        self._turns.wait(look, timeout)
        return found[0] if found else None

    def close(self) -> None:
        """There is nothing to end."""
