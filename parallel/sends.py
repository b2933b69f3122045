"""Messages over MPI that are on their way, until they are sent, or the ranks that they are for are gone.

A message is only looked at until it is complete. MPI_Test would mark one to a rank that is gone as failed, and free it;
and where that rank had taken it just before, Open MPI 5.0.10 and 5.0.11 find a failed message that is free, and end the
job ("Send error after request freed", with status 7). It does not know what bytes mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

from parallel.mpi_rank import is_lost_peer, outlives_ranks

if TYPE_CHECKING:
    from mpi4py import MPI


class _Send(NamedTuple):
    """A message. MPI reads the payload until the request is complete."""

    rank: int
    request: MPI.Request
    payload: bytes


class Sends:
    """The messages of one communicator that are not sent yet, in their order.

    Args:
        comm: whose errors are returned.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, comm
        self._may_lose_ranks = outlives_ranks()
        self._waiting: deque[_Send] = deque()
        self._given_up: list[_Send] = []  # kept for ever: MPI may still read from their buffers

    def post(self, rank: int, tag: int, payload: bytes) -> None:
        """Send without waiting. To a rank that is gone nothing is sent."""
        try:
            self._waiting.append(_Send(rank, self._comm.Isend((payload, self._mpi.BYTE), rank, tag), payload))
        except self._mpi.Exception as error:
            if not is_lost_peer(error):
                raise
        self.are_over()

    def are_over(self) -> bool:
        """Whether all messages are sent, or never will be; what is, is forgotten."""
        while self._waiting and self._is_over(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def num_unsent_bytes(self) -> int:
        """Bytes of messages that are not over."""
        self.are_over()
        return sum(len(one.payload) for one in self._waiting)

    def forget(self, ranks: Set[int]) -> None:
        """Ask no more for what is on its way to these ranks."""
        self._given_up += [one for one in self._waiting if one.rank in ranks]
        self._waiting = deque(one for one in self._waiting if one.rank not in ranks)

    def _is_over(self, one: _Send) -> bool:
        if one.request.Get_status():
            try:
                one.request.Test()  # which frees it
            except self._mpi.Exception as error:
                if not is_lost_peer(error):
                    raise
            return True
        if self._may_lose_ranks and one.rank in self._lost_ranks():
            self._given_up.append(one)
            return True
        return False

    def _lost_ranks(self) -> list[int]:
        """The communicator's ranks that this one knows to be gone: half a microsecond where there are none."""
        lost = self._comm.Get_failed()
        count = lost.Get_size()
        if not count:
            lost.Free()
            return []
        everyone = self._comm.Get_group()
        ranks = self._mpi.Group.Translate_ranks(lost, range(count), everyone)
        lost.Free()
        everyone.Free()
        return list(ranks)
