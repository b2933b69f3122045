"""What the front needs of an engine, wherever that runs: two faces, one for requests and one for the server.

There are two of each: `restarted_engine` has an engine in processes of its own and starts it again, `own_engine` has it
in this process. It knows no process and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.serve.door.refusals import Refusal
from launch.serve.engine.messages import Ready, Status
from launch.serve.engine.open_requests import EngineRequest, Inbox
from trtrun.scheduling.limits import SchedulerLimits

STATUS_SECONDS = 1.0
"""How long an engine may take to say how full it is: a round, for most."""


class Engine(Protocol):
    """Completes requests.

    Attributes:
        ready: what the engine has said of itself; None while there is none.
        limits: of that engine.
    """

    ready: Ready | None
    limits: SchedulerLimits | None

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox, more_follow: bool = False) -> list[str]:
        """Have requests completed; what comes of them goes to the inbox, under their places in the list.

        Args:
            requests: that came together.
            inbox: their reader's.
            more_follow: others will be started right behind them.

        Returns:
            Their ids, for `abort`.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those that have ended are passed over."""

    def end_all(self, error: Refusal) -> None:
        """End every request with an error that its reader is told."""

    async def ask_status(self) -> Status | None:
        """How full the engine is; None where there is none, or it does not say so in time."""


@dataclass
class EngineEvents:
    """What an engine tells the server.

    Attributes:
        on_ready, on_lost: it is there; it is gone.
        on_hang: it is there, does not get on, and nothing starts it again; with a line for the user.
        on_recovery: it gets on again.
        on_restart: it is started again; with a line for the user.
        on_early_end: it was killed before it was up; the same.
    """

    on_ready: Callable[[], None]
    on_lost: Callable[[], None]
    on_hang: Callable[[str], None]
    on_recovery: Callable[[], None]
    on_restart: Callable[[str], None]
    on_early_end: Callable[[str], None]


class EngineRun(Protocol):
    """An engine from its start to its end.

    Attributes:
        engine: for requests, the same over all restarts.
    """

    @property
    def engine(self) -> Engine: ...

    async def keep(self, events: EngineEvents) -> int:
        """Start the engine and keep it until `close`, or until it cannot be kept.

        Returns:
            The exit status: of an engine that was told to end, or that could not start.

        Raises:
            FailedError: it ended, and is not started again.
            RankFailedError: a rank of it failed, and it is not started again.
        """

    async def close(self) -> None:
        """Let the engine end; `keep` then returns."""

    def kill(self) -> None:
        """End the engine now, as far as its processes do not end with this one."""

    def is_abandoned(self) -> bool:
        """Whether a SIGTERM is none of a user's, but the end of whoever has started this process."""
