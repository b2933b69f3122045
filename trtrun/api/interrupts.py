"""Ctrl-C is held back while something must not be left half done, and one thread at a time does it."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class _Handler:
    """SIGINT's handler while interrupts may be held back.

    Attributes:
        depth: blocks of `held_interrupts` that have begun and not ended.
        held: the signal that came meanwhile, as its handler gets it.
    """

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before
        self.depth = 0
        self.held: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.depth and self.held is None:
            self.held = (number, frame)
            return
        self.held = None
        self.before(number, frame)


_handler: _Handler | None = None
"""Set while ours is SIGINT's handler. Only the main thread looks at it: no other hears signals."""


@contextmanager
def listening() -> Iterator[None]:
    """Make `held_interrupts` cheap inside: changing a signal's handler takes microseconds, too long for every round."""
    global _handler
    before = signal.getsignal(signal.SIGINT) if _is_main_thread() and _handler is None else None
    if not callable(before):  # not the main thread; listening already; or SIGINT is ignored, or not Python's
        yield
        return
    handler = _handler = _Handler(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        _handler = None
        if signal.getsignal(signal.SIGINT) is handler:  # else the block has set another one, which stays
            signal.signal(signal.SIGINT, before)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, where its handler runs as usual. A second one gets through at once.

    Only the main thread hears signals: in others this does nothing. So does it where SIGINT is ignored, or where
    something other than Python handles it.
    """
    if not _is_main_thread():
        yield
    elif _handler is None:
        with listening(), _hold():
            yield
    else:
        with _hold():
            yield


@contextmanager
def _hold() -> Iterator[None]:
    handler = _handler
    if handler is None:
        yield
        return
    handler.depth += 1
    try:
        yield
    finally:
        handler.depth -= 1
        if handler.held is not None and not handler.depth:
            held, handler.held = handler.held, None
            handler.before(*held)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class FairLock:
    """A lock that threads get in the order in which they asked: nobody takes it again and again while others wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    def try_acquire(self) -> bool:
        """Take the lock if it is free and nobody waits for it; whether it was taken."""
        with self._guard:
            if self._is_taken or self._waiting:
                return False
            self._is_taken = True
            return True

    def __enter__(self) -> FairLock:
        if self.try_acquire():
            return self
        ticket = threading.Lock()
        ticket.acquire()
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return self
            self._waiting.append(ticket)
        try:
            ticket.acquire()  # until `release` hands the lock over
        except BaseException:
            with self._guard:
                was_handed_over = ticket not in self._waiting
                if not was_handed_over:
                    self._waiting.remove(ticket)
            if was_handed_over:
                self.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Hand the lock to whoever has waited longest, or leave it free."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
