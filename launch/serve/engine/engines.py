"""What the server needs of an engine from its start to its end, wherever that runs.

There are two: `restarted_engine` has it in processes of its own and starts it again, `own_engine` has it in this
process. Requests go to both by the same client. It knows no process and no socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from launch.serve.engine.client import EngineClient


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
    def engine(self) -> EngineClient: ...

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
