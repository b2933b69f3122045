"""A test that goes wrong on one rank: which one, and how, is said by the environment. Not collected by itself."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

KIND = os.environ.get("FAILING_KIND", "none")
HERE = MPI.COMM_WORLD.rank == int(os.environ.get("FAILING_RANK", "-1"))

pytestmark = pytest.mark.mpi

if KIND == "collection" and HERE:
    raise RuntimeError("broken while collecting")


@pytest.fixture
def resource():
    if KIND == "setup" and HERE:
        raise RuntimeError("broken while setting up")
    yield
    if KIND == "teardown" and HERE:
        raise RuntimeError("broken while tearing down")


def test_before() -> None:
    MPI.COMM_WORLD.Barrier()


@pytest.mark.timeout(5 if KIND == "hang" else 60)
def test_failing(resource: None) -> None:
    if HERE:
        assert KIND != "assert", "broken in the test"
        if KIND == "skip":
            pytest.skip("one rank skips alone")
        if KIND == "exit":
            os._exit(3)
        if KIND == "hang":
            MPI.COMM_SELF.recv(source=0)
    if KIND != "skip":
        # The others wait for the broken rank where no message of it will ever come.
        MPI.COMM_WORLD.Barrier()


def test_after() -> None:
    MPI.COMM_WORLD.Barrier()
