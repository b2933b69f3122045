"""Drafts that come while their round is already with the device: target ranks launch a round before the verdict of the
round before is known, and the device waits at a gate for the draft that follows from that verdict.

So nothing of what a host does to launch a round lies between a verdict and the next verification, but for the way of
the verdict to the draft rank and of the draft back. The leader has the gate, and hands what came through it to the
other target ranks on the device: all of them verify the same, whatever the leader's host did. It knows chains of
tokens. It does not know where packets come from, or how long they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from parallel.communicator import Communicator
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.roles.launched_round import VerdictRound
from trtrun.wire.reports import ReportArrays


@dataclass(frozen=True)
class Origins:
    """Where the tokens of a draft are from, for each of its rows.

    Attributes:
        foreseen: 1 where it was made before the verdict that it follows was known.
        num_suffix_tokens: how many of its first were found in texts.
    """

    foreseen: tuple[int, ...] = ()
    num_suffix_tokens: tuple[int, ...] = ()


class Gate(Protocol):
    """Where the leader's stream waits; see parallel.transports.device_gate."""

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        """Have the stream wait for so many numbers; int64 on the device, zeros where they do not come."""
        ...

    def open(self, opening: int, numbers: npt.NDArray[np.int64]) -> None:
        """Let the stream go on."""
        ...


@dataclass
class GatedDrafts:
    """One target rank's end.

    Attributes:
        gate: on the leader; None on other target ranks.
        group: the target ranks.
        needs_draft: whether a round cannot be launched without its draft on the host, as one with guided rows, whose
            masks are made of it. Asked on the leader alone.
    """

    gate: Gate | None
    group: Communicator
    needs_draft: Callable[[RoundPlan], bool] = lambda plan: False
    _openings: Iterator[int] = field(default_factory=count)
    _due: dict[int, int] = field(default_factory=dict)

    def expect(self, plan: RoundPlan, most_seconds: float) -> Draft:
        """The draft of a round on the device, of the plan's draft_len: what is computed from it waits for `give`, so
        many seconds at most. A host that uses a kernel for the first time may have to wait for the device itself."""
        rows, width = len(plan.decode_rows), plan.draft_len + 1
        if self.gate is not None:
            # Not the round's own number: those of rehearsed rounds come again.
            opening = self._due[plan.round_index] = next(self._openings)
            table = self.gate.enqueue(opening, rows * width, most_seconds)
        else:
            table = torch.empty(rows * width, dtype=torch.int64, device=self.group.device)
        if rows and self.group.size > 1:
            self.group.broadcast(table, 0)
        table = table.view(rows, width)
        return Draft(table[:, 1:], table[:, 0])

    def give(self, plan: RoundPlan, tokens: npt.NDArray[np.int64], draft_lens: npt.NDArray[np.int64]) -> None:
        """On the leader, once the round before is known on the host.

        Args:
            plan: the round's.
            tokens: [rows, width] of its decode rows, the width no more than its draft_len.
            draft_lens: [rows] how many of them count.
        """
        assert self.gate is not None
        numbers = np.zeros((len(plan.decode_rows), plan.draft_len + 1), dtype=np.int64)
        numbers[:, 0] = draft_lens
        numbers[:, 1 : 1 + tokens.shape[1]] = tokens
        self.gate.open(self._due.pop(plan.round_index), numbers.reshape(-1))


@dataclass
class GatedRound:
    """A round of the target leader whose device may wait for its draft; see LaunchedRound.

    Attributes:
        plan: the round's.
        decided: the round with its verdict on the way to the host.
        bring: waits for the draft and gives it to the device; what of it is to be reported, in the plan's rows.
        tell: sends the verdict on, once it is on the host.
        account: makes the report whole.
        origins: of a draft that the device has; None where it is to be brought.
    """

    plan: RoundPlan
    decided: VerdictRound
    bring: Callable[[RoundPlan], Origins]
    tell: Callable[[RoundPlan, np.ndarray, np.ndarray], None]
    account: Callable[[ReportArrays, Origins], ReportArrays]
    origins: Origins | None = None
    may_be_followed = True
    _report: ReportArrays | None = field(default=None)

    def is_done(self) -> bool:
        """See LaunchedRound."""
        return self._report is not None or self.decided.is_done()

    def release(self) -> None:
        """See LaunchedRound."""
        if self.origins is None:
            self.origins = self.bring(self.plan)

    def finish(self) -> ReportArrays:
        """See LaunchedRound; the same report each time."""
        if self._report is None:
            self.release()
            self.tell(self.plan, *self.decided.numbers())  # first, as draft ranks wait for it
            report = self.decided.finish()
            assert report is not None and self.origins is not None
            self._report = self.account(report, self.origins)
        return self._report
