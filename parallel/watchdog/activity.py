"""What a rank's main thread is doing: marks that it sets as it goes, and that other threads read at any time.

The main thread is the one that runs the rank's part of the rounds; beside an event loop that is not Python's main one.

Setting one is an assignment under the interpreter's lock, with no system call and no lock of its own, so it costs well
under a microsecond and may stand on the path of every round, and of every layer. It knows the names of phases and
nothing of their content; who reads it is the heartbeat's business.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

NO_ROUND = -1

Kind = Literal["start", "idle", "orders", "adapters", "guides", "end", "round", "step"]
"""Kinds of phases, for programs that read them."""


class Phase(enum.StrEnum):
    """Where a rank stands, in the order of time: first the start, then what repeats every round, or every step of a
    training run. Ranks that wait for others are in a later phase than those that they wait for."""

    STARTED = "started"
    CHECKING = "checking"
    CHECKED = "waiting for the other ranks' checks"
    CONNECTING = "opening communicators"
    WEIGHTS = "weights"
    LOADED = "waiting for the other ranks' weights"
    ALLOCATING = "allocating"
    WARMING_UP = "warming up"
    IDLE = "idle"
    ORDERED = "doing what was asked between rounds"
    ADAPTERS = "changing adapters"
    ENDING = "ending"
    SCHEDULING = "scheduling"
    DRAFTING = "drafting"
    TRANSFERRING = "transferring"
    AWAITING_DRAFT = "waiting for the draft"
    VERIFYING = "verifying"
    ANTICIPATING = "drafting ahead"
    AWAITING_VERDICT = "waiting for the verdict"
    REPORTING = "reporting"
    AWAITING_REPORT = "waiting for a report"
    PREPARING = "preparing"
    TRAINING = "training"
    SUMMING = "adding up gradients"
    MEASURING = "measuring"
    MEASURED = "adding up measurements"
    SAVING = "saving"
    FINISHING = "writing the drafter"

    @property
    def order(self) -> int:
        """Place in time; a lower one has got less far."""
        return _ORDER[self]

    @property
    def is_start(self) -> bool:
        """Whether it comes before the first round, and the rank is busy with it."""
        return self.order < Phase.IDLE.order

    @property
    def is_in_round(self) -> bool:
        """Whether it is part of a round, or of a step."""
        return self.order >= Phase.SCHEDULING.order

    @property
    def whole(self) -> Literal["round", "step"]:
        """What it is part of, in a word: "round", or of a training run "step"."""
        return "step" if self.order >= Phase.PREPARING.order else "round"

    @property
    def kind(self) -> Kind:
        """What it is, for programs that read it."""
        if self.is_start:
            return "start"
        return self.whole if self.is_in_round else _KINDS[self]


_ORDER = {phase: index for index, phase in enumerate(Phase)}
_KINDS: Mapping[Phase, Kind] = {
    Phase.IDLE: "idle", Phase.ORDERED: "orders", Phase.ADAPTERS: "adapters", Phase.ENDING: "end",
}  # fmt: skip
_IDLE = Phase.IDLE


@dataclass(frozen=True)
class Beside:
    """What another thread of a rank was doing at one moment, beside its rounds.

    Attributes:
        kind: of the work.
        words: as a message says it, such as "loading adapter 'x'".
        still_seconds: since it last got on.
        seconds: since it began.
        limit: seconds that it may stand still.
    """

    kind: Kind
    words: str
    still_seconds: float
    seconds: float
    limit: float


class Work:
    """The marks of one thread that works beside the rounds."""

    __slots__ = ("_advanced", "_began", "_kind", "_limit", "_words")

    def __init__(self, kind: Kind, words: str, limit: float) -> None:
        self._kind, self._words, self._limit = kind, words, limit
        self._began = self._advanced = time.monotonic()

    def advance(self) -> None:
        """Say that it makes progress."""
        self._advanced = time.monotonic()

    def look(self) -> Beside:
        """What it is doing now; from any thread."""
        now = time.monotonic()
        return Beside(self._kind, self._words, now - self._advanced, now - self._began, self._limit)


@dataclass(frozen=True)
class Doing:
    """What a rank was doing at one moment.

    Attributes:
        phase: of the start, the round or the step. IDLE: a worker waits for a plan, or the orchestrator for its user.
        round_index: the round or step it is in, or the last one; NO_ROUND before the first.
        still_seconds: since it last got on: entered the phase, or finished a layer in it.
        phase_seconds: since it entered the phase.
        done, total: bytes of weights, in the phase WEIGHTS.
        step: what it checks, in the phase CHECKING, or does, in the phase ADAPTERS.
        ticks: whether it gets on where it is idle, too; see Activity.
        beside: what other threads of the rank are doing.
    """

    phase: Phase = Phase.STARTED
    round_index: int = NO_ROUND
    still_seconds: float = 0.0
    phase_seconds: float = 0.0
    done: int = 0
    total: int = 0
    step: str = ""
    ticks: bool = False
    beside: tuple[Beside, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected of it."""
        return self.phase is Phase.IDLE

    @property
    def must_get_on(self) -> bool:
        """Whether it hangs where it stands still. A start has a time of its own."""
        return self.ticks if self.is_idle else not self.phase.is_start

    @property
    def words(self) -> str:
        """As a message says it: "in round 17 (verifying)", "in step 17 (training)", "idle after round 17", "weights
        34 %"."""
        if self.phase is Phase.WEIGHTS and self.total > 0:
            return f"{self.phase} {100 * self.done // self.total} %"
        if self.phase is Phase.CHECKING:
            return f"in the step '{self.step}'"
        if self.step:
            return self.step
        if self.phase.is_in_round:
            return f"in {self.phase.whole} {self.round_index} ({self.phase})"
        if self.is_idle and self.round_index != NO_ROUND:
            return f"idle after round {self.round_index}"
        return str(self.phase)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Doing:
        """The inverse of `as_dict`.

        Raises:
            ValueError, TypeError: the values come from something else.
        """
        beside = tuple(Beside(**work) for work in values.get("beside", ()))
        return cls(**{**values, "phase": Phase(values.get("phase", "")), "beside": beside})


