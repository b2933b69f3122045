"""How the control plane's messages travel: over MPI without blocking, or through a queue inside one process.

A message is bytes with a tag; what tags mean is `control`'s business. Where MPI outlives its ranks, a rank that is gone
is one whose messages do not come: no call here fails for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from parallel import abort
from parallel.errors import ControlPlaneError
from parallel.mpi_rank import is_lost_peer
from parallel.sends import Sends
from parallel.waiting import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI


Wait = Callable[[Callable[[], bool], float | None], bool]
"""How to wait: `parallel.waiting.wait_until`, or `wait` of a Waiter."""


class Message(NamedTuple):
    """A message that came: the rank that sent it, its tag and its bytes."""

    source: int
    tag: int
    payload: bytes


class LocalMessages:
    """Messages of a process to itself; the same interface as `MpiMessages`."""

    def __init__(self, first_report_tag: int) -> None:
        """Begin with none. This tag and those above it are what `take` means by any."""
        self._first_report_tag = first_report_tag
        self._queue: deque[Message] = deque()

    def send(self, rank: int, tag: int, payload: bytes) -> None:
        self._queue.append(Message(rank, tag, payload))

    def take(
        self,
        source: int | None,
        tags: tuple[int, ...] | None,
        timeout: float | None,
        wait: Wait,
        until: Callable[[], bool] | None = None,
    ) -> Message | None:
        # Plans and reports share the queue, and None means reports. Nobody else can send while this process waits.
        for index, message in enumerate(self._queue):
            if message.tag in tags if tags is not None else message.tag >= self._first_report_tag:
                del self._queue[index]
                return message
        if timeout is None:
            raise ControlPlaneError("a process alone waits for a message that it has not sent itself")
        return None

    def forget(self, ranks: frozenset[int]) -> None:
        """Do nothing."""

    def flush(self, until: Callable[[], bool] | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._queue.clear()

    def begin_abort(self) -> None:
        """Do nothing."""

    def abort(self) -> NoReturn:
        """End this process."""
        raise SystemExit(1)


class MpiMessages:
    """Messages between ranks: non-blocking sends, and probes that sleep between tries."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        # A rank that is gone is to be an error of the call that needs it, not the end of this process.
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._sends = Sends(comm)
        self._forgotten: frozenset[int] = frozenset()

    def send(self, rank: int, tag: int, payload: bytes) -> None:
        """Send without waiting. To a rank that is gone nothing is sent."""
        self._sends.post(rank, tag, payload)

    def take(
        self,
        source: int | None,
        tags: tuple[int, ...] | None,
        timeout: float | None,
        wait: Wait,
        until: Callable[[], bool] | None = None,
    ) -> Message | None:
        """Wait for a message.

        Args:
            source: rank that sends it; None for any rank.
            tags: of the message; None for any tag. With more than one, the source's next message whatever its tag.
            timeout: seconds; None waits for ever.
            wait: how to wait: `wait_until`, or `wait` of a Waiter.
            until: ends the wait when it returns true.

        Returns:
            None when the wait ended without one.
        """
        rank = self._mpi.ANY_SOURCE if source is None else source
        # More than one tag: whatever the source sends next, so that the order of its messages holds.
        tag = tags[0] if tags is not None and len(tags) == 1 else self._mpi.ANY_TAG
        taken: list[Message] = []

        def take_one() -> bool:
            message = self._receive(rank, tag)
            if message is not None and message.source not in self._forgotten:
                taken.append(message)
            return bool(taken)

        wait(take_one if until is None else lambda: take_one() or until(), timeout)
        if not taken:
            return None
        self._sends.are_over()
        return taken[0]

    def _receive(self, rank: int, tag: int) -> Message | None:
        """The next message, if one is there; of a rank that is gone none is."""
        status = self._mpi.Status()
        try:
            message = self._comm.Improbe(rank, tag, status)
            if message is None:
                return None
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            # A large message may still be on its way: sleep for that, too.
            wait_until(message.Irecv((buffer, self._mpi.BYTE)).Test)
        except self._mpi.Exception as error:
            if not is_lost_peer(error):
                raise
            if rank == self._mpi.ANY_SOURCE:
                self._comm.Ack_failed()  # else every probe that finds nothing would raise this again
            return None
        return Message(source, tag, bytes(buffer))

    def forget(self, ranks: frozenset[int]) -> None:
        """Take nothing from these ranks any more, and do not wait for what is on its way to them."""
        self._forgotten |= ranks
        self._sends.forget(ranks)

    def flush(self, until: Callable[[], bool] | None = None) -> None:
        """Wait, asleep, until all messages are sent, or `until` returns true."""
        wait_until(lambda: self._sends.are_over() or (until is not None and until()))

    def close(self) -> None:
        """Free the communicator. Collective."""
        # With ranks that are gone MPI may not agree to free it; the end of the process does.
        if self._comm != self._mpi.COMM_NULL and not self._forgotten:
            self._comm.Free()

    def begin_abort(self) -> None:
        """Begin to end: this process ends soon."""
        abort.begin_ending()

    def abort(self) -> NoReturn:
        """End every rank."""
        abort.end_world()
