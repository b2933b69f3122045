"""Work beside that of the current stream begins behind what came before, and whatever comes next is behind both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from gpus import needs_gpu

from trtrun.kernels.torch import cuda
from trtrun.kernels.torch.cuda import beside

DEVICE = torch.device("cuda", 0)


class Stream:
    """Notes what it is told."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams are told."""
    told: list[str] = []
    current, side = Stream("current", told), Stream("side", told)

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        told.append(f"on {one.name}")
        yield
        told.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cuda, "side_stream", lambda stream: side)
    return told


@pytest.mark.parametrize("fails", [False, True])
def test_both_are_waited_for(notes: list[str], fails: bool) -> None:
    """Also where the block fails: its memory goes to others then."""
    with suppress(ZeroDivisionError), beside(lambda: notes.append("work"), DEVICE):
        notes.append("block")
        if fails:
            raise ZeroDivisionError
    begun = ["side waits for current", "on side", "work", "back"]
    assert notes == [*begun, "block", "current waits for side"]


@needs_gpu
def test_each_stream_has_one_of_its_own() -> None:
    found = []
    one, other = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    for stream in (one, other, one):
        with torch.cuda.stream(stream), beside(lambda: found.append(torch.cuda.current_stream().cuda_stream), DEVICE):
            assert torch.cuda.current_stream() == stream
    assert found[0] == found[2] != found[1]
    assert not {one.cuda_stream, other.cuda_stream} & set(found)
