"""Small messages between engine ranks on the host: sent without waiting, looked for without waiting.

What one engine tells the other in a round (draft tokens one way, verdicts the other) is a few hundred bytes that the
host of the receiver needs to know anyway. As messages they can be looked for: a rank whose peer is late, stuck or dead
goes on without it, which no collective and no receive on a device allows. They also arrive where NCCL's kernels would
have to wait for a turn on the device.

Where MPI outlives its ranks (`parallel.mpi_rank`), a rank that is gone is one whose messages do not come. It carries
bytes under a tag and never looks inside. It knows ranks of the world, and no role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from parallel.mpi_rank import is_lost_peer
from parallel.sends import Sends
from parallel.waiting import Waiter, wait_until

if TYPE_CHECKING:
    from mpi4py import MPI


class Mailbox(Protocol):
    """One rank's end. Messages between two ranks under one tag keep their order."""

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        """Send `payload` to the world rank `rank`, without waiting.

        Args:
            rank: the receiver.
            tag: 0 to 32766.
            payload: any number of bytes.
        """
        ...

    def num_unsent_bytes(self) -> int:
        """Bytes of what was posted to any rank and did not leave this one yet."""
        ...

    def take(self, rank: int, tag: int) -> bytes | None:
        """The oldest message from `rank` under `tag` that was not taken yet; None where there is none now."""
        ...

    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        """Wait for the next message from `rank` under `tag`.

        Args:
            rank: the sender.
            tag: of the message.
            timeout: seconds; None waits for ever.
            until: ends the wait when it returns true; asked as often as for the message.

        Returns:
            The message; None when the timeout passed, or `until` ended the wait.
        """
        ...

    def close(self) -> None:
        """Wait until what was posted is sent, or has come to a rank that closes, too, which drops it. Collective; not
        used afterwards."""
        ...


_END_TAG = 2**15 - 1
"""The largest that every MPI has: no message follows."""


class MpiMailbox(Mailbox):
    """A mailbox over MPI; see the protocol."""

    def __init__(self, comm: MPI.Intracomm, may_spin: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Take over `comm`, a duplicate of the world that nobody else uses; `close` frees it.

        Args:
            comm: the world's ranks.
            may_spin: whether waiting may keep a core busy for as long as a message usually takes.
            ranks: those that post and take; None for all.
        """
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        users = set(range(comm.size) if ranks is None else ranks)
        self._others = users - {comm.rank} if comm.rank in users else set[int]()
        # A rank that is gone is to be an error of the call that needs it, not the end of this process.
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._status = MPI.Status()
        self._waiters: defaultdict[tuple[int, int], Waiter] = defaultdict(lambda: Waiter(may_spin))
        self._sends = Sends(comm)

    @override
    def post(self, rank: int, tag: int, payload: bytes) -> None:
        self._sends.post(rank, tag, payload)

    @override
    def num_unsent_bytes(self) -> int:
        return self._sends.num_unsent_bytes()

    @override
    def take(self, rank: int, tag: int) -> bytes | None:
        try:
            return self._take(rank, tag)
        except self._mpi.Exception as error:
            if not is_lost_peer(error):
                raise
            return None

    def _take(self, rank: int, tag: int) -> bytes | None:
        """Take a message as `take` does; raises MPI's error where `rank` is gone."""
        message = self._comm.Improbe(rank, tag, self._status)
        if message is None:
            return None
        buffer = bytearray(self._status.Get_count(self._mpi.BYTE))
        # The sender's part of a message that is too long to be sent at once is under way.
        wait_until(message.Irecv((buffer, self._mpi.BYTE)).Test)
        return bytes(buffer)

    @override
    def wait(
        self, rank: int, tag: int, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> bytes | None:
        found: list[bytes] = []

        def look() -> bool:
            message = self.take(rank, tag)
            if message is not None:
                found.append(message)
            return message is not None or (until is not None and until())

        self._waiters[rank, tag].wait(look, timeout)
        return found[0] if found else None

    @override
    def close(self) -> None:
        for rank in self._others:
            self.post(rank, _END_TAG, b"")
        waiting = set(self._others)

        def is_over() -> bool:
            # A long message leaves its sender once somebody takes it: the last draft may be for a round that is over.
            waiting.difference_update([rank for rank in waiting if self._drop_from(rank)])
            return self._sends.are_over() and not waiting

        wait_until(is_over)
        if self._comm != self._mpi.COMM_NULL:
            self._comm.Free()

    def _drop_from(self, rank: int) -> bool:
        """Drop what came from `rank`; whether it is gone, or no message follows."""
        try:
            while self._take(rank, self._mpi.ANY_TAG) is not None:
                if self._status.Get_tag() == _END_TAG:
                    return True
            return False
        except self._mpi.Exception as error:
            if not is_lost_peer(error):
                raise
            return True
