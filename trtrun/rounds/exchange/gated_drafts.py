"""Drafts that come while their round is already with the device: target ranks launch a round before the verdict of the
round before is known, and the device waits at a gate for the draft that follows from that verdict.

So nothing of what a host does to launch a round lies between a verdict and the next verification, but for the way of
the verdict to the draft rank and of the draft back; nor these, where the draft rank has told its guesses ahead, and the
device finds the verdict among them (guess_tables.py). The leader has the gate, and hands what came through it to the
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
from parallel.transports.device_gate import Question
from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.rounds.exchange.draft_tables import Origins
from trtrun.rounds.exchange.guess_tables import KnownVerdict, foreseen_rows
from trtrun.rounds.launched_round import VerdictRound
from trtrun.tensors import device_integers
from trtrun.wire.reports import ReportArrays


class Gate(Protocol):
    """Where the leader's stream waits; see parallel.transports.device_gate."""

    def enqueue(self, opening: int, count: int, most_seconds: float) -> torch.Tensor:
        """Have the stream wait for so many numbers; int64 on the device, zeros where they do not come."""
        ...

    def enqueue_lookup(self, opening: int, question: Question, most_seconds: float) -> torch.Tensor:
        """Have the stream look drafts up, and else wait for as many numbers; int64 on the device."""
        ...

    def open(self, opening: int, numbers: npt.NDArray[np.int64]) -> None:
        """Let the stream go on."""
        ...

    def send(self, opening: int, table: npt.NDArray[np.int64]) -> None:
        """What the stream looks up."""
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
    _decided: tuple[RoundPlan, Verdict] | None = None
    _asked: set[int] = field(default_factory=set)
    _guesses: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    _looked_up: tuple[int, tuple[int, ...] | None] | None = None

    def expect(self, plan: RoundPlan, most_seconds: float) -> Draft:
        """The draft of a round on the device, of the plan's draft_len: what is computed from it waits for `give` or
        for `guess`, so many seconds at most. A host that uses a kernel for the first time may have to wait for the
        device itself."""
        rows, width = len(plan.decode_rows), plan.draft_len + 1
        if self.gate is not None:
            # Not the round's own number: those of rehearsed rounds come again.
            opening = self._due[plan.round_index] = next(self._openings)
            question = self._question(plan)
            if question is None:
                table = self.gate.enqueue(opening, rows * width, most_seconds)
            else:
                table = self.gate.enqueue_lookup(opening, question, most_seconds)
                self._asked.add(plan.round_index)
                if (guesses := self._guesses.get(plan.round_index)) is not None:
                    self.gate.send(opening, guesses)
        else:
            table = torch.empty(rows * width, dtype=torch.int64, device=self.group.device)
        if rows and self.group.size > 1:
            self.group.broadcast(table, 0)
        table = table.view(rows, width)
        return Draft(table[:, 1:], table[:, 0])

    def _question(self, plan: RoundPlan) -> Question | None:
        """What the device looks up among guesses; None where drafts are not what was guessed."""
        if self._decided is None or plan.given_rows or self.needs_draft(plan):
            return None
        before, verdict = self._decided
        if before.round_index != plan.round_index - 1:
            return None
        places = {row: place for place, row in enumerate(before.sampled_rows)}
        lens = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        rows = device_integers([(row, most, places.get(row, -1)) for row, most in lens], self.group.device)
        return Question(rows, verdict.num_tokens, verdict.tokens.contiguous(), plan.draft_len, plan.redraft_from)

    def decide(self, plan: RoundPlan, verdict: Verdict) -> None:
        """On the leader: the verdict of a round, on the device, that the next draft follows."""
        self._decided = plan, verdict

    def guess(self, round_index: int, guesses: npt.NDArray[np.int64]) -> None:
        """On the leader: what was drafted ahead of the verdict of a round; see guess_tables."""
        assert self.gate is not None
        following = round_index + 1
        self._guesses[following], self._looked_up = guesses, None
        if following in self._asked:
            self.gate.send(self._due[following], guesses)

    def foreseen(self, plan: RoundPlan, before: KnownVerdict | None) -> tuple[int, ...] | None:
        """On the leader: which rows of a round have drafts that the device has found; None where `give` is due. To be
        asked again and again."""
        guesses = self._guesses.get(plan.round_index)
        if plan.round_index not in self._asked or guesses is None or before is None:
            return None
        if before.plan.round_index != plan.round_index - 1:
            return None
        if self._looked_up is None or self._looked_up[0] != plan.round_index:
            self._looked_up = plan.round_index, foreseen_rows(guesses, plan, before)
        return self._looked_up[1]

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
        self.gate.open(self._due[plan.round_index], numbers.reshape(-1))

    def settle(self, plan: RoundPlan) -> None:
        """On the leader: the device has, or will have, what it waits for in a round, if it waits in it."""
        self._due.pop(plan.round_index, None)
        self._asked.discard(plan.round_index)
        self._looked_up = None
        self._guesses = {index: one for index, one in self._guesses.items() if index > plan.round_index}


@dataclass
class GatedRound:
    """A round of the target leader whose device may wait for its draft; see LaunchedRound.

    Attributes:
        plan: the round's.
        decided: the round with its verdict on the way to the host.
        bring: waits for the draft and gives it to the device; what of it is to be reported, in the plan's rows.
        tell: sends the verdict on, once it is on the host.
        watch: takes in what other ranks have sent meanwhile.
        account: makes the report whole.
        origins: of a draft that the device has; None where it is to be brought.
    """

    plan: RoundPlan
    decided: VerdictRound
    bring: Callable[[RoundPlan], Origins]
    tell: Callable[[RoundPlan, np.ndarray, np.ndarray], None]
    watch: Callable[[], None]
    account: Callable[[ReportArrays, Origins], ReportArrays]
    origins: Origins | None = None
    may_be_followed = True
    _report: ReportArrays | None = field(default=None)

    def is_done(self) -> bool:
        """See LaunchedRound."""
        self.watch()
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
