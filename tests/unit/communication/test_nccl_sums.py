"""Sums and parts that NCCL moves: over a stand-in for CuPy's binding that carries bytes between threads here."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable

import pytest
import torch

from parallel.transports import sums as nccl_sums
from parallel.transports.sums import NcclSums

TYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
"""The stand-in's number of a dtype is its bytes."""


class Network:
    """Messages of each pair of ranks, in order. All queues are made before a thread starts: of two made at once for one
    pair, one would be lost with the message in it."""

    def __init__(self, size: int) -> None:
        pairs = itertools.product(range(size), repeat=2)
        self.messages: dict[tuple[int, int], queue.Queue[bytes]] = {pair: queue.Queue() for pair in pairs}


class FakeNccl:
    """CuPy's module and communicator of one rank: what is called inside a group happens at its end, sends first."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network, self._rank, self._size = network, rank, size
        self._group: list[tuple[bool, int, int, int]] | None = None

    def groupStart(self) -> None:
        self._group = []

    def groupEnd(self) -> None:
        calls, self._group = self._group, None
        assert calls is not None
        for is_send, pointer, nbytes, peer in sorted(calls, key=lambda call: not call[0]):
            assert peer != self._rank
            if is_send:
                self._network.messages[self._rank, peer].put(ctypes.string_at(pointer, nbytes))
            else:
                message = self._network.messages[peer, self._rank].get(timeout=10)
                assert len(message) == nbytes
                ctypes.memmove(pointer, message, nbytes)

    def send(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert self._group is not None, "alone, a send waits for its peer's recv"
        self._group.append((True, pointer, count * kind, peer))

    def recv(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert self._group is not None
        self._group.append((False, pointer, count * kind, peer))

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        self.groupStart()
        for peer in range(self._size):
            if peer != self._rank:
                self.send(source, count, kind, peer, stream)
                self.recv(target + peer * count * kind, count, kind, peer, stream)
        ctypes.memmove(target + self._rank * count * kind, source, count * kind)
        self.groupEnd()


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_sums, "_stream", lambda message: 0)


def on_threads(size: int, call: Callable[[NcclSums, int], object]) -> None:
    """Call each rank's sums on a thread of its own."""
    network = Network(size)

    def play(rank: int) -> None:
        fake = FakeNccl(network, rank, size)
        call(NcclSums(fake, fake, TYPES, rank, size), rank)

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sum_on_threads(way: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's result."""
    results = [part.clone() for part in parts]
    on_threads(len(parts), lambda sums, rank: getattr(sums, way)(results[rank]))
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parts_reach_the_ranks_that_they_are_for(size: int) -> None:
    sent = torch.randn(size, size, 3, 7)
    received = torch.zeros_like(sent)
    on_threads(size, lambda sums, rank: sums.all_to_all(sent[rank], received[rank]))
    assert torch.equal(received, sent.transpose(0, 1))


@pytest.mark.parametrize("way", ["gathered", "sliced"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_are_in_the_order_of_the_ranks(way: str, size: int, dtype: torch.dtype) -> None:
    for shape in ((1,), (2,), (7,), (3, 333)):  # also fewer elements than ranks
        # Large numbers that cancel, so that another order is another sum.
        generator = torch.Generator().manual_seed(size)
        table = torch.tensor([3e4, -3e4, 1.0, -1.0, 1e-3, 7.0, 0.3]).to(dtype)
        parts = [table[torch.randint(0, 7, shape, generator=generator)] for _ in range(size)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        for result in sum_on_threads(way, parts):
            assert torch.equal(result, expected.to(dtype)), shape
