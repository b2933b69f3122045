"""CPU threads: how many cores this process may use, how many threads each slot of a host gets, and threads for native
code that recurses.

It reads the machine and the environment. It does not know what threads compute.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from parallel.topology import Topology

T = TypeVar("T")

DEEP_STACK = 128 << 20
"""Bytes of stack for native code that recurses: of address space, of which memory is taken as far as it goes."""

_stack_lock = threading.Lock()

CORES_OF_CUDA_SLOT = 2
"""Its process's main thread and a thread of the driver or of NCCL; torch's other threads have nothing to do there."""


def count_cores() -> int:
    """CPU cores that this process may use: its affinity mask, and the quota of its cgroup (version 2) where set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup version 2, or "max": no quota
        pass
    return cores


def call_deep(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread with DEEP_STACK bytes of stack, whatever the caller's has: `ulimit -s`
    decides that, and where it says unlimited, threads have 2 MiB."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep", daemon=True)
    with _stack_lock:
        before = threading.stack_size(DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()


def threads_per_slot(threads: int | None, num_slots: int, environment: Mapping[str, str] | None = None) -> int:
    """CPU threads for each slot of a host.

    The configuration's `threads` comes first, then the user's OMP_NUM_THREADS, then cores ÷ slots. Too many threads are
    ruinous (measured: 11 times slower), so the default never exceeds the cores.

    Args:
        threads: `RuntimeConfig.threads`.
        num_slots: slots that share the host's cores.
        environment: default os.environ.
    """
    if threads is not None:
        return threads
    given = (os.environ if environment is None else environment).get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, count_cores() // max(1, num_slots))


def has_free_cores(topology: Topology, host: str, threads: int, cores: int | None = None) -> bool:
    """Whether every thread of a host's ranks has a core, so that a rank may spin while it waits and slows nobody.

    Args:
        topology: who sits where.
        host: in the topology's words.
        threads: of each slot that computes on the CPU. A CUDA slot counts as two cores, the orchestrator as one.
        cores: default `count_cores`. A process that is bound to one core has no more than that.
    """
    cuda = [slot.device.startswith("cuda") for slot in topology.slots_of_host(host)]
    needed = sum(CORES_OF_CUDA_SLOT if is_cuda else threads for is_cuda in cuda)
    # Of one slot in all, the process is the orchestrator, too.
    if topology.slot(topology.orchestrator_rank) is None and topology.host(topology.orchestrator_rank) == host:
        needed += 1
    return needed <= (count_cores() if cores is None else cores)


def outnumber_cores(devices: Sequence[str], threads: int | None, cores: int | None = None) -> bool:
    """Whether the CPU slots of a host have more threads than cores, so that ranks that work at once slow each other.

    Every host is taken for one like this: nobody has asked the others when it matters.

    Args:
        devices: of all slots, such as "cpu:0" or "node1/cpu:0", each once.
        threads: of a slot that computes on the CPU; None for one.
        cores: default `count_cores`.
    """
    hosts = Counter(device.rpartition("/")[0] for device in devices if device.rpartition("/")[2].startswith("cpu"))
    return max(hosts.values(), default=0) * (threads or 1) > (count_cores() if cores is None else cores)
