"""Drafts that come while their round is already with the device: target ranks launch a round before the verdict of the
round before is known, and the device waits at a gate for the draft that follows from that verdict.

So nothing of what a host does to launch a round lies between a verdict and the next verification, but for the way of
the verdict to the draft rank and of the draft back. The draft rank may also send the drafts that it made for the likely
verdicts of a round, before the verdict is known: a table with a line for each verdict that it has guessed. The device
finds the verdict in it and goes on; the draft rank, which hears of the verdict later, finds the same line. So both have
the same draft, and neither waited for the other. The two agree only as long as a line is looked up in one way; a row of
which the target verified less than its draft rank has proposed is a case that draft ranks know.

The leader has the gate, and hands what came through it to the other target ranks on the device: all of them verify the
same, whatever the leader's host did. Packets, and how long they are waited for, are message_exchange.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from parallel.communicator import Communicator
from parallel.transports.device_gate import KEY_NUMBERS, Question
from trtrun.core.nouns import Draft, RoundPlan, Verdict
from trtrun.rounds.launched_round import LaunchedRound, VerdictRound
from trtrun.tensors import device_integers
from trtrun.wire.reports import ReportArrays

_COLUMNS = 5
"""Numbers in front of a row's tokens: how many count, were there before the verdict, were found in texts; how many
columns they have, and how deep the paths behind them are."""


@dataclass(frozen=True)
class Origins:
    """Where the tokens of a draft are from, for each of its rows.

    Attributes:
        cache_hits: 1 where it was made before the verdict that it follows was known.
        num_suffix_tokens: how many of its first were found in texts.
    """

    cache_hits: tuple[int, ...] = ()
    num_suffix_tokens: tuple[int, ...] = ()

    def added_to(self, report: ReportArrays) -> ReportArrays:
        """The report of a verdict on the draft with them; rows behind the draft's have none."""
        cache_hits, found = (np.zeros(len(report.draft_lens), dtype=np.int64) for _ in range(2))
        cache_hits[: len(self.cache_hits)] = self.cache_hits
        cache_hits[report.draft_lens < 1] = 0  # where it was there too late for the device
        found[: len(self.num_suffix_tokens)] = self.num_suffix_tokens
        return replace(report, cache_hits=cache_hits, num_suffix_tokens=found)


@dataclass(frozen=True)
class DraftTable:
    """A draft on the host, but for its draft_probs.

    Attributes:
        numbers: [rows, any] int64.
    """

    numbers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, draft: Draft) -> DraftTable:
        """Make the table of a draft on the host."""
        rows, nodes = draft.tokens.shape
        paths = draft.paths
        numbers = np.zeros((rows, _COLUMNS + nodes + (0 if paths is None else paths[0].numel())), dtype=np.int64)
        numbers[:, 0] = draft.draft_lens.numpy()
        if draft.cache_hits is not None:
            numbers[:, 1] = draft.cache_hits.numpy()
        if draft.num_suffix_tokens is not None:
            numbers[:, 2] = draft.num_suffix_tokens.numpy()
        numbers[:, 3] = nodes
        numbers[:, _COLUMNS : _COLUMNS + nodes] = draft.tokens.numpy()
        if paths is not None:
            numbers[:, 4] = paths.shape[2]
            numbers[:, _COLUMNS + nodes :] = paths.flatten(1).numpy()
        return cls(numbers)

    @property
    def draft_lens(self) -> npt.NDArray[np.int64]:
        """[rows]: see Draft."""
        return self.numbers[:, 0]

    @property
    def width(self) -> int:
        """Columns of the tokens."""
        return int(self.numbers[0, 3]) if len(self.numbers) else 0

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[rows, width]: see Draft."""
        return self.numbers[:, _COLUMNS : _COLUMNS + self.width]

    @property
    def origins(self) -> Origins:
        """Where the draft's tokens are from."""
        return Origins(tuple(self.numbers[:, 1].tolist()), tuple(self.numbers[:, 2].tolist()))

    def on(self, device: torch.device, probs: torch.Tensor | None) -> Draft:
        """The draft on a device, with its draft_probs there."""
        width, depth = self.width, int(self.numbers[0, 4]) if len(self.numbers) else 0
        table = torch.from_numpy(self.numbers).to(device, non_blocking=True)
        tokens, paths = table[:, _COLUMNS : _COLUMNS + width], table[:, _COLUMNS + width :]
        return Draft(tokens, table[:, 0], probs, paths=paths.view(len(table), -1, depth) if depth else None)


