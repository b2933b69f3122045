"""Tries what connects ranks: checksummed messages through communicators and the control plane, and how fast they go.

Every message carries who sent it, its number and a checksum over all of it; sums and gathers are compared with what
they have to be. A probe always finishes the whole exchange and then says what was wrong, so that no peer is left
waiting. It knows ranks and bytes; it knows no model, and not what the links are for.
"""

from __future__ import annotations

import statistics
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy
import torch

from parallel.communicator import Communicator
from parallel.control import ControlPlane
from parallel.errors import CommunicatorError, ControlPlaneError
from parallel.groups import Groups
from parallel.topology import Topology

QUICK_SIZES = (64, 65536)
"""Bytes of the messages that every start of a job tries: a short one, and one that MPI hands over in parts."""

SIZES = (64, 4096, 65536, 1 << 20)
"""Bytes of the messages of a thorough check: a verdict, a plan, a layer's sum, draft_probs."""

LATENCY_BYTES = 8
BANDWIDTH_BYTES = 4 << 20
LATENCY_ROUNDS = 50
BANDWIDTH_ROUNDS = 5

_HEADER = struct.Struct("<IIII")  # checksum of all that follows, sender, number, bytes of the whole message
_PING = struct.Struct("<4sIIII")  # mark, who is to answer, number, bytes of the message behind it and of the answer
_PING_MARK, _TIME_MARK, _END_MARK = b"ping", b"time", b"end!"


@dataclass(frozen=True)
class Timing:
    """How fast a link is.

    Attributes:
        latency_s: seconds that a message of LATENCY_BYTES takes one way; of a sum, until every rank has it.
        bytes_per_s: of messages of BANDWIDTH_BYTES one way; of a sum, the tensor's bytes over its time.
    """

    latency_s: float
    bytes_per_s: float


def seal(sender: int, number: int, size: int) -> bytes:
    """A message of `size` bytes (16 at least) of noise behind a header that vouches for it."""
    noise = numpy.random.default_rng((sender, number, size)).bytes(size - _HEADER.size)
    rest = struct.pack("<III", sender, number, size) + noise
    return struct.pack("<I", zlib.crc32(rest)) + rest


def break_reason(message: bytes, sender: int, number: int, size: int) -> str | None:
    """Why `message` is not the one that `seal` made for these numbers; None when it is."""
    if len(message) != size:
        return f"{len(message)} bytes came where {size} were due"
    checksum, *found = _HEADER.unpack_from(message)
    if checksum != zlib.crc32(message[4:]):
        return "its checksum is wrong: bytes were changed on the way"
    if found != [sender, number, size]:
        return f"it is message {found[1]} of rank {found[0]}, not message {number} of rank {sender}"
    return None


def verify_group(communicator: Communicator, sizes: Sequence[int] = SIZES) -> list[str]:
    """Use every collective with tensors of these sizes, and compare each element with what it has to be. Collective.

    Returns:
        What was wrong on this rank, one text each.
    """
    faults: list[str] = []
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            faults += _verify_collectives(communicator, size, dtype)
    return faults


