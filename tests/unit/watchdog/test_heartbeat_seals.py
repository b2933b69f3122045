"""Between rank 0 and its workers: nobody can say anything for either, or learn what it would need for that."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from heartbeats import SOON, refused, served, serving

from parallel.errors import HeartbeatError
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.handshake import connect, listen
from parallel.watchdog.heartbeat_server import HeartbeatServer
from parallel.watchdog.message_socket import MessageSocket, wait_for

Change = Callable[[list[bytes]], list[bytes]]


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    with serving() as server:
        yield server


class Between:
    """A program between a worker and rank 0: it changes the lines that one side has sent so far, in steps of one.

    Attributes:
        port: that the worker connects to.
        seen: all lines, as they came.
    """

    def __init__(self, port: int, from_worker: Change = list, from_server: Change = list) -> None:
        self._listener = listen(everywhere=False)
        self.port = int(self._listener.getsockname()[1])
        self.seen: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, args=(port, from_worker, from_server), daemon=True)]
        self._threads[0].start()

    def _serve(self, port: int, from_worker: Change, from_server: Change) -> None:
        worker, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        self._sockets += [worker, server]
        other = threading.Thread(target=self._forward, args=(server, worker, from_server), daemon=True)
        other.start()
        self._threads.append(other)
        self._forward(worker, server, from_worker)

    def _forward(self, here: socket.socket, there: socket.socket, change: Change) -> None:
        came: list[bytes] = []
        sent: list[bytes] = []
        with suppress(OSError):
            for line in here.makefile("rb"):
                self.seen.append(line)
                came.append(line)
                changed = change(came)
                if changed[len(sent) :]:
                    there.sendall(b"".join(changed[len(sent) :]))
                sent = changed
            there.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for opened in (self._listener, *self._sockets):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()
        for thread in self._threads:
            thread.join(SOON)


def failing(line: bytes) -> bytes:
    """The same line, sealed for something else."""
    seal, _, _ = line.partition(b" ")
    return seal + b' {"failed": "by a stranger"}\n'


BETWEEN: dict[str, Change] = {
    "other words under the same seal": lambda lines: [*lines[:1], *map(failing, lines[1:])],
    "another bit": lambda lines: [*lines[:1], *(line.replace(b"idle", b"idlf") for line in lines[1:])],
    "a line put in": lambda lines: [*lines[:1], b'{"failed": "by a stranger"}\n', *lines[1:]],
    "a line twice": lambda lines: [line for line in lines for _ in range(1 if line is lines[0] else 2)],
    "another order": lambda lines: [*lines[:1], *(lines[2:3] + lines[1:2] if len(lines) > 2 else [])],
    "a line left out": lambda lines: [*lines[:1], *lines[2:]],
    "no seal": lambda lines: [*lines[:1], *(line.partition(b" ")[2] for line in lines[1:])],
}


@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
def test_nobody_between_a_worker_and_rank_0_can_say_anything_for_it(
    change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    workers = WorkerConnections([1, 2], Activity())
    listener = listen(everywhere=False)
    workers.add_listener(listener)
    between = Between(listener.getsockname()[1], from_worker=change)
    opened: list[MessageSocket] = []

    def play_worker() -> None:
        worker = connect(["127.0.0.1"], between.port, workers.token, {"rank": 1})
        activity = Activity()
        for round_index in range(3):
            activity.enter(round_index, Phase.IDLE)
            worker.send({"doing": activity.look().as_dict()})
        opened.append(worker)

    playing = threading.Thread(target=play_worker)
    playing.start()
    served(workers, lambda: workers.states()[0].closed_seconds is not None)
    playing.join(SOON)
    assert workers.first_failure() is None
    doing = workers.states()[0].doing
    assert doing is None or doing.round_index == 0  # what came before it was touched
    assert "somebody has changed it: a message without the seal" in caplog.text
    workers.close()
    between.close()
    opened[0].close()


def test_nobody_between_rank_0_and_a_worker_can_say_anything_for_it() -> None:
    workers = WorkerConnections([1, 2], Activity())
    listener = listen(everywhere=False)
    workers.add_listener(listener)

    def change(lines: list[bytes]) -> list[bytes]:
        return [*lines[:2], *(line.partition(b" ")[0] + b' {"lost": [1], "goodbye": true}\n' for line in lines[2:])]

    between = Between(listener.getsockname()[1], from_server=change)
    heard: list[MessageSocket] = []

    def play_worker() -> None:
        worker = connect(["127.0.0.1"], between.port, workers.token, {"rank": 1})
        heard.append(worker)
        worker.send({"doing": Activity().look().as_dict()})  # its answer is what is changed
        while not worker.is_closed:
            wait_for([worker], SOON)
            assert worker.receive() == []

    playing = threading.Thread(target=play_worker)
    playing.start()
    served(workers, lambda: not playing.is_alive())
    assert "without the seal" in heard[0].fault
    workers.close()
    between.close()
    heard[0].close()


def test_what_one_connection_shows_is_of_no_use_for_another(server: HeartbeatServer) -> None:
    """Neither the token nor anything that lets one in crosses the network."""
    port = server.listen(everywhere=False)
    between = Between(port)
    connect(["127.0.0.1"], between.port, server.token, {"rank": 1}).close()
    between.close()
    assert not any(server.token.encode() in line for line in between.seen)
    for line in between.seen:
        with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
            stranger.sendall(line)
            assert refused(stranger)
    assert server._workers.states()[0].doing is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"1" * 32 + b"\n", b"me\n"),
        (b"1" * 32 + b"\n", b"0" * 64 + b" [[[[\n"),
        (b'{"nonce": "\\ud800"}\n', b""),
        (b"[" * 4000 + b"\n", b""),
        (b"x" * 100_000, b""),
    ],
)
def test_a_server_that_does_not_know_the_token_is_not_believed(first: bytes, second: bytes) -> None:
    """Such as another program that has the port on a host with the same address in another network."""
    with listen(everywhere=False) as listener:
        listener.settimeout(SOON)
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError):
                connection.sendall(first)
                connection.recv(4096)
                connection.sendall(second)
                refused(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HeartbeatError, match="another program answers there"):
            connect(["127.0.0.1"], port, "token", {"rank": 1})
        thread.join()
