"""Who sits where: the placements of draft and target that are compared on one host of two, four or eight GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Devices of one job by number.

    Attributes:
        name: of the placement.
        draft, target: their devices, in tensor-parallel order.
        num_jobs: how many such jobs run at once, each on devices of its own.
        about: for people.
    """

    name: str
    draft: tuple[int, ...]
    target: tuple[int, ...]
    about: str
    num_jobs: int = 1

    @property
    def is_apart(self) -> bool:
        """Whether draft and target share no device, so that drafts can be made ahead."""
        return not set(self.draft) & set(self.target)

    @property
    def devices_a_job(self) -> int:
        """Devices of one job."""
        return len({*self.draft, *self.target})

    @property
    def num_devices(self) -> int:
        """Devices of all jobs."""
        return self.devices_a_job * self.num_jobs

    def devices(self, kind: str, job: int = 0) -> tuple[list[str], list[str]]:
        """Names of the draft's and the target's devices, of kind "cuda" or "cpu", of one job."""
        first = job * self.devices_a_job
        draft, target = ([f"{kind}:{first + number}" for number in role] for role in (self.draft, self.target))
        return draft, target


def _all(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


PLACEMENTS: dict[int, Sequence[Placement]] = {
    1: (Placement("one-device", (0,), (0,), "draft and target on one device, in one process"),),
    2: (
        Placement("target2-draft-beside", (0,), _all(2), "target TP 2, draft beside its first rank"),
        Placement("target2-draft2-same", _all(2), _all(2), "target TP 2 and draft TP 2 on the same two"),
        Placement("draft1-target1", (0,), (1,), "draft and target on a device each"),
    ),
    4: (
        Placement("target4-draft-beside", (0,), _all(4), "target TP 4, draft beside its first rank"),
        Placement("target4-draft4-same", _all(4), _all(4), "target TP 4 and draft TP 4 on the same four"),
        Placement("draft1-target2", (0,), (1, 2), "draft on one device, target TP 2 on two others"),
        Placement("draft2-target2", (0, 1), (2, 3), "draft TP 2 on two devices, target TP 2 on two others"),
        Placement("draft1-target1", (0,), (1,), "draft and target on a device each"),
        Placement("two-draft1-target1", (0,), (1,), "two jobs of draft and target on a device each", num_jobs=2),
    ),
    8: (
        Placement("target8-draft8-same", _all(8), _all(8), "target TP 8 and draft TP 8 on the same eight"),
        Placement("target8-draft-beside", (0,), _all(8), "target TP 8, draft beside its first rank"),
        Placement("draft4-target4", _all(4), _all(4, 4), "draft TP 4 on four devices, target TP 4 on the others"),
        Placement("draft1-target4", (0,), _all(4, 1), "draft on one device, target TP 4 on four others"),
    ),
}
"""By the number of devices of the host."""


def find_apart(num_devices: int) -> Placement:
    """The largest placement of a host of two devices or more whose draft ranks a job can lose."""
    apart = [place for place in PLACEMENTS[num_devices] if place.is_apart and place.num_jobs == 1]
    return max(apart, key=lambda place: place.num_devices)


ONE = PLACEMENTS[1][0]
"""Draft and target on one device."""
