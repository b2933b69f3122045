"""A server's place among those of one name: it takes the name from the one before once its own engine is there, goes on
with that one's requests, and hands its own to the one that follows.

It joins the parts of this room to a server. Without a name it does nothing. It does not know when a server ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping

from launch.serve.admission.control import AdmissionControl
from launch.serve.engine.client import EngineClient
from launch.serve.handover.door import Door, Greeting, knock
from launch.serve.handover.name_file import KEY, DoorAddress, NameFile, ServedName
from launch.serve.handover.relay import Relay
from launch.serve.handover.successor import Successor, hash_texts
from trtrun.configuration.config import RuntimeConfig


class Handover:
    """One server's.

    Attributes:
        client: the engine that new requests go to: the own one, or the server that follows.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        own: EngineClient,
        admission: AdmissionControl,
        use: Callable[[EngineClient], None],
        say: Callable[[str], None],
    ) -> None:
        """Nothing is read or listened to yet.

        Args:
            config: of the server.
            own: its engine.
            admission: of its requests.
            use: called with the engine that new requests go to from now on.
            say: tells the user a line.

        Raises:
            ConfigError: the name's file cannot be written.
        """
        section = config.server
        self._file = None if section.name_file is None else NameFile(section.name_file.absolute())
        if self._file is not None:
            self._file.check()
        self._own, self._admission, self._use, self._say = own, admission, use, say
        self.client = own
        self._texts = hash_texts(config)
        self._successor = Successor(own, self._texts, self._change_client, self._take_back, say)
        self._door = Door(section, self._successor.serve)
        self._relay: Relay | None = None
        self._taking_back: asyncio.Future[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._taken: tuple[ServedName, DoorAddress] | None = None

    def note_ready(self) -> None:
        """The own engine is there, for the first time or again."""
        self._successor.note_ready()

    async def take_name(self, name: ServedName, is_loopback: bool) -> None:
        """Say that this server is the one of its name, and go on with what the one before has.

        Args:
            name: what the file is to say.
            is_loopback: whether only this host reaches the server; in a Slurm job the server that follows does, too.
        """
        if self._file is None:
            return
        try:
            before = await asyncio.to_thread(self._file.read_door)  # which may lie far away, and take its time
            await self._door.open(own_names(os.environ), not is_loopback or name.job is not None)
            await asyncio.to_thread(self._file.take, name, self._door.address)
        except OSError as error:
            self._say(f"{KEY}: cannot write {self._file.path}, so none follows: {error.strerror or error}")
            return
        self._taken = name, self._door.address
        self._say(f"{self._file.path} says where it listens")
        if before is not None:
            greeting = Greeting(url=name.url, texts=self._texts, job=name.job)
            self._following = asyncio.create_task(self._follow(before, greeting))

    def hand_over(self) -> bool:
        """Let what is in work go on in the server that follows; whether there is one."""
        return self._successor.hand_over()

    def end(self) -> None:
        """The server's time is over: what is in work goes on in the server that follows. Where none does, the server
        before has its requests back."""
        if self.hand_over():
            return
        if self._taken is not None:
            self._say("no other server has taken over the name: what is in work ends here")
        if self._relay is not None:
            self._relay.close()

    async def close(self) -> None:
        """Leave the name, and end what is going on with others."""
        self._door.close()
        self._successor.close()
        if self._file is not None and self._taken is not None:
            if self._taking_back is not None:
                await self._taking_back
            await asyncio.to_thread(self._file.leave, *self._taken)
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self, before: DoorAddress, greeting: Greeting) -> None:
        """Be an engine of the server before until it ends."""
        try:
            streams = await knock(before, greeting)
        except OSError as error:
            self._say(f"the server that had the name is not reached, and hands nothing over: {error}")
            return
        ready = self._own.ready
        if ready is None:  # it has just been lost, and the server before does without
            streams[1].close()
            return
        self._relay = Relay(lambda: self.client, self._admission, streams)
        try:
            await self._relay.run(ready)
        finally:
            self._relay = None

    def _take_back(self, lost: Greeting) -> None:
        """The server that followed is gone: this one has the name again, unless yet another one has taken it."""
        if self._file is not None and self._taken is not None:
            loop = asyncio.get_running_loop()
            self._taking_back = loop.run_in_executor(None, self._file.take_back, lost.url, *self._taken)

    def _change_client(self, client: EngineClient) -> None:
        self.client = client
        greeting = self._successor.greeting
        self._admission.successor = None if greeting is None else greeting.url
        self._use(client)


def own_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of this host that others may know it by, Slurm's first."""
    names = (environment.get("SLURMD_NODENAME"), socket.gethostname())
    return tuple(dict.fromkeys(name for name in names if name))
