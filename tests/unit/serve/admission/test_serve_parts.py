"""What stands before the server's work: the admission, keys, bodies, connections, its section and its command line."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import run
from starlette.requests import Request

from launch.commands import serve as serve_command
from launch.commands.common import server_overrides
from launch.serve.admission import control as owners
from launch.serve.admission.control import (
    BEHIND_OTHERS,
    OWNER,
    WANTING_SECONDS,
    AdmissionControl,
    Owners,
    owner_of_address,
)
from launch.serve.admission.limits import LogitsLimit, LogitsPlace
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.application.addresses import Addresses, Listener, listen
from launch.serve.http.bodies import parse_json
from launch.serve.http.requests import Keys
from trtrun.configuration.config import make_config
from trtrun.configuration.process_sections import ServerSection
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import ConfigError


def refusal_of(work: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value


def test_the_door_counts_completions_and_requests() -> None:
    async def check() -> None:
        admission = AdmissionControl(max_running=4, max_queue=2, max_streams=3)
        assert refusal_of(lambda: admission.enter(1)).kind is Kind.UNAVAILABLE
        admission.is_open = True
        tickets = [admission.enter(4), admission.enter(1)]
        assert refusal_of(lambda: admission.enter(2)).code == "queue_full"
        assert refusal_of(lambda: admission.enter(7)).kind is Kind.INVALID
        tickets.append(admission.enter(1))
        tickets[0].leave()
        tickets[0].leave()
        assert (admission.num_completions, admission.num_requests) == (2, 2)
        tickets[0] = admission.enter(1)
        assert refusal_of(lambda: admission.enter(1)).code == "too_many_streams"
        admission.is_closing = True
        assert refusal_of(lambda: admission.enter(1)).code == "server_ending"
        assert not await admission.wait_empty(0.0)
        waiting = asyncio.create_task(admission.wait_empty(60))
        await asyncio.sleep(0)
        for ticket in tickets:
            ticket.leave()
        assert await waiting and admission.num_completions == 0

    run(check())


def test_the_door_keeps_places_for_those_who_have_few() -> None:
    admission = AdmissionControl(max_running=4, max_queue=12, max_streams=8, is_open=True)
    hog = [admission.enter(2, "hog") for _ in range(6)]
    assert admission.enter(4, "hog").leave() is None, "alone it may have all"
    small = admission.enter(1, "small")
    refused = refusal_of(lambda: admission.enter(1, "hog"))
    assert refused.code == "queue_full" and "13 completions are in work, 12 of them yours, 1 more" in str(refused)
    small.leave()
    assert refusal_of(lambda: admission.enter(1, "hog")).code == "queue_full", "who was there a moment ago comes again"
    for ticket in hog:
        ticket.end_completion()
        ticket.end_completion()
        ticket.end_completion()
    assert (admission.num_completions, admission.num_requests) == (0, 6), "answers that nobody reads"
    assert refusal_of(lambda: admission.enter(1, "hog")).code == "too_many_streams"
    assert admission.enter(16, "small").leave() is None
    for ticket in hog:
        ticket.leave()
    assert (admission.num_completions, admission.num_requests) == (0, 0)


def test_rows_that_go_behind_others_do_so_in_the_server_that_follows_too() -> None:
    admission = AdmissionControl(max_running=4, max_queue=0, max_streams=8, is_open=True)
    taken = admission.take_over(4, f"{BEHIND_OTHERS} key 0")
    admission.enter(4, "somebody")
    assert admission.behind.num_completions == 4
    taken.leave()
    assert admission.behind.num_completions == 0


def test_owners_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(owners, "time", SimpleNamespace(monotonic=lambda: now))
    known = Owners()
    known.ask("a").num_requests = 1
    known.ask("b")
    now = 2 * WANTING_SECONDS
    known.ask("c")
    assert known.num == 2, "a has something in work"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1", "address 127.0.0.1"),
        ("ipv4:10.0.0.7:4711", "address 10.0.0.7"),
        ("::ffff:10.0.0.7", "address 10.0.0.7"),
        ("2001:db8:1:2:3::4", "network 2001:db8:1:2::"),
        ("ipv6:%5B2001:db8:1:2::9%5D:80", "network 2001:db8:1:2::"),
        ("unix:/tmp/x", "address unix:/tmp/x"),
    ],
)
def test_an_address_is_an_owner(address: str, name: str) -> None:
    assert owner_of_address(address) == name


def test_a_key_is_an_owner_whatever_its_header() -> None:
    keys = Keys(["one", "two"])
    found = []
    for headers in ({"x-api-key": "two"}, {"authorization": "Bearer two"}, {"authorization": "Bearer one"}):
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        keys.check(Request({"type": "http", "headers": raw, "client": ("10.0.0.7", 1)}))
        found.append(OWNER.get())
    assert found == ["key 1", "key 1", "key 0"]
    Keys(()).check(Request({"type": "http", "headers": [], "client": ("10.0.0.7", 1)}))
    assert OWNER.get() == "address 10.0.0.7"


def test_logits_of_a_request_are_bounded_as_they_are_filled_up() -> None:
    limit, rows = LogitsLimit(vocab_size=100, most_bytes=400 * 60, most_together=400 * 60), [10, 20]

    def check(*asked: dict[str, Any], max_length: int = 1000) -> None:
        limit.enter(rows, [SamplingParams(**values) for values in asked], max_length).leave()

    context, generation = {"return_context_logits": True}, {"return_generation_logits": True}
    check({"max_tokens": 10_000}, {"max_tokens": 10_000})  # nobody asks
    check(context, context)
    check({}, generation | {"max_tokens": 30})
    check(context, generation | {"max_tokens": 20})
    check({}, generation | {"max_tokens": 10_000}, max_length=50)  # the engine ends it there
    refused = [
        (
            (context, generation | {"max_tokens": 21}),
            "return_context_logits and return_generation_logits: logits of 31",
        ),
        (
            ({}, generation | {"max_tokens": 31}),
            "return_generation_logits: logits of 31 tokens, 100 each, for each of 2",
        ),
        (({"n": 2}, context | {"n": 2}), "take 32000 bytes, and a request may have 24000 (server.max_logits_bytes)"),
    ]
    for asked, line in refused:
        refusal = refusal_of(lambda asked=asked: check(*asked))  # type: ignore[misc]
        assert line in str(refusal) and refusal.kind is Kind.INVALID
        assert refusal.field == line.split(" ")[0].rstrip(":") or refusal.field == "return_context_logits"


def test_logits_of_all_requests_are_bounded_together() -> None:
    limit = LogitsLimit(vocab_size=100, most_bytes=400 * 50, most_together=400 * 90)
    asked = [SamplingParams(return_generation_logits=True, max_tokens=50)]

    def enter(length: int) -> LogitsPlace:
        return limit.enter([1], asked, 1 + length)

    places = [enter(50), enter(40)]
    assert limit.num_bytes == 400 * 90
    for length in (1, 50):
        refusal = refusal_of(lambda length=length: enter(length))  # type: ignore[misc]
        assert refusal.kind is Kind.BUSY and refusal.code == "too_many_bytes" and refusal.retry_after
        assert f"with {400 * length} bytes of this request more logits" in str(refusal)
    limit.enter([1], [SamplingParams()], 100)  # nobody else waits for it
    for _ in range(2):
        places[0].leave()
    assert limit.num_bytes == 400 * 40
    places[0] = enter(50)
    for place in places:
        place.leave()
    assert limit.num_bytes == 0


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(" one \n\ntwo\n")
    keys = Keys.read(file)
    assert keys.are_needed and not Keys.read(None).are_needed
    for header in ("Bearer one", "Bearer two"):
        keys.check_header(header)
    for header in ("", "one", "Bearer", "Bearer ", "Basic one"):
        with pytest.raises(Refusal, match="wants an API key"):
            keys.check_header(header)
    for header in ("Bearer on", "Bearer one two", "Bearer one\ntwo"):
        with pytest.raises(Refusal, match="wants an API key of its own"):
            keys.check_header(header)
    file.write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no API key"):
        Keys.read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_a_key_is_a_bearers() -> None:
    keys = Keys(["one", "two"])
    for authorization in ("Bearer two", "bearer  one "):
        keys.check_header(authorization)
    for authorization in (
        "", "two", "Basic two", "Bearer", "Bearer ", "Bearer tw", "Bearer three", "Bearer one two", "Bearer one\ntwo",
        "\xff \xff",
    ):  # fmt: skip
        refusal = refusal_of(lambda sent=authorization: keys.check_header(sent))
        assert refusal.kind is Kind.UNAUTHORIZED and "wants an API key" in str(refusal)
    Keys(()).check_header("")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nclef\xc3\xa9\n", "line 2: an API key has printable ASCII characters alone"),
        (b"good\r\n\xff\xfe\r\n", "line 2: "),
        (b"a\0b\n", "line 1: "),
        (b" \r\n\n", "holds no API key"),
        (b"k" * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_keys_that_no_client_could_send_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Keys.read(tmp_path / "keys")


def test_bodies_that_are_no_json_are_one_line() -> None:
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
    for body in (b"", b"{", b"\xc3", b"[" * 100000, b"1" * 100000, b'{"a":1,"a":2}'):
        assert "\n" not in str(refusal_of(lambda body=body: parse_json(body)))  # type: ignore[misc]


def test_connections_do_not_wait_for_acknowledgements() -> None:
    listener = listen("127.0.0.1", 0, "server.http_port")
    with listener.socket, socket.create_connection(("127.0.0.1", listener.port)):
        assert not Addresses(ServerSection(), listener).are_open
        with listen("0.0.0.0", 0, "server.http_port").socket as opened:
            assert Addresses(ServerSection(), Listener(opened, 0)).are_open
        listener.socket.settimeout(60)
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# The command line and the configuration.


def test_each_port_is_one_of_its_own() -> None:
    sections = {"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    with pytest.raises(ConfigError, match="metrics_port: is 9, as http_port is: give each a port of its own, or 0"):
        make_config(sections | {"server": {"http_port": 9, "metrics_port": 9}})
    make_config(sections | {"server": dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0)})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"http_prot": 1}, r"server\.http_prot: unknown key \(did you mean 'http_port'\?\)"),
        ({"http_port": 70000}, r"server\.http_port: must be less than or equal to 65535"),
        ({"tls_cert": "x"}, r"server: tls_key: missing: TLS needs server\.tls_cert and server\.tls_key, both"),
        ({"max_restarts": True}, r"server\.max_restarts: must be a number, not true"),
        ({"host": "a\nb"}, r"server\.host: .* must be one line of text"),
    ],
)
def test_the_server_section_is_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"},
                     "server": values})  # fmt: skip


def test_options_of_the_command_line_become_keys_of_the_section() -> None:
    given = {"host": "::1", "http_port": 0, "grpc_port": None, "api_key_file": "my keys", "part": 5}
    assert server_overrides(given) == ['server.host="::1"', "server.http_port=0", 'server.api_key_file="my keys"']


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_command.check_extra()
    monkeypatch.setattr(serve_command, "LIBRARIES", ("jinja2", "no_such_library"))
    with pytest.raises(ConfigError, match=r"of which no_such_library is missing: pip install 'trtrun\[serve\]'"):
        serve_command.check_extra()


def test_other_commands_do_not_need_it_and_start_without_what_takes_long_to_import() -> None:
    unwanted = (*serve_command.LIBRARIES, "numpy", "torch")
    code = f"import sys, launch.cli; print(sorted({{*{unwanted!r}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
