"""Sums add in the order of the ranks, for every size, dtype, place and way: on every kind of communicator.

Long variants have many calls; without them the tests see the same paths.
"""

from __future__ import annotations

import random

import pytest
import torch
from communicators import add_in_order, same_bits, sample, strided, total
from gpus import lacking
from mpi4py import MPI

from parallel.communicator import Communicator
from parallel.transports import open_communicator
from parallel.transports.nccl import NcclCommunicator, why_not
from parallel.transports.peer_all_reduce import Layout, PeerAllReduce
from parallel.transports.peer_memory import open_peer_memory
from parallel.transports.sums import MEASURED_BYTES, Way
from trtrun.kernels.arguments import RankSum

pytestmark = pytest.mark.mpi

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Around what a thread, a block and a way take; odd, so that the last words are not full.
COUNTS = [1, 2, 3, 5, 8, 511, 2047, 2049, 4099, 32_769, 70_001, 131_071]
LARGE = 1_500_001


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, at an address that no vector of 16 bytes begins at."""
    place = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return place.copy_(tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_any_size_and_place_are_in_the_order_of_the_ranks(
    communicator: Communicator, dtype: torch.dtype
) -> None:
    for count in (*COUNTS, LARGE):
        expected = total(communicator.size, (count,), dtype)
        own = sample(communicator.rank, (count,), dtype).to(communicator.device)
        for place in (torch.Tensor.contiguous, shifted, strided):
            tensor = place(own.clone())
            assert communicator.all_reduce(tensor) is tensor
            assert same_bits(tensor, expected), (count, place.__name__)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_part_of_a_message_has_the_bits_that_it_has_in_the_whole(
    communicator: Communicator, dtype: torch.dtype
) -> None:
    batch = sample(communicator.rank, (320, 1024), dtype).to(communicator.device)
    together = communicator.all_reduce(batch.clone())
    for rows in (1, 2, 3, 7, 48, 129, 319):
        start = (rows * 37) % (320 - rows)
        alone = communicator.all_reduce(batch[start : start + rows].clone())
        assert same_bits(alone, together[start : start + rows]), rows


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_order_of_the_ranks_shows_and_tiny_numbers_are_kept(communicator: Communicator, dtype: torch.dtype) -> None:
    """Large numbers that cancel make every other order another sum; the smallest ones are subnormal."""
    limits = torch.finfo(dtype)
    large = (limits.max / 16, -limits.max / 16, 1.0, limits.eps, 3.0, -1.0, limits.eps / 2, 7.0)
    tiny = limits.smallest_normal / 8
    parts = []
    for rank in range(communicator.size):
        turned = large[rank % 8 :] + large[: rank % 8]
        parts.append(torch.tensor([*turned, tiny, -tiny, tiny * (rank + 1), -0.0] * 100, dtype=dtype))
    expected = add_in_order(parts)
    assert same_bits(communicator.all_reduce(parts[communicator.rank].to(communicator.device)), expected)


def test_calls_of_all_sizes_follow_each_other_without_waiting(communicator: Communicator) -> None:
    """What one call leaves behind must not reach another: nothing here waits for the device before the end."""
    device, size = communicator.device, communicator.size
    cases = [
        (sample(communicator.rank, (count,), dtype, salt).to(device), total(size, (count,), dtype, salt).to(device))
        for salt in range(2)
        for count in COUNTS
        for dtype in FLOATS
    ]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    draw = random.Random(7)  # the same on all ranks
    for _ in range(300 if device.type == "cpu" else 10_000):  # on the CPU each waits for its peers anyway
        own, expected = draw.choice(cases)
        wrong += (communicator.all_reduce(own.clone()) != expected).sum()
    assert wrong.item() == 0


def test_graphs_are_replayed_between_other_calls(communicator: Communicator) -> None:
    if communicator.device.type != "cuda":
        pytest.skip(lacking("a communicator of GPUs"))
    device, size, rank = communicator.device, communicator.size, communicator.rank
    counts = [5, 8192, 32_769, 262_144]
    inputs = [torch.zeros(count, dtype=torch.bfloat16, device=device) for count in counts]
    outputs = [torch.zeros_like(tensor) for tensor in inputs]

    def work() -> None:
        for tensor, output in zip(inputs, outputs, strict=True):
            output.copy_(communicator.all_reduce(tensor.clone()))

    with torch.cuda.device(device):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        own = [[sample(rank, (count,), torch.bfloat16, salt).to(device) for count in counts] for salt in range(4)]
        due = [[total(size, (count,), torch.bfloat16, salt).to(device) for count in counts] for salt in range(4)]
        for turn in range(100):
            for tensor, new in zip(inputs, own[turn % 4], strict=True):
                tensor.copy_(new)
            graph.replay()
            beside = communicator.all_reduce(own[(turn + 1) % 4][turn % 3].clone())
            wrong += (beside != due[(turn + 1) % 4][turn % 3]).sum()
            for output, expected in zip(outputs, due[turn % 4], strict=True):
                wrong += (output != expected).sum()
        assert wrong.item() == 0
        graph.reset()


def test_every_way_makes_the_same_sum(communicator: Communicator) -> None:
    if not isinstance(communicator, NcclCommunicator):
        pytest.skip(lacking("a communicator with several ways to sum"))
    for dtype in FLOATS:
        for count in (3, 4096, 30_001, LARGE):
            expected = total(communicator.size, (count,), dtype)
            for way in communicator._ways.candidates(count * dtype.itemsize):
                message = sample(communicator.rank, (count,), dtype).to(communicator.device)
                communicator._ways._ways[way](message)
                assert same_bits(message, expected), (way, count)


def test_times_are_known_alike_on_all_ranks(communicator: Communicator, world: MPI.Intracomm) -> None:
    timings = communicator.sum_timings
    if not isinstance(communicator, NcclCommunicator) or communicator.size == 1:
        assert timings == ()
        return
    assert [timing.nbytes for timing in timings] == list(MEASURED_BYTES)
    for timing in timings:
        assert Way.NCCL in timing.microseconds
        assert timing.way in timing.microseconds
        assert timing.way == communicator._ways.choose(timing.nbytes)
    assert all(other == timings for other in world.allgather(timings))


def test_a_group_can_be_opened_again_and_again(world: MPI.Intracomm) -> None:
    device = torch.device("cuda", world.rank % max(1, torch.cuda.device_count()))
    if why_not(device):
        device = torch.device("cpu")
    free = []
    for turn in range(8):
        communicator = open_communicator(device, world, "again")
        count = COUNTS[-1 if turn % 2 else 7]  # NCCL takes memory by the size of a message, too
        tensor = sample(communicator.rank, (count,), torch.bfloat16, turn).to(device)
        assert same_bits(communicator.all_reduce(tensor), total(world.size, (count,), torch.bfloat16, turn))
        communicator.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            world.Barrier()
            free.append(torch.cuda.mem_get_info(device)[0])
            world.Barrier()
    lost = [before - behind for before, behind in zip(free[2:4], free[-2:], strict=True)]
    assert max(lost, default=0) < Layout.of(max(2, world.size)).nbytes, free


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_summed_on_the_way_to_a_norm(communicator: Communicator, dtype: torch.dtype) -> None:
    """With the bits of a sum and a norm, one behind the other and between other sums; also in a graph."""
    peers = communicator.peer_rows
    if peers is None:
        pytest.skip("needs GPUs that reach each other's memory")
    from trtrun.kernels.triton.fused import add_and_normalise, add_and_normalise_rounded
    from trtrun.kernels.triton.rank_sums import sum_and_normalise, sum_and_normalise_rounded, takes

    device, rank = communicator.device, communicator.rank
    shapes = [(rows, size) for size in (512, 600, 4096, 5120, 8192) for rows in (1, 2, peers.rows)]
    assert all(takes(torch.empty(shape, dtype=dtype), peers) for shape in shapes)
    for shape in ((peers.rows + 1, 512), (1, 2 * peers.words + 2), (1, 513), (1, 256)):
        assert not takes(torch.empty(shape, dtype=dtype), peers)
    streams = [sample(9, shape, dtype, 1).to(device) for shape in shapes]  # the same on all ranks
    parts = [sample(rank, shape, dtype).to(device) for shape in shapes]
    weights = [sample(9, shape[1:], dtype, 2).to(device) for shape in shapes]
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def compare(index: int) -> torch.Tensor:
        """How many numbers differ."""
        plain, summed, part = streams[index].clone(), streams[index].clone(), parts[index]
        total = communicator.all_reduce(part.clone())
        expected = add_and_normalise(plain, total, weights[index], 1e-5)
        made = sum_and_normalise(summed, RankSum(part, communicator), weights[index], 1e-5)
        found = (made.view(torch.int16) != expected.view(torch.int16)).sum()
        return found + (plain.view(torch.int16) != summed.view(torch.int16)).sum()

    draw = random.Random(5)  # the same on all ranks
    with torch.cuda.device(device):
        for index in (*range(len(shapes)), *draw.choices(range(len(shapes)), k=2000)):
            wrong += compare(index)
        for index in (0, shapes.index((1, 4096))):
            rounded = add_and_normalise_rounded(
                streams[index].clone(), communicator.all_reduce(parts[index].clone()), weights[index], 1e-5
            )
            delta = RankSum(parts[index], communicator)
            made = sum_and_normalise_rounded(streams[index].clone(), delta, weights[index], 1e-5)
            size = shapes[index][1]
            wrong += (made.codes[:, :size].view(torch.uint8) != rounded.codes[:, :size].view(torch.uint8)).sum()
            wrong += (made.scale != rounded.scale).sum()
        graph = torch.cuda.CUDAGraph()
        in_graph = torch.zeros_like(wrong)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for index in range(len(shapes)):
                in_graph += compare(index)
        for turn in range(100):
            graph.replay()
            wrong += compare(turn % len(shapes))
        assert wrong.item() == 0 and in_graph.item() == 0
        graph.reset()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first_call", [2**24 - 30, 2**31 - 30, 2**32 - 30], ids=hex)
def test_numbers_of_calls_wrap(world: MPI.Intracomm, first_call: int) -> None:
    device = torch.device("cuda", world.rank % max(1, torch.cuda.device_count()))
    if why_not(device):
        pytest.skip(lacking("CuPy and NCCL"))
    layout = Layout.of(world.size)
    memory = open_peer_memory(world, device, layout.nbytes)
    if memory is None:
        pytest.skip("needs GPUs that reach each other's memory")
    sums = PeerAllReduce(memory, layout, world.rank, device, first_call)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in range(100):
        count = COUNTS[turn % 9]
        expected = total(world.size, (count,), torch.float16, turn).to(device)
        for add in (sums.one_shot, sums.two_shot):
            message = sample(world.rank, (count,), torch.float16, turn).to(device)
            add(message)
            wrong += (message != expected).sum()
    assert wrong.item() == 0
    memory.close()
