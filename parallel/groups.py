"""A rank's communicators, opened together: its engines' tensor-parallel groups and the group of all workers.

It knows the topology and the transports. It keeps nothing: the caller owns what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel.communicator import Communicator
from parallel.mailbox import Mailbox, MpiMailbox
from parallel.topology import Topology
from parallel.transports import open_communicator

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Groups:
    """The groups that one rank belongs to.

    Attributes:
        draft: the draft engine's tensor-parallel group, None on ranks that do not hold it.
        target: the target engine's, likewise. On the same ranks it is the same: engines there take turns.
        workers: all ranks that hold a device, in the order of topology.worker_ranks: the link's group. None on an
            orchestrator without a device.
        mail: small messages on the host between any two ranks; None in a job of one process.
    """

    draft: Communicator | None
    target: Communicator | None
    workers: Communicator | None
    mail: Mailbox | None = None

    def opened(self) -> list[Communicator]:
        """The groups that this rank belongs to, each once."""
        groups = dict.fromkeys((self.draft, self.target, self.workers))
        return [communicator for communicator in groups if communicator is not None]

    def close(self) -> None:
        """Close every group of this rank. Collective."""
        for communicator in self.opened():
            communicator.close()
        if self.mail is not None:
            self.mail.close()


def open_groups(
    world_comm: MPI.Intracomm | None, topology: Topology, device: torch.device, may_spin: bool = False
) -> Groups:
    """Open and warm up this rank's groups. Collective over the world.

    Args:
        world_comm: all ranks of the job; None for a job of one process.
        topology: who sits where.
        device: where this rank's tensors live; without meaning on an orchestrator that has no device.
        may_spin: whether this rank has a core to itself while it waits for a peer (see parallel.waiting.Waiter).

    Raises:
        TopologyError: the world has another size than the topology.
    """
    topology.check_world(world_comm.Get_size() if world_comm else 1)

    def open_group(ranks: Sequence[int], name: str, sums_often: bool = True) -> Communicator | None:
        if world_comm is None:
            return open_communicator(device, None, name) if ranks else None
        from mpi4py import MPI

        # The key keeps tensor-parallel order, which need not be the order of world ranks.
        rank = world_comm.Get_rank()
        member = rank in ranks
        group = world_comm.Split(0 if member else MPI.UNDEFINED, ranks.index(rank) if member else 0)
        if not member:
            return None
        assert isinstance(group, MPI.Intracomm)  # the stubs of mpi4py promise a Comm only
        communicator = open_communicator(device, group, name, may_spin, sums_often)
        group.Free()
        return communicator

    are_together = topology.draft_ranks == topology.target_ranks
    draft = open_group(topology.draft_ranks, "draft and target" if are_together else "draft")
    return Groups(
        draft=draft,
        target=draft if are_together else open_group(topology.target_ranks, "target"),
        workers=open_group(topology.worker_ranks, "workers", sums_often=False),
        mail=MpiMailbox(world_comm.Dup(), may_spin, topology.worker_ranks) if world_comm is not None else None,
    )