class Activity:
    """The marks of one process's main thread, which makes them.

    Attributes:
        thread: its identifier.
        ticks: whether it gets on between rounds, too (`advance`), however little there is to do: a thread of its own
            runs them. Else a user's program may have the word for as long as it likes.
    """

    __slots__ = ("_advanced", "_beside", "_changing", "_mark", "_progress", "thread", "ticks")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        now = time.monotonic()
        # phase, round, when the phase began: one tuple, so that readers see a whole.
        self._mark: tuple[Phase, int, float] = (Phase.STARTED, NO_ROUND, now)
        self._advanced = now
        self._progress = (0, 0, "")
        self._beside: tuple[Work, ...] = ()
        self._changing = threading.Lock()
        self.ticks = False

    def enter(self, round_index: int, phase: Phase) -> None:
        """The main thread enters a phase of a round, or of a step."""
        self._mark = (phase, round_index, time.monotonic())

    def advance(self) -> None:
        """Say that it makes progress within a phase: a layer is done, so that a long round can be told from one that
        hangs.

        Of work that is only launched, as on a GPU, this says that launching goes on; the device is some hundred kernels
        behind at most, as its queue holds no more.
        """
        self._advanced = time.monotonic()

    def rest(self) -> None:
        """Its round is done: a worker waits for a plan, the orchestrator's user has the word."""
        self._mark = (_IDLE, self._mark[1], time.monotonic())

    @contextmanager
    def between(self, phase: Phase, step: str = "") -> Iterator[None]:
        """The main thread is in a phase between rounds meanwhile.

        Args:
            phase: one of those that are neither of the start nor of a round.
            step: what it does, for people; else the phase's name.
        """
        before, self._progress = self._mark, (0, 0, step)
        self._mark = (phase, before[1], time.monotonic())
        try:
            yield
        finally:
            self._progress = (0, 0, "")
            self._mark = (before[0], before[1], time.monotonic())

    @contextmanager
    def beside(self, kind: Kind, words: str, limit: float) -> Iterator[Work]:
        """Another thread works meanwhile, and says so by what it is given when it gets on.

        Args:
            kind: of the work.
            words: as a message says it.
            limit: seconds that it may stand still.
        """
        work = Work(kind, words, limit)
        with self._changing:
            self._beside = (*self._beside, work)
        try:
            yield work
        finally:
            with self._changing:
                self._beside = tuple(one for one in self._beside if one is not work)

    def start(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        """The main thread is in a phase of the start, or gets on in it.

        Args:
            phase: of the start.
            done: bytes of weights read so far.
            total: bytes of weights to read.
        """
        since = self._mark[2] if self._mark[0] is phase else time.monotonic()
        self._progress = (done, total, "")
        self._mark = (phase, NO_ROUND, since)

    def check(self, step: str) -> None:
        """The main thread begins a step of a check.

        Args:
            step: for people.
        """
        self._progress = (0, 0, step)
        self._mark = (Phase.CHECKING, NO_ROUND, time.monotonic())

    def look(self) -> Doing:
        """What the main thread does now; from any thread."""
        (phase, round_index, started), (done, total, step) = self._mark, self._progress
        advanced = max(started, self._advanced)
        now = time.monotonic()
        beside = tuple(work.look() for work in self._beside)
        return Doing(phase, round_index, now - advanced, now - started, done, total, step, self.ticks, beside)
