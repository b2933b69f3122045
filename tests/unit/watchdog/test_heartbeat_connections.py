"""Rank 0's door: real sockets, and who is let in."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from heartbeats import LONG, SOON, refused, served, serving

from parallel.errors import HeartbeatError
from parallel.watchdog.activity import Activity
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.handshake import MOST_LINES, Door, connect, listen, own_loopback
from parallel.watchdog.heartbeat_server import HeartbeatServer
from parallel.watchdog.message_socket import FEW_BYTES, MessageSocket, make_nonce, make_seals, wait_for


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    with serving() as server:
        yield server


def test_a_worker_that_knows_the_token_is_let_in(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    lines = connect(["127.0.0.1"], port, server.token, {"rank": 1})
    lines.send({"doing": Activity().look().as_dict()})
    wait_for([lines], SOON)
    assert [list(message) for message in lines.receive()] == [["doing"]]  # each beat is answered
    lines.close()


def test_a_host_without_ipv4_reaches_itself(server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = socket.socket.bind

    def refuse(opened: socket.socket, address: tuple[object, ...]) -> None:
        if opened.family == socket.AF_INET:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        bind(opened, address)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert own_loopback() == "::1"
    connect([own_loopback()], server.listen(everywhere=False), server.token, {"rank": 1}).close()


STRANGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "no object": b"[1, 2]\n",
    "a lone surrogate": b'{"rank": 1, "proof": "\\ud800"}\n',
    "nested too deeply": b"[" * 3000 + b"\n",
    "nested too deeply behind a nonce": make_nonce() + b" " + b"0" * 64 + b" " + b"[" * 3000 + b"\n",
    "no UTF-8": b"\xff\xfe\x00" * 50 + b"\n",
    "a number of many digits": b"1" * 4000 + b"\n",
    "a long line": b"x" * (FEW_BYTES + 1),
    "an empty line": b"\n",
    "a nonce alone": make_nonce() + b"\n",
    "many lines": b"{}\n" * 20000,
}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_whatever_a_stranger_says_costs_its_connection_alone(server: HeartbeatServer, text: bytes) -> None:
    port = server.listen(everywhere=False)
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(text)
        assert refused(stranger)
    connect(["127.0.0.1"], port, server.token, {"rank": 1}).close()  # the door still works
    assert not server.has_failed()


def test_a_stranger_that_never_stops_does_not_keep_workers_from_getting_in(server: HeartbeatServer) -> None:
    """Each of its lines is an object, as workers send them."""
    port = server.listen(everywhere=False)

    def speak() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
            while True:
                stranger.sendall(b"{}\n" * 20000)

    speaking = threading.Thread(target=speak, daemon=True)
    speaking.start()
    connect(["127.0.0.1"], port, server.token, {"rank": 1}).close()
    speaking.join(SOON)
    assert not speaking.is_alive()


def test_another_token_and_another_rank_are_kept_out(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    for token, rank in (("x" * 64, 1), (server.token, 9), (server.token, 0), (server.token, [1])):
        with pytest.raises(HeartbeatError, match=r"127\.0\.0\.1 port .*closed at once"):
            connect(["127.0.0.1"], port, token, {"rank": rank})
    connect(["127.0.0.1"], port, server.token, {"rank": 1}).close()  # the door still works


def sealed_pair() -> tuple[MessageSocket, MessageSocket]:
    """Two ends of a connection, sealed."""
    ours, theirs = map(MessageSocket, socket.socketpair())
    nonces = make_nonce(), make_nonce()
    for end, (outward, inward) in ((ours, (0, 1)), (theirs, (1, 0))):
        seals = make_seals("token", *nonces)
        end.seal(seals[outward], seals[inward])
    return ours, theirs


def test_a_line_that_is_too_long_closes_the_connection() -> None:
    ours, theirs = map(MessageSocket, socket.socketpair())
    theirs.send_line(b"a" * FEW_BYTES)
    assert (ours.receive_line(), ours.is_closed) == (b"a" * FEW_BYTES, False)
    theirs.send_line(b"a" * (FEW_BYTES + 1))
    assert (ours.receive_line(), ours.is_closed) == (None, True)
    ours.close()
    theirs.close()


def test_a_connection_is_read_once_a_turn_and_to_its_end_before_it_counts_as_closed() -> None:
    ours, theirs = sealed_pair()
    for number in range(36):
        theirs.send({"number": number, "text": "x" * 2000})
    theirs.close()
    ours.send({"nobody": "reads this"})
    first = ours.receive()
    assert 0 < len(first) < 36 and not ours.is_closed
    rest = []
    while not ours.is_closed:
        rest += ours.receive()
    assert [message["number"] for message in first + rest] == list(range(36))
    ours.close()


def test_workers_get_in_past_any_number_of_strangers_that_say_nothing(
    server: HeartbeatServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that came first make room: none of them has long to say who it is once others wait at the door."""
    port = server.listen(everywhere=False)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SOON)) for _ in range(200)
        ]
        for rank in (1, 2):
            connect(["127.0.0.1"], port, server.token, {"rank": rank}).close()
        assert all(refused(stranger) for stranger in strangers[:100])
        strangers[-1].settimeout(SOON)
        assert len(strangers[-1].recv(4096)) == len(make_nonce()) + 1  # the last ones may still say who they are
    # Not a line for each of them.
    told = [record.getMessage() for record in caplog.records if "not of this job" in record.getMessage()]
    assert len(told) == MOST_LINES and "from 127.0.0.1" in told[0]
    assert told[-1].endswith("further ones are counted, and not told")


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_worker_that_found_no_place_comes_again(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    """Its connection made room for those behind it, or was thrown away by a system with a full queue."""
    monkeypatch.setattr("parallel.watchdog.handshake.CONNECT_SECONDS", SOON if is_closed else 0.1)
    workers = WorkerConnections([1], Activity())
    listener = listen(everywhere=False)
    opened: list[MessageSocket] = []
    address = listener.getsockname()
    entering = threading.Thread(
        target=lambda: opened.append(connect([address[0]], address[1], workers.token, {"rank": 1}))
    )
    entering.start()
    listener.settimeout(SOON)
    with ExitStack() as stack:
        for _ in range(3):
            lost = stack.enter_context(listener.accept()[0])
            if is_closed:
                lost.close()
        workers.add_listener(listener)
        served(workers, lambda: not entering.is_alive())
    opened[0].close()
    workers.close()


def test_once_all_workers_are_there_the_port_is_closed(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    workers = []
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        for rank in (1, 2, 3):
            workers.append(connect(["127.0.0.1"], port, server.token, {"rank": rank}))
            workers[-1].send({"doing": Activity().look().as_dict()})
        for worker in workers:
            wait_for([worker], SOON)
            assert worker.receive()
        assert refused(stranger)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=SOON)
    for worker in workers:
        worker.close()


def test_where_the_system_has_no_file_left_the_door_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port stays ready to be read: trying again at once would keep a core busy."""
    workers = WorkerConnections([1], Activity())
    tries: list[int | None] = []

    def try_in_vain(door: Door, error: OSError) -> None:
        tries.append(error.errno)
        pause(door, error)

    pause = Door._pause
    monkeypatch.setattr(Door, "_pause", try_in_vain)
    with listen(everywhere=False) as listener, socket.create_connection(listener.getsockname()[:2]) as stranger:
        workers.add_listener(listener)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(lowest := os.dup(0))  # the first number that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            for _ in range(20):
                workers.serve(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert tries == [errno.EMFILE]
        monkeypatch.setattr("parallel.watchdog.handshake.time.monotonic", lambda: time.perf_counter() + LONG)
        stranger.settimeout(0)
        deadline = time.perf_counter() + SOON
        while True:
            with suppress(BlockingIOError):
                assert stranger.recv(4096)
                break
            assert time.perf_counter() < deadline
            workers.serve(0.01)
        workers.close()


def test_who_connects_and_says_nothing_is_sent_away(server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.watchdog.handshake.ANSWER_SECONDS", 0.1)
    port = server.listen(everywhere=False)
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        assert refused(stranger)