@dataclass(frozen=True)
class KnownVerdict:
    """A verdict on the host.

    Attributes:
        plan: of its round.
        num_tokens: [sampled rows] int64: what each row gains.
        tokens: [sampled rows, width] int64.
    """

    plan: RoundPlan
    num_tokens: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


def find_cache_hits(table: npt.NDArray[np.int64], plan: RoundPlan, before: KnownVerdict) -> tuple[int, ...] | None:
    """Which of a plan's decode rows have a draft in a table.

    Args:
        table: [guesses, KEY_NUMBERS + steps] of the verdict before the plan's round: a row of the batch, how many of
            its draft's tokens are accepted, the token that follows, and the draft behind that one. Of lines for the
            same verdict the first counts.
        plan: the round's.
        before: that verdict.

    Returns:
        0 or 1 for each row; None where so many have none that a draft is waited for which is made for them.
    """
    guessed = set(map(tuple, table[:, :KEY_NUMBERS].tolist()))
    gained = zip(before.plan.sampled_rows, before.num_tokens.tolist(), before.tokens.tolist(), strict=True)
    came_true = {row for row, count, tokens in gained if count and (row, count - 1, tokens[count - 1]) in guessed}
    lens = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
    asked = [(row in came_true, most > 0) for row, most in lens]
    missing = sum(is_asked and not is_there for is_there, is_asked in asked)
    if missing and missing >= plan.redraft_threshold:
        return None
    return tuple(int(is_there and is_asked) for is_there, is_asked in asked)


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
            # Not the round's own number: those of warm-up rounds come again.
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
        if self._decided is None or plan.predicted_output_rows or self.needs_draft(plan):
            return None
        before, verdict = self._decided
        if before.round_index != plan.round_index - 1:
            return None
        places = {row: place for place, row in enumerate(before.sampled_rows)}
        lens = zip(plan.decode_rows.tolist(), plan.draft_lens.tolist(), strict=True)
        rows = device_integers([(row, most, places.get(row, -1)) for row, most in lens], self.group.device)
        return Question(rows, verdict.num_tokens, verdict.tokens.contiguous(), plan.draft_len, plan.redraft_threshold)

    def decide(self, plan: RoundPlan, verdict: Verdict) -> None:
        """Take in, on the leader, the verdict of a round, on the device, that the next draft follows."""
        self._decided = plan, verdict

    def guess(self, round_index: int, guesses: npt.NDArray[np.int64]) -> None:
        """Take in, on the leader, what was drafted ahead of the verdict of a round."""
        assert self.gate is not None
        following = round_index + 1
        self._guesses[following], self._looked_up = guesses, None
        if following in self._asked:
            self.gate.send(self._due[following], guesses)

    def cache_hits(self, plan: RoundPlan, before: KnownVerdict | None) -> tuple[int, ...] | None:
        """Rows of a round, on the leader, that have drafts that the device has found; None where `give` is due. To be
        asked again and again."""
        guesses = self._guesses.get(plan.round_index)
        if plan.round_index not in self._asked or guesses is None or before is None:
            return None
        if before.plan.round_index != plan.round_index - 1:
            return None
        if self._looked_up is None or self._looked_up[0] != plan.round_index:
            self._looked_up = plan.round_index, find_cache_hits(guesses, plan, before)
        return self._looked_up[1]

    def give(self, plan: RoundPlan, tokens: npt.NDArray[np.int64], draft_lens: npt.NDArray[np.int64]) -> None:
        """Give the device a draft, on the leader, once the round before is known on the host.

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
        """Forget a round, on the leader: the device has, or will have, what it waits for in it, if it waits."""
        self._due.pop(plan.round_index, None)
        self._asked.discard(plan.round_index)
        self._looked_up = None
        self._guesses = {index: one for index, one in self._guesses.items() if index > plan.round_index}


@dataclass
class GatedRound(LaunchedRound):
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

    @override
    def is_done(self) -> bool:
        self.watch()
        return self._report is not None or self.decided.is_done()

    @override
    def release(self) -> None:
        if self.origins is None:
            self.origins = self.bring(self.plan)

    @override
    def finish(self) -> ReportArrays:
        """Finish the round; the same report each time."""
        if self._report is None:
            self.release()
            self.tell(self.plan, *self.decided.numbers())  # first, as draft ranks wait for it
            report = self.decided.finish()
            assert report is not None and self.origins is not None
            self._report = self.account(report, self.origins)
        return self._report
