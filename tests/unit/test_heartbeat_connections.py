"""Rank 0's door: real sockets, and who is let in."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from parallel.errors import HeartbeatError
from parallel.topology import Topology
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.heartbeat import HeartbeatClient, Names
from parallel.watchdog.heartbeat_server import HeartbeatServer
from parallel.watchdog.message_socket import FEW_BYTES, MessageSocket, connect, listen, own_addresses, wait_for

TOPOLOGY = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
LONG = 600.0
SOON = 30.0
NAMES = Names("draft rank 1 (cpu:0)", "orchestrator rank 0 (host)")


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    server = HeartbeatServer(TOPOLOGY, Activity(), LONG, LONG, "late")
    yield server
    server.close()


def refused(connection: socket.socket) -> bool:
    """Whether the other side closes the connection."""
    connection.settimeout(SOON)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_worker_that_knows_the_token_is_let_in(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    lines = connect(["127.0.0.1"], port, server.token, {"rank": 1})
    lines.send({"doing": Activity().look().as_dict()})
    wait_for([lines], SOON)
    assert [list(message) for message in lines.receive()] == [["doing"]]  # each beat is answered
    lines.close()


def test_another_token_another_rank_and_another_program_are_kept_out(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    for token, rank in (("x" * 64, 1), (server.token, 9), (server.token, 0)):
        with pytest.raises(HeartbeatError, match=r"127\.0\.0\.1 port .*closed at once"):
            connect(["127.0.0.1"], port, token, {"rank": rank})
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"x" * (FEW_BYTES + 1), b'{"rank": 1}\n', b'{"rank": [1]}\n'):
        with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
            stranger.sendall(text)
            assert refused(stranger)
    connect(["127.0.0.1"], port, server.token, {"rank": 1}).close()  # the door still works


def test_a_line_that_is_too_long_closes_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = MessageSocket(ours, most_bytes=20)
        theirs.sendall(b'{"a": 1}\n{"b":')
        assert (lines.receive(), lines.is_closed) == ([{"a": 1}], False)
        theirs.sendall(b" " * 20)
        assert (lines.receive(), lines.is_closed) == ([], True)


def test_workers_get_in_past_any_number_of_strangers_that_say_nothing(server: HeartbeatServer) -> None:
    """Those that came first make room: none of them has long to say who it is once others wait at the door."""
    port = server.listen(everywhere=False)
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=SOON)) for _ in range(200)
        ]
        for rank in (1, 2, 3):
            connect(["127.0.0.1"], port, server.token, {"rank": rank}).close()
        assert all(refused(stranger) for stranger in strangers[:100])
        strangers[-1].settimeout(SOON)
        assert b"nonce" in strangers[-1].recv(4096)  # the last ones may still say who they are


def test_who_connects_and_says_nothing_is_sent_away(server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.watchdog.connections.ANSWER_SECONDS", 0.1)
    port = server.listen(everywhere=False)
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        assert refused(stranger)


def test_the_token_does_not_cross_the_network(server: HeartbeatServer) -> None:
    """What a listener on the wire sees of one handshake does not let it in at the next."""
    port = server.listen(everywhere=False)
    seen: list[bytes] = []

    class Recorder(MessageSocket):
        def send(self, message: dict[str, object]) -> None:
            seen.append(json.dumps(message).encode())
            super().send(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallel.watchdog.message_socket.MessageSocket", Recorder)
        connect(["127.0.0.1"], port, server.token, {"rank": 1}).close()
    assert seen and not any(server.token.encode() in text for text in seen)
    with socket.create_connection(("127.0.0.1", port), timeout=SOON) as stranger:
        stranger.sendall(seen[0] + b"\n")
        assert refused(stranger)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    """Such as another program that has the port on a host with the same address in another network."""
    with listen(everywhere=False) as listener:
        listener.settimeout(SOON)
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"nonce": "1"}\n')
                connection.recv(4096)
                connection.sendall(b'{"proof": "me"}\n')
                refused(connection)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HeartbeatError, match="another program answers there"):
            connect(["127.0.0.1"], port, "token", {"rank": 1})
        thread.join()


def test_addresses_are_tried_in_turn_and_all_reasons_are_told(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    # The whole of 127.0.0.0/8 is this host, but the server listens on one address of it.
    connect(["127.0.0.2", "127.0.0.1"], port, server.token, {"rank": 1}).close()
    with listen(everywhere=False) as unused:
        closed = unused.getsockname()[1]
    with pytest.raises(HeartbeatError, match=rf"127.0.0.2 port {closed}: .*; 127.0.0.1 port {closed}: "):
        connect(["127.0.0.2", "127.0.0.1"], closed, server.token, {"rank": 1})


def test_other_hosts_reach_a_server_of_several_hosts_only(server: HeartbeatServer) -> None:
    addresses = own_addresses()
    assert not any(address.startswith("127.") or address == "::1" for address in addresses)
    if not addresses:
        pytest.skip("this machine has no network interface but the loopback")
    port = server.listen(everywhere=True)
    connect(addresses, port, server.token, {"rank": 2}).close()
    alone = server.listen(everywhere=False)
    with pytest.raises(HeartbeatError):
        connect(addresses, alone, server.token, {"rank": 2})


def test_a_client_beats_and_leaves_with_a_goodbye(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    activity = Activity()
    activity.enter(3, Phase.DRAFTING)
    lines = connect(["127.0.0.1"], port, server.token, {"rank": 1})
    client = HeartbeatClient(lines, activity, LONG, NAMES, True, LONG)
    deadline = time.monotonic() + SOON
    while (state := server._workers.states()[0]).doing is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert state.doing.words == "in round 3 (drafting)"
    client.close()
    while not server._workers.states()[0].has_left:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lines.is_closed


def test_nobody_waits_for_the_stack_of_a_rank_that_is_silent() -> None:
    """Such as one whose host is cut off: its connection is open, and nothing will ever come."""
    workers = WorkerConnections([1, 2], Activity())
    listener = listen(everywhere=False)
    workers.add_listener(listener)
    clients: list[HeartbeatClient] = []
    silent: list[MessageSocket] = []

    def connect_both() -> None:
        port = listener.getsockname()[1]
        silent.append(connect(["127.0.0.1"], port, workers.token, {"rank": 2}))
        answering = connect(["127.0.0.1"], port, workers.token, {"rank": 1})
        clients.append(HeartbeatClient(answering, Activity(), LONG, NAMES, True, LONG))

    connecting = threading.Thread(target=connect_both)
    connecting.start()
    while not clients:
        workers.serve(0.05)
    connecting.join()
    workers.new_question()
    stacks = workers.gather_stacks(LONG, patience=1.0)  # it waits for LONG where it waits for both
    assert set(stacks) == {1}
    workers.say_goodbye()
    workers.close()
    clients[0].close()
    silent[0].close()


def test_a_server_that_closes_releases_its_clients(server: HeartbeatServer) -> None:
    port = server.listen(everywhere=False)
    lines = connect(["127.0.0.1"], port, server.token, {"rank": 1})
    client = HeartbeatClient(lines, Activity(), LONG, NAMES, True, LONG)
    server.close()
    client._thread.join(timeout=SOON)
    assert not client._thread.is_alive()


def test_connections_with_high_file_numbers_work(server: HeartbeatServer) -> None:
    """A process with many weights and GPUs has more than 1024 files open, which is beyond select's reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        port = server.listen(everywhere=False)
        lines = connect(["127.0.0.1"], port, server.token, {"rank": 1})
        assert lines.fileno() > 1023
        client = HeartbeatClient(lines, Activity(), LONG, NAMES, True, LONG)
        client.close()
        assert lines.is_closed
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
