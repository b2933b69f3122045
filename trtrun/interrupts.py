"""Ctrl-C is held back while something must not be left half done, and one thread at a time does it.

It knows signals and threads, and nothing of what is protected.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, where its handler runs as usual. A second one gets through at once.

    Only the main thread hears signals: in others this does nothing. So does it where SIGINT is ignored, or where
    something other than Python handles it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            handler(number, frame)
        else:
            held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # else the block has set another one, which stays
            signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held.pop())


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
