"""Workers' side of the heartbeat, over real sockets: how they find rank 0, and leave it."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest
from heartbeats import LONG, NAMES, SOON, serving

from parallel.errors import HeartbeatError
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.connections import WorkerConnections
from parallel.watchdog.handshake import connect, listen, own_addresses
from parallel.watchdog.heartbeat import HeartbeatClient
from parallel.watchdog.heartbeat_server import HeartbeatServer
from parallel.watchdog.message_socket import MessageSocket


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    with serving() as server:
        yield server


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
        pytest.skip("needs a network interface beside the loopback")
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


def test_a_rank_that_the_job_can_do_without_later_ends_the_start(server: HeartbeatServer) -> None:
    """Rounds go on without it, but without its part no start comes to an end."""
    server._expendable = (1,)
    lines = connect(["127.0.0.1"], server.listen(everywhere=False), server.token, {"rank": 1})
    client = HeartbeatClient(lines, Activity(), LONG, NAMES, True, LONG)
    failing = threading.Thread(target=client.fail, args=("it is broken",))
    failing.start()
    deadline = time.monotonic() + SOON
    while (failure := server.take_failure()) is None and server.loss is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.loss is None and failure is not None
    assert failure.line == "draft rank 1 (cpu:0) failed: it is broken"
    server.close()
    client.close()
    failing.join(timeout=SOON)
    assert not failing.is_alive()
