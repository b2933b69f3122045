"""One test body for every transport: solo, MPI, and NCCL where there is CUDA; under mpirun with 1 to 5 ranks."""

from __future__ import annotations

import time

import pytest
import torch
from communicators import same_bits, sample, strided, total
from jobs import SIZE
from mpi4py import MPI

from parallel.communicator import DTYPES, Communicator
from parallel.errors import CommunicatorError
from parallel.transports import open_communicator
from parallel.transports.mpi import PIECE_BYTES, MpiCommunicator
from parallel.transports.solo import SoloCommunicator

pytestmark = pytest.mark.mpi

# The last has more than SLICED_BYTES in every dtype of two bytes and more, and does not divide by 3, 4 or 5.
SHAPES = [(), (1,), (7,), (1, 256), (6, 1024), (0, 8), (3, 0), (211, 631)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_is_the_sum_in_place_and_equal_on_all_ranks(communicator: Communicator, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        expected = total(communicator.size, shape, dtype)
        for layout in (torch.Tensor.contiguous, strided):
            tensor = layout(sample(communicator.rank, shape, dtype).to(communicator.device))
            result = communicator.all_reduce(tensor)
            assert result is tensor
            assert same_bits(result, expected), (shape, dtype)
            everywhere = communicator.all_gather(result)
            assert all(same_bits(one, result) for one in everywhere)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if SIZE <= 3 else [], ids=str)
def test_sums_of_many_and_of_large_tensors_keep_little_memory(world: MPI.Intracomm, dtype: torch.dtype) -> None:
    """A group of two gathers whole tensors: prefills of every length come by, each in a shape of its own."""
    communicator = MpiCommunicator(world.Dup(), "test")
    for rows in (3, 2 * PIECE_BYTES // (1024 * dtype.itemsize) + 5, *range(1000, 1040, 4), 3):
        expected = total(communicator.size, (rows, 1024), dtype)
        assert same_bits(communicator.all_reduce(sample(communicator.rank, (rows, 1024), dtype)), expected), rows
    assert 0 < communicator._memory.numel() <= communicator.size * PIECE_BYTES
    held = {buffer[0].address for buffer in (gathered.buffer for gathered in communicator._gathered.values())}
    assert len(held - {communicator._memory.data_ptr()}) <= 1  # large ones hold nothing
    communicator.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_stacks_the_ranks_in_order(communicator: Communicator, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        expected = torch.stack([sample(rank, shape, dtype) for rank in range(communicator.size)])
        own = sample(communicator.rank, shape, dtype).to(communicator.device)
        for layout in (torch.Tensor.contiguous, strided):
            result = communicator.all_gather(layout(own))
            assert same_bits(result, expected)
            assert result.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_gives_every_rank_its_part_of_each(communicator: Communicator, dtype: torch.dtype) -> None:
    rank, size = communicator.rank, communicator.size
    for shape in SHAPES:
        sent = [torch.stack([sample(source, shape, dtype, salt) for salt in range(size)]) for source in range(size)]
        for layout in (torch.Tensor.contiguous, strided):
            result = communicator.all_to_all(layout(sent[rank].to(communicator.device)))
            assert same_bits(result, torch.stack([everything[rank] for everything in sent]))
            assert result.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_stacks_the_ranks_at_the_root_alone(communicator: Communicator, dtype: torch.dtype) -> None:
    for root in range(communicator.size):
        for shape in SHAPES:
            expected = torch.stack([sample(rank, shape, dtype) for rank in range(communicator.size)])
            own = sample(communicator.rank, shape, dtype).to(communicator.device)
            for layout in (torch.Tensor.contiguous, strided):
                result = communicator.gather(layout(own), root)
                assert (result is None) == (communicator.rank != root)
                if result is not None:
                    assert same_bits(result, expected)
                    assert result.is_contiguous()


def test_all_gather_makes_a_new_tensor_each_time(communicator: Communicator) -> None:
    first = communicator.all_gather(torch.zeros(3, device=communicator.device))
    communicator.all_gather(torch.ones(3, device=communicator.device))
    assert not first.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_copies_the_roots_tensor_in_place(communicator: Communicator, dtype: torch.dtype) -> None:
    for root in range(communicator.size):
        for shape in SHAPES:
            for layout in (torch.Tensor.contiguous, strided):
                tensor = layout(sample(communicator.rank, shape, dtype).to(communicator.device))
                assert communicator.broadcast(tensor, root) is tensor
                assert same_bits(tensor, sample(root, shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_send_and_recv_reach_every_rank_from_every_rank(communicator: Communicator, dtype: torch.dtype) -> None:
    for source in range(communicator.size):
        for destination in range(communicator.size):
            if source == destination:
                continue
            for salt, shape in enumerate(SHAPES):
                expected = sample(source, shape, dtype, salt)
                for layout in (torch.Tensor.contiguous, strided):
                    if communicator.rank == source:
                        communicator.send(layout(expected.to(communicator.device)), destination)
                    elif communicator.rank == destination:
                        blank = layout(torch.zeros(shape, dtype=dtype, device=communicator.device))
                        assert communicator.recv(blank, source) is blank
                        assert same_bits(blank, expected)


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_pair_keep_their_order_large_and_small(communicator: Communicator) -> None:
    sizes = [1, 300_000, 2, 70_000, 3]
    if communicator.rank == 0:
        for salt, size in enumerate(sizes):
            message = sample(0, (size,), torch.float32, salt).to(communicator.device)
            for destination in range(1, communicator.size):
                communicator.send(message, destination)
    else:
        for salt, size in enumerate(sizes):
            received = communicator.recv(torch.zeros(size, device=communicator.device), 0)
            assert same_bits(received, sample(0, (size,), torch.float32, salt))


def test_a_sent_tensor_may_be_overwritten_at_once(communicator: Communicator) -> None:
    peers = [rank for rank in range(communicator.size) if rank != 0]
    tensor = torch.zeros(100_000, device=communicator.device)
    for value in range(5):
        if communicator.rank == 0:
            for peer in peers:
                tensor.fill_(value)
                communicator.send(tensor, peer)
                tensor.fill_(-1)
        else:
            assert communicator.recv(tensor, 0).eq(value).all()


def test_wrong_peers_dtypes_and_devices_are_refused(communicator: Communicator) -> None:
    note = torch.ones(1, device=communicator.device)
    for peer in (communicator.rank, -1, communicator.size):
        with pytest.raises(CommunicatorError):
            communicator.send(note, peer)
        with pytest.raises(CommunicatorError):
            communicator.recv(note, peer)
    with pytest.raises(CommunicatorError):
        communicator.broadcast(note, communicator.size)
    with pytest.raises(CommunicatorError):
        communicator.gather(note, communicator.size)
    with pytest.raises(CommunicatorError, match="ranks exchange as many parts"):
        communicator.all_to_all(torch.ones(communicator.size + 1, device=communicator.device))
    for wrong in (note.to(torch.float64), torch.ones(1, device="meta")):
        for operation in (communicator.all_reduce, communicator.all_gather, communicator.all_to_all):
            with pytest.raises(CommunicatorError):
                operation(wrong)


@pytest.mark.mpi(min_size=2)
def test_a_message_of_another_size_than_the_plan_says_is_an_error(world: MPI.Intracomm) -> None:
    communicator = MpiCommunicator(world.Dup(), "target")
    if world.rank == 1:
        communicator.send(torch.ones(3), 0)
    elif world.rank == 0:
        with pytest.raises(CommunicatorError, match="rank 1 sent 12 bytes where 16 were due"):
            communicator.recv(torch.zeros(4), 1)
    communicator.close()


@pytest.mark.mpi(min_size=2)
def test_two_communicators_over_the_same_ranks_never_mix(world: MPI.Intracomm) -> None:
    first = open_communicator(torch.device("cpu"), world, "first")
    second = open_communicator(torch.device("cpu"), world, "second")
    if world.rank == 0:
        first.send(torch.tensor([1]), 1)
        second.send(torch.tensor([2]), 1)
    elif world.rank == 1:
        assert second.recv(torch.tensor([0]), 0).item() == 2
        assert first.recv(torch.tensor([0]), 0).item() == 1
    assert first.all_reduce(torch.tensor([1])).item() == world.size
    first.close()
    assert second.all_reduce(torch.tensor([2])).item() == 2 * world.size
    second.close()


def test_the_transport_is_chosen_by_device_and_size(world: MPI.Intracomm) -> None:
    opened = open_communicator(torch.device("cpu"), world, "group")
    assert isinstance(opened, SoloCommunicator if world.size == 1 else MpiCommunicator)
    assert isinstance(opened, Communicator)
    assert (opened.rank, opened.size, opened.name) == (world.rank, world.size, "group")
    opened.close()


@pytest.mark.parametrize("size", [3] if SIZE == 3 else [])  # all wait alike
def test_a_rank_that_waits_for_a_message_sleeps(world: MPI.Intracomm, size: int) -> None:
    communicator = open_communicator(torch.device("cpu"), world, "group")
    if world.rank == 0:
        time.sleep(1.0)  # the work that the others wait for
        for peer in range(1, world.size):
            communicator.send(torch.ones(1), peer)
    else:
        wall, processor = time.perf_counter(), time.process_time()
        communicator.recv(torch.zeros(1), 0)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        assert wall > 0.5
        assert processor / wall < 0.3
    communicator.close()
