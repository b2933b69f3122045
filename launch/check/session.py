"""One rank's part in a check: what it knows, whom rank 0 waits for, and for how long.

Rank 0 names steps over the control plane and the ranks that a step concerns report; so it always knows who owes it an
answer. It does not know what the steps are for (check.py).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from launch.check.inventory import RankInventory, find_misfits, take_inventory
from launch.exit_codes import FailedError
from launch.mpi.start_progress import DONE, StartProgress, has_parent
from parallel import abort
from parallel.control import ControlPlane
from parallel.groups import Groups, open_groups
from parallel.topology import Topology
from trtrun.config import RuntimeConfig
from trtrun.errors import TrtrunError
from trtrun.roles.startup import device_of
from trtrun.topology import make_topology

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

PARENT_SECONDS = 5.0
"""How much later than its parent rank 0 gives up on stuck ranks: the parent can tell more about them."""

INVENTORY, STEPS = 1, 10
"""Numbers of a rank's steps for `start_progress`: looking around, then the steps that rank 0 names."""


class SetupError(TrtrunError):
    """The ranks do not fit together.

    Attributes:
        problems: all that is wrong, one line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class StuckError(FailedError):
    """Ranks did not answer in time.

    Attributes:
        problems: one line for each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Session:
    """One rank's part in a check: the control plane, what has been opened, and the time that is left."""

    def __init__(self, config: RuntimeConfig, topology: Topology, world: MPI.Intracomm, started: float) -> None:
        self.config = config
        self.topology = topology
        self.world = world
        self.rank: int = world.Get_rank()
        self.groups: Groups | None = None
        self.teller = StartProgress()
        self.control = ControlPlane(world, topology)
        self._until = started + config.launch.check_seconds + (PARENT_SECONDS if has_parent() else 0.0)
        self._number = 0

    @classmethod
    def open(cls, config: RuntimeConfig, started: float) -> Session:
        """Join the check. Collective.

        Args:
            config: of the job, as this rank sees it.
            started: when the check began, on the clock of `time.monotonic`.
        """
        from mpi4py import MPI

        return cls(config, make_topology(config), MPI.COMM_WORLD, started)

    def __enter__(self) -> Session:
        self.teller.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.teller.tell(DONE, "the end of the check")
        self.teller.__exit__()
        if kind is None:  # else other ranks may not come here: the end of this one ends the job
            if self.groups is not None:
                self.groups.close()
            self.control.close()

    def seconds_left(self) -> float:
        """Until the check has to be over."""
        return self._until - time.monotonic()

    def begin(self, number: int, title: str) -> None:
        """Tell the parent what this rank is at: an even number for what it does, the odd one behind it for waiting."""
        self._number = number
        logger.info("check, step %d: %s", number, title)
        self.teller.tell(STEPS + 2 * number, title)

    # Rank 0.

    def gather_inventories(self) -> tuple[list[RankInventory], list[str]]:
        """All ranks' inventories, and what is wrong with them."""
        own = self._take_own_inventory()
        self.teller.tell(STEPS + 1, "waiting for the other ranks")
        answers = self.collect(self.topology.worker_ranks, "looking around")
        ranks = [own, *(RankInventory.from_dict(answers[rank]) for rank in sorted(answers))]
        return ranks, find_misfits(ranks, self.topology)

    def order(self, order: dict[str, Any]) -> None:
        """Tell every worker what comes next."""
        self.control.publish(json.dumps(order).encode())

    def run_step(
        self, title: str, ranks: Iterable[int], own: Callable[[], None] | None = None, **order: Any
    ) -> dict[int, dict[str, Any]]:
        """Let some ranks do a step; returns their reports by rank.

        Args:
            title: for people.
            ranks: workers.
            own: rank 0's part in it; it may wait for the others.
            order: what the ranks are told.

        Raises:
            StuckError: a rank did not report in time.
        """
        self.start_step(title, ranks, **order)
        if own is not None:
            with self._ending_late(ranks, title):
                own()
        return self.collect(ranks, title)

    def start_step(self, title: str, ranks: Iterable[int], **order: Any) -> None:
        """Let some ranks begin a step."""
        self._number += 1
        self.order({**order, "number": self._number, "title": title, "ranks": sorted(ranks)})
        self.teller.tell(STEPS + 2 * self._number + 1, f"waiting for: {title}")

    def collect(self, ranks: Iterable[int], title: str) -> dict[int, dict[str, Any]]:
        """One report from each of some ranks."""
        waiting, answers = set(ranks), dict[int, dict[str, Any]]()
        while waiting:
            report = self.control.collect(max(0.0, self.seconds_left()))
            if report is None:
                raise self.stuck(waiting, title)
            answers[report.rank] = json.loads(report.payload)
            waiting.discard(report.rank)
        return answers

    def stuck(self, ranks: Iterable[int], title: str) -> StuckError:
        """The error for ranks that are late."""
        after = f"the check did not end within {self.config.launch.check_seconds:g} s"
        return StuckError(
            [f"{after}: {self.topology.describe(rank)} gave no answer in the step '{title}'" for rank in sorted(ranks)]
        )

    @contextmanager
    def _ending_late(self, ranks: Iterable[int], title: str) -> Iterator[None]:
        """A part of a step in which rank 0 itself waits inside MPI: when time is over, a thread ends the job."""

        def end() -> None:
            abort.begin_ending()
            abort.say("".join(f"trtrun: {line}\n" for line in self.stuck(ranks, title).problems))
            abort.end_world()

        timer = threading.Timer(max(0.0, self.seconds_left()), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # Other ranks.

    def send_inventory(self) -> None:
        """Give rank 0 what this rank knows."""
        self.send(self._take_own_inventory().to_dict())

    def send(self, result: dict[str, Any]) -> None:
        """Report to rank 0."""
        self.control.report(json.dumps(result).encode())
        self.teller.tell(STEPS + 2 * self._number + 1, "waiting for the next step")

    def next_order(self) -> dict[str, Any]:
        """What rank 0 wants next, as long as it is there."""
        while (order := self.control.receive(timeout=None)) is None:
            if self.control.is_shut_down:
                return {"step": "end", "ok": False}
        return dict(json.loads(order))

    # All ranks.

    def open_groups(self) -> None:
        """Open the communicators that a run would open. Collective."""
        slot = self.topology.slot(self.rank)
        device = device_of(slot) if slot is not None else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.groups = open_groups(self.world, self.topology, device)

    def _take_own_inventory(self) -> RankInventory:
        inventory = take_inventory(
            self.config, self.topology, self.rank, lambda step: self.teller.tell(INVENTORY, step)
        )
        logger.info("%s", ", ".join(f"{name} {version}" for name, version in inventory.versions.items()))
        for problem in inventory.problems:
            logger.info("problem: %s", problem)
        return inventory
