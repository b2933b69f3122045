"""Who sits where: world ranks, their devices and their roles, made from the two engines' device lists.

Pure: it knows no MPI, no torch and no configuration file. Every rank builds the same Topology from the same lists, so
nothing about it is ever sent.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.errors import TopologyError


class Role(enum.StrEnum):
    """What a rank does. One rank may have several roles."""

    ORCHESTRATOR = "orchestrator"
    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True)
class Slot:
    """One device, held by one process.

    Attributes:
        device: such as "cuda:0" or "cpu:1", without its host.
        rank: world rank of the process.
        draft_index: the rank's place in the draft's tensor-parallel group, None when the draft is not here.
        target_index: the rank's place in the target's tensor-parallel group, None when the target is not here.
        host: the device's host; empty where the job does not name hosts and is all on one.
    """

    device: str
    rank: int
    draft_index: int | None
    target_index: int | None
    host: str = ""


@dataclass(frozen=True)
class Topology:
    """All slots of a job, in the order of their world ranks.

    Rank 0 is the orchestrator. It has no slot, except where the whole job is one slot: then rank 0 has every role.

    Attributes:
        slots: in rank order.
        orchestrator_host: where rank 0 runs; empty where hosts are not named.
    """

    slots: tuple[Slot, ...]
    orchestrator_host: str = ""

    @classmethod
    def from_devices(
        cls, draft_devices: Sequence[str], target_devices: Sequence[str], orchestrator_host: str | None = None
    ) -> Topology:
        """Place both engines: rank 0 orchestrates, then the draft's devices in order, then the target's new ones.

        Args:
            draft_devices: the draft engine's devices in tensor-parallel order; empty when nothing is drafted.
            target_devices: the target engine's devices in tensor-parallel order. A device that both lists name is one
                slot: one process that holds both engines' shards.
            orchestrator_host: the host of rank 0, one of the devices' hosts; None takes the target's first.

        Devices are "cuda:N" or "cpu:N"; with "HOST/" before each where the job has named hosts.

        Raises:
            TopologyError: no target device, an empty name, a device listed twice for one engine, hosts named for some
                devices only, or an orchestrator's host without a device.
        """
        for engine, devices in (("draft", draft_devices), ("target", target_devices)):
            _check_devices(engine, devices)
        if not target_devices:
            raise TopologyError("the target has no device: list at least one under target.devices")
        devices = list(dict.fromkeys([*draft_devices, *target_devices]))
        hosts = [device.rpartition("/")[0] for device in devices]
        if "" in hosts and any(hosts):
            raise TopologyError(f"some devices name a host and some do not: {', '.join(devices)}")
        target_host = target_devices[0].rpartition("/")[0]
        if orchestrator_host is None or len(devices) == 1:
            orchestrator_host = target_host
        if orchestrator_host not in hosts:
            raise TopologyError(f"the orchestrator's host {orchestrator_host} has none of the devices")
        first_rank = 0 if len(devices) == 1 else 1
        draft = {device: index for index, device in enumerate(draft_devices)}
        target = {device: index for index, device in enumerate(target_devices)}
        return cls(
            tuple(
                Slot(device.rpartition("/")[2], rank, draft.get(device), target.get(device), host)
                for rank, (device, host) in enumerate(zip(devices, hosts, strict=True), start=first_rank)
            ),
            orchestrator_host,
        )

    @property
    def world_size(self) -> int:
        """Processes of the job: one a slot and the orchestrator, or 1 when there is a single slot."""
        return self.slots[-1].rank + 1

    @property
    def orchestrator_rank(self) -> int:
        """World rank of the orchestrator: always 0."""
        return 0

    @property
    def draft_ranks(self) -> tuple[int, ...]:
        """World ranks of the draft engine, in tensor-parallel order; empty when nothing is drafted."""
        placed = [(slot.draft_index, slot.rank) for slot in self.slots if slot.draft_index is not None]
        return tuple(rank for _, rank in sorted(placed))

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """World ranks of the target engine, in tensor-parallel order."""
        placed = [(slot.target_index, slot.rank) for slot in self.slots if slot.target_index is not None]
        return tuple(rank for _, rank in sorted(placed))

    @property
    def worker_ranks(self) -> tuple[int, ...]:
        """World ranks that hold a device, ascending."""
        return tuple(slot.rank for slot in self.slots)

    @property
    def draft_leader(self) -> int | None:
        """World rank of the draft's first rank, None when nothing is drafted."""
        return self.draft_ranks[0] if self.draft_ranks else None

    @property
    def target_leader(self) -> int:
        """World rank of the target's first rank."""
        return self.target_ranks[0]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of their first ranks; one empty name where hosts are not named."""
        return tuple(dict.fromkeys(self.host(rank) for rank in range(self.world_size)))

    def host(self, rank: int) -> str:
        """Return the host of a world rank; empty where hosts are not named."""
        slot = self.slot(rank)
        return slot.host if slot else self.orchestrator_host

    def slots_of_host(self, host: str) -> tuple[Slot, ...]:
        """Return the slots of one host, in rank order."""
        return tuple(slot for slot in self.slots if slot.host == host)

    def slot(self, rank: int) -> Slot | None:
        """Return the slot of a world rank; None for an orchestrator without a device."""
        self._check_rank(rank)
        return next((slot for slot in self.slots if slot.rank == rank), None)

    def roles(self, rank: int) -> tuple[Role, ...]:
        """Return the roles of a world rank, in the order orchestrator, draft, target."""
        slot = self.slot(rank)
        held = (
            (Role.ORCHESTRATOR, rank == self.orchestrator_rank),
            (Role.DRAFT, slot is not None and slot.draft_index is not None),
            (Role.TARGET, slot is not None and slot.target_index is not None),
        )
        return tuple(role for role, holds in held if holds)

    def describe(self, rank: int) -> str:
        """Name a rank for messages: "draft rank 1 (cpu:0)", "target rank 2 (node2 cuda:0)"; without device "(host)"."""
        slot = self.slot(rank)
        place = slot.device if slot else "host" if not self.orchestrator_host else ""
        return f"{'+'.join(self.roles(rank))} rank {rank} ({f'{self.host(rank)} {place}'.strip()})"

    def check_world(self, size: int) -> None:
        """Raise TopologyError unless the MPI world has as many ranks as this topology."""
        if size != self.world_size:
            places = ", ".join(self.describe(rank) for rank in range(self.world_size))
            raise TopologyError(f"the devices need {self.world_size} ranks ({places}), but {size} were started")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"there is no rank {rank}: the job has ranks 0 to {self.world_size - 1}")


def _check_devices(engine: str, devices: Sequence[str]) -> None:
    """Raise TopologyError for an empty name or a device that is listed twice for one engine."""
    seen: set[str] = set()
    for device in devices:
        if not isinstance(device, str) or not device.strip():
            raise TopologyError(f"{engine}.devices holds {device!r}: name each device, such as 'cuda:0' or 'cpu:0'")
        if device in seen:
            raise TopologyError(f"{engine}.devices lists {device} twice: one engine uses a device once")
        seen.add(device)
