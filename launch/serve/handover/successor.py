"""The server before's side of a handover: the server that follows is one more engine, for new requests at once and for
those in work when this server's time is over.

Where it is lost, its requests go on in this server's own engine. It does not know who is let in, or by which protocol.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

from launch.serve.engine.client import EngineClient
from launch.serve.engine.messages import Ready
from launch.serve.handover.door import Greeting, Streams
from trtrun.configuration.config import RuntimeConfig
from trtrun.scheduling.limits import SchedulerLimits

_ROOM = ("num_blocks", "num_places", "num_snapshots")


def hash_texts(config: RuntimeConfig) -> str:
    """Tells whether two servers make the same texts of the same requests, as far as the configuration says: which host
    and which device a rank has makes no difference, the number of ranks does."""
    told = config.model_dump(mode="json", exclude={"server", "launch", "threads"})
    for name in ("target", "draft", "heads"):
        section = told[name]
        if section is not None and section["devices"] is not None:
            section["devices"] = len(section["devices"])
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class Successor:
    """Takes in the server that follows.

    Attributes:
        greeting: of the server that follows; None as long as none does.
    """

    def __init__(
        self,
        own: EngineClient,
        texts: str,
        use: Callable[[EngineClient], None],
        on_lost: Callable[[Greeting], None],
        say: Callable[[str], None],
    ) -> None:
        """Wait for one.

        Args:
            own: this server's own engine.
            texts: as of `hash_texts`.
            use: called with the engine that new requests go to from now on.
            on_lost: called once the server that followed does so no more.
            say: tells the user a line.
        """
        self.greeting: Greeting | None = None
        self._own, self._texts, self._use, self._on_lost, self._say = own, texts, use, on_lost, say
        self._known: Ready | None = None
        self._numbers = count()
        self._client = own

    def note_ready(self) -> None:
        """The own engine is there, which the server that follows is to be like."""
        self._known = self._own.ready or self._known

    async def serve(self, greeting: Greeting, streams: Streams) -> None:
        """Have the server that follows as an engine until its connection ends."""

        def accept(ready: Ready) -> bool:
            if self.greeting is not None:
                self._say(f"{greeting} wants to follow, and {self.greeting} does so already")
                return False
            difference = self._find_difference(greeting, ready)
            if difference is not None:
                self._say(f"{greeting} has the name from now on, but {difference}: requests end where they began")
            return difference is None

        def begin() -> None:
            self.greeting, self._client = greeting, client
            self._use(client)
            self._say(f"{greeting} follows: new requests go on there, and those in work end here")

        def lose() -> None:
            self.greeting, self._client = None, self._own
            self._use(self._own)
            number = client.move_to(self._own)
            self._say(f"{greeting} follows no more" + (f": {number} requests go on here" if number else ""))
            self._on_lost(greeting)

        client = EngineClient(f"request {next(self._numbers)} handed over")
        client.accepts, client.on_ready, client.on_lost = accept, begin, lose
        client.adapters = self._own.adapters.copy()
        await client.serve(*streams)

    def hand_over(self) -> bool:
        """Let what is in work go on in the server that follows; whether there is one."""
        if self.greeting is None:
            return False
        number = self._own.move_to(self._client)
        if number:
            self._say(f"{number} requests go on in {self.greeting}")
        return True

    def close(self) -> None:
        """The server that follows is no engine of this one any more."""
        if self.greeting is not None:
            self._client.on_lost = lambda: None
            self._client.drop()

    def _find_difference(self, greeting: Greeting, ready: Ready) -> str | None:
        """In what the server that follows differs, so that it cannot go on with requests; None where it does not."""
        known = self._known
        if known is None:
            return "this one's engine was never there"
        if ready.version != known.version:
            return f"it is trtrun {ready.version}, and this one {known.version}"
        if greeting.texts != self._texts:
            return "its configuration makes other texts"
        if sorted(ready.files.values()) != sorted(known.files.values()):  # whose names may have hosts in them
            return "it has other files of the models"
        theirs, ours = ready.scheduler_limits(), known.scheduler_limits()
        if theirs.max_length != ours.max_length:
            return f"its requests may have {theirs.max_length} tokens, and those here {ours.max_length}"
        if _without_room(theirs) != _without_room(ours):
            return "its rounds have other limits"
        return None


def _without_room(limits: SchedulerLimits) -> dict[str, Any]:
    """Limits but for the sizes of the stores, which depend on the memory that was free."""
    return {name: value for name, value in asdict(limits).items() if name not in _ROOM}
