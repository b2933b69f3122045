"""Messages over MPI that are on their way, with requests that are played: which are freed, and when."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.mpi_rank import FAULT_TOLERANCE_VARIABLE
from parallel.sends import Sends


class LostError(Exception):
    def Get_error_class(self) -> int:
        return 75


@dataclass
class Request:
    """Of one message. MPI_Test would fail it, and free it, where its rank is gone; that rank may have taken it."""

    is_complete: bool = False
    fails: bool = False
    is_freed: bool = False

    def Get_status(self) -> bool:
        return self.is_complete

    def Test(self) -> bool:
        assert self.is_complete and not self.is_freed
        self.is_freed = True
        if self.fails:
            raise LostError
        return True


@dataclass
class Group:
    ranks: list[int]

    def Get_size(self) -> int:
        return len(self.ranks)

    def Free(self) -> None:
        """Nothing."""


@dataclass
class Comm:
    """Of some ranks, of which those in `lost` are gone."""

    sent: list[Request] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def Isend(self, what: Any, rank: int, tag: int) -> Request:
        self.sent.append(Request())
        return self.sent[-1]

    def Get_failed(self) -> Group:
        return Group(self.lost)

    def Get_group(self) -> Group:
        return Group([0, 1, 2, 3])


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    translating = SimpleNamespace(Translate_ranks=lambda lost, places, everyone: [lost.ranks[it] for it in places])
    classes = dict(ERR_PROC_FAILED=75, ERR_PROC_FAILED_PENDING=76, ERR_REVOKED=77)
    played = SimpleNamespace(BYTE=None, Exception=LostError, Group=translating, **classes)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=played))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", played)
    monkeypatch.setenv(FAULT_TOLERANCE_VARIABLE, "1")
    return Comm()


def test_messages_are_freed_once_they_are_sent_in_their_order(comm: Comm) -> None:
    sends = Sends(comm)  # type: ignore[arg-type]
    for rank in (1, 2):
        sends.post(rank, 7, b"four")
    first, second = comm.sent
    second.is_complete = True
    assert (sends.are_over(), sends.num_unsent_bytes(), second.is_freed) == (False, 8, False)
    first.is_complete = True
    assert (sends.are_over(), sends.num_unsent_bytes(), first.is_freed, second.is_freed) == (True, 0, True, True)


def test_a_message_to_a_lost_rank_is_given_up_and_never_freed(comm: Comm) -> None:
    """It may have been taken: Open MPI would find it failed and freed, and end the job."""
    sends = Sends(comm)  # type: ignore[arg-type]
    for rank in (1, 2):
        sends.post(rank, 7, b"four")
    comm.lost.append(1)
    comm.sent[1].is_complete = True
    assert sends.are_over() and not comm.sent[0].is_freed and comm.sent[1].is_freed
    comm.sent[0].is_complete = True
    sends.post(2, 7, b"")
    assert not sends.are_over() and not comm.sent[0].is_freed


def test_a_message_that_fails_or_is_forgotten_is_over(comm: Comm) -> None:
    sends = Sends(comm)  # type: ignore[arg-type]
    for rank in (1, 3):
        sends.post(rank, 7, b"four")
    comm.sent[0].is_complete = comm.sent[0].fails = True
    assert (sends.are_over(), sends.num_unsent_bytes()) == (False, 4)
    sends.forget({3})
    assert sends.are_over() and not comm.sent[1].is_freed


def test_no_rank_is_asked_for_where_a_job_ends_with_each(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_TOLERANCE_VARIABLE)
    sends = Sends(comm)  # type: ignore[arg-type]
    comm.lost.append(1)
    sends.post(1, 7, b"four")
    assert not sends.are_over()