def _verify_collectives(communicator: Communicator, size: int, dtype: torch.dtype) -> list[str]:
    """One size and dtype. The numbers are small and whole, so that sums are exact in every order."""
    count = max(1, size // dtype.itemsize)
    device, ranks = communicator.device, range(communicator.size)

    def pattern(rank: int) -> torch.Tensor:
        return ((torch.arange(count) * 5 + rank) % 7).to(dtype)

    every = torch.stack([pattern(rank) for rank in ranks])
    own = pattern(communicator.rank).to(device)
    due = every.float().sum(dim=0).to(dtype)
    found = {
        "all_reduce": (communicator.all_reduce(own.clone()), due),
        "all_gather": (communicator.all_gather(own), every),
    }
    for root in ranks:
        gathered = communicator.gather(own, root)
        if gathered is not None:
            found[f"gather at rank {root}"] = (gathered, every)
        tensor = own if communicator.rank == root else torch.zeros_like(own)
        found[f"broadcast of rank {root}"] = (communicator.broadcast(tensor.clone(), root), pattern(root))
    return [
        f"{name} of {size} bytes ({str(dtype).removeprefix('torch.')}): {wrong} of {due.numel()} elements are wrong"
        for name, (result, due) in found.items()
        if (wrong := int((result.cpu() != due).sum()))
    ]


def verify_pair(communicator: Communicator, peer: int, sizes: Sequence[int] = SIZES) -> list[str]:
    """Exchange checksummed messages with one other rank of the group, which calls it for this one.

    Returns:
        What was wrong with those that came to this rank, one text each.
    """
    faults: list[str] = []
    own = communicator.rank
    for number, size in enumerate(sizes):
        sent = torch.frombuffer(bytearray(seal(own, number, size)), dtype=torch.uint8).to(communicator.device)
        received = torch.zeros(size, dtype=torch.uint8, device=communicator.device)
        for source in sorted((own, peer)):
            if source == own:
                communicator.send(sent, peer)
            else:
                communicator.recv(received, peer)
        reason = break_reason(received.cpu().numpy().tobytes(), peer, number, size)
        if reason is not None:
            faults.append(f"message of {size} bytes: {reason}")
    return faults


def verify_groups(groups: Groups, topology: Topology, rank: int) -> None:
    """Try every group of this rank quickly: its collectives, and messages between all workers. Collective.

    Args:
        groups: of this rank, just opened.
        topology: who sits where.
        rank: this process's world rank.

    Raises:
        CommunicatorError: something came through wrong, after all is exchanged.
    """
    faults: list[str] = []
    for communicator in groups.opened():
        faults += [f"{communicator.name}: {fault}" for fault in verify_group(communicator, QUICK_SIZES[-1:])]
    workers = topology.worker_ranks
    # All ranks walk the pairs alike, so that no two wait for each other.
    for first, second in combinations(range(len(workers)), 2):
        if groups.workers is not None and groups.workers.rank in (first, second):
            peer = second if groups.workers.rank == first else first
            wrong = verify_pair(groups.workers, peer, QUICK_SIZES)
            faults += [f"from rank {workers[peer]}: {fault}" for fault in wrong]
    if faults:
        raise CommunicatorError(f"what came to rank {rank} is wrong: {'; '.join(faults)}")


def measure_pair(communicator: Communicator, peer: int) -> Timing:
    """Time messages there and back with one other rank of the group, which calls it for this one."""

    def bounce(tensor: torch.Tensor) -> Callable[[], None]:
        def once() -> None:
            for sends in (communicator.rank < peer, communicator.rank > peer):
                if sends:
                    communicator.send(tensor, peer)
                else:
                    communicator.recv(tensor, peer)

        return once

    return _time(communicator, bounce, ways=2)


def measure_all_reduce(communicator: Communicator) -> Timing:
    """Time sums over the group. Collective."""

    def reduce(tensor: torch.Tensor) -> Callable[[], None]:
        def once() -> None:
            communicator.all_reduce(tensor)

        return once

    return _time(communicator, reduce, ways=1)


def _time(communicator: Communicator, prepare: Callable[[torch.Tensor], Callable[[], None]], ways: int) -> Timing:
    """Medians of a short and of a long message; the first of each is not counted."""
    seconds = []
    for size, rounds in ((LATENCY_BYTES, LATENCY_ROUNDS), (BANDWIDTH_BYTES, BANDWIDTH_ROUNDS)):
        once = prepare(torch.zeros(size // 4, dtype=torch.float32, device=communicator.device))
        taken = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            once()
            if communicator.device.type == "cuda":
                torch.cuda.synchronize(communicator.device)
            taken.append(time.perf_counter() - started)
        seconds.append(statistics.median(taken[1:]) / ways)
    return Timing(seconds[0], BANDWIDTH_BYTES / seconds[1])


def probe_control(
    control: ControlPlane, rank: int, sizes: Sequence[int], until: Callable[[], bool]
) -> tuple[list[str], Timing]:
    """Exchange checksummed plans and reports with one worker while every worker is in `answer_control`.

    Args:
        control: at the orchestrator.
        rank: world rank of the worker.
        sizes: bytes of the messages.
        until: ends the wait for an answer when it returns true.

    Returns:
        What was wrong with the answers, and how fast they came: half of a short plan and its answer, and a long answer
        to a short plan.

    Raises:
        ControlPlaneError: `until` ended the wait.
    """
    faults: list[str] = []

    def ask(plan: bytes) -> bytes:
        control.publish(plan)
        report = control.collect(until=until)
        if report is None:
            raise ControlPlaneError(f"rank {rank} does not answer")
        return report.payload

    def time_answer(size: int) -> float:
        plan = _PING.pack(_TIME_MARK, rank, 0, 0, size)
        started = time.perf_counter()
        ask(plan)
        return time.perf_counter() - started

    for number, size in enumerate(sizes):
        answer = ask(_PING.pack(_PING_MARK, rank, number, size, size) + seal(control.rank, number, size))
        reason = break_reason(answer, rank, number, size)
        if reason is not None:
            faults.append(f"report of {size} bytes: {reason}")
    short = statistics.median(time_answer(LATENCY_BYTES) for _ in range(LATENCY_ROUNDS))
    long = statistics.median(time_answer(BANDWIDTH_BYTES) for _ in range(BANDWIDTH_ROUNDS))
    return faults, Timing(short / 2, BANDWIDTH_BYTES / max(long - short / 2, 1e-9))


def end_control(control: ControlPlane) -> None:
    """Let every worker leave `answer_control`. At the orchestrator."""
    control.publish(_PING.pack(_END_MARK, 0, 0, 0, 0))


def answer_control(control: ControlPlane) -> list[str]:
    """Answer `probe_control` until `end_control`. At a worker.

    Returns:
        What was wrong with the plans that came to this rank, one text each.
    """
    faults: list[str] = []
    while (plan := control.receive(None)) is not None:
        mark, rank, number, plan_size, report_size = _PING.unpack_from(plan)
        if mark == _TIME_MARK:
            if rank == control.rank:
                control.report(bytes(report_size))
            continue
        if mark != _PING_MARK:
            break
        reason = break_reason(plan[_PING.size :], 0, number, plan_size)
        if reason is not None:
            faults.append(f"plan of {plan_size} bytes: {reason}")
        if rank == control.rank:
            control.report(seal(control.rank, number, report_size))
    return faults
