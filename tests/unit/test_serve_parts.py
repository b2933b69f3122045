"""The parts of the server, each by itself: messages, the door, restarts, keys, templates, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from engine_messages import LIMITS, SAMPLING, delta_of, reader_of, run

from launch.commands import serve as serve_command
from launch.commands.serve import server_overrides
from launch.serve import engine_keeper, messages
from launch.serve.chat_template import ChatTemplate, read_chat_template
from launch.serve.engine_keeper import RestartLimit
from launch.serve.http_requests import Keys, parse_json
from launch.serve.http_server import Listener, is_loopback, listen
from launch.serve.limits import Door
from launch.serve.messages import Abort, Delta, Deltas, Ended, Generate, MessageError, MessageStream, Ready, encode
from launch.serve.refusals import Kind, Refusal
from trtrun.config import make_config
from trtrun.errors import CheckpointError, ConfigError, InvalidRequestError

# Messages.


def test_messages_come_back_as_they_were_sent() -> None:
    async def check() -> None:
        generate = Generate.of("request 0", (1, 2), SAMPLING, {1: (7, 8)})
        others: list[messages.Message] = [
            Deltas(deltas=(Delta.of(delta_of((3, 4), "stop")), Delta.of(delta_of((), index=1)))),
            Ended(request_id="a", error="b"),
            Abort(request_id="c"),
            Ready(version="1", config_hash="h", limits=asdict(LIMITS)),
        ]
        stream = MessageStream(reader_of(b"".join(map(encode, [generate, *others]))))
        read = await stream.read()
        assert isinstance(read, Generate) and read.sampling_params() == SAMPLING
        assert (read.request_id, read.prompt_token_ids, read.generated) == ("request 0", (1, 2), {1: (7, 8)})
        for message in others:
            assert await stream.read() == message
        assert await stream.read() is None
        assert Ready.scheduler_limits(others[-1]) == LIMITS  # type: ignore[arg-type]
        back = Delta.of(delta_of((3, 4), "stop")).completion_delta()
        assert back == delta_of((3, 4), "stop")

    run(check())


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"kind": "abort"}', b'{"kind": "abort", "request_id": 5}', b'{"kind": "os.system"}',
     b'{"kind": "abort", "request_id": "a", "more": 1}', b"\x80\x04\x95"],
)  # fmt: skip
def test_what_is_no_message_is_refused(body: bytes) -> None:
    async def check() -> None:
        with pytest.raises(MessageError):
            await MessageStream(reader_of(len(body).to_bytes(4, "big") + body)).read()

    run(check())


def test_messages_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_BYTES", 100)
    with pytest.raises(MessageError, match="larger than 100"):
        encode(Abort(request_id="a" * 100))

    async def check() -> None:
        with pytest.raises(MessageError, match="announces a message of 101 bytes"):
            await MessageStream(reader_of((101).to_bytes(4, "big"))).read()
        assert await MessageStream(reader_of((50).to_bytes(4, "big") + b"{")).read() is None

    run(check())


# The door, restarts, keys.


def refusal_of(work: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        work()
    return caught.value


def test_the_door_counts_completions_and_requests() -> None:
    async def check() -> None:
        door = Door(max_running=4, max_queue=2, max_streams=3)
        assert refusal_of(lambda: door.enter(1)).kind is Kind.UNAVAILABLE
        door.is_open = True
        tickets = [door.enter(4), door.enter(1)]
        assert refusal_of(lambda: door.enter(2)).code == "queue_full"
        assert refusal_of(lambda: door.enter(7)).kind is Kind.INVALID
        tickets.append(door.enter(1))
        tickets[0].leave()
        tickets[0].leave()
        assert (door.num_completions, door.num_requests) == (2, 2)
        tickets[0] = door.enter(1)
        assert refusal_of(lambda: door.enter(1)).code == "too_many_streams"
        door.is_closing = True
        assert refusal_of(lambda: door.enter(1)).code == "server_ending"
        assert not await door.wait_empty(0.0)
        waiting = asyncio.create_task(door.wait_empty(60))
        await asyncio.sleep(0)
        for ticket in tickets:
            ticket.leave()
        assert await waiting and door.num_completions == 0

    run(check())


def test_restarts_are_counted_within_their_window() -> None:
    now = 0.0
    limit = RestartLimit(2, 10.0, clock=lambda: now)
    assert limit.allow() and limit.allow() and not limit.allow()
    assert str(limit) == "2 of 2 within 10 s"
    now = 10.5
    assert limit.allow() and str(limit) == "1 of 2 within 10 s"
    assert not RestartLimit(0, 10.0).allow()


def test_each_port_is_one_of_its_own() -> None:
    sections = {"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    with pytest.raises(ConfigError, match="metrics_port: is 9, as http_port is: give each a port of its own, or 0"):
        make_config(sections | {"server": {"http_port": 9, "metrics_port": 9}})
    make_config(sections | {"server": dict.fromkeys(("http_port", "grpc_port", "metrics_port"), 0)})


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


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_engine_that_is_late_is_told_and_one_that_is_killed_is_not(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_keeper, "END_SECONDS", 0.0)

    told: list[str] = []

    async def check() -> None:
        command = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
        keeper = engine_keeper.EngineKeeper(command, os.environ, RestartLimit(0, 1.0), lambda line: None, told.append)
        keeping = asyncio.create_task(keeper.keep())
        while keeper._process is None:
            await asyncio.sleep(0.001)
        if is_killed:
            keeper.kill()
        else:
            await keeper.close()
        assert await keeping in (128 + signal.SIGTERM, 128 + signal.SIGKILL)

    run(check())
    assert ("has not ended by itself" in caplog.text) is not is_killed
    assert not told


@pytest.mark.parametrize(
    ("end", "status", "lines"),
    [
        ("os.kill(os.getpid(), 9)", 137, ["the engine was ended by SIGKILL before it was up"]),
        ("sys.exit(2)", 2, []),  # it has said why itself
    ],
)
def test_an_engine_that_is_killed_before_it_is_up_is_told_of(end: str, status: int, lines: list[str]) -> None:
    told: list[str] = []

    async def check() -> None:
        command = [sys.executable, "-c", f"import os, sys; {end}"]
        keeper = engine_keeper.EngineKeeper(command, os.environ, RestartLimit(3, 1.0), lambda line: None, told.append)
        assert await keeper.keep() == status

    run(check())
    assert told == lines


def test_bodies_that_are_no_json_are_one_line() -> None:
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
    for body in (b"", b"{", b"\xc3", b"[" * 100000, b"1" * 100000, b'{"a":1,"a":2}'):
        assert "\n" not in str(refusal_of(lambda body=body: parse_json(body)))  # type: ignore[misc]


def test_connections_do_not_wait_for_acknowledgements() -> None:
    listener = listen("127.0.0.1", 0, "server.http_port")
    with listener.socket, socket.create_connection(("127.0.0.1", listener.port)):
        assert is_loopback(listener)
        with listen("0.0.0.0", 0, "server.http_port").socket as opened:
            assert not is_loopback(Listener(opened, 0))
        listener.socket.settimeout(60)
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# Chat templates.


def template_of(folder: Path, source: object, **config: object) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, **config}))
    template = read_chat_template(folder)
    assert template is not None
    return template


MESSAGES = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "<b>"}]


def test_templates_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}\n  {% if loop.first %}\n[{{ message['role'] }}]{% endif %}\n"
        "{% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
        "{% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{% endfor %}\n{% if add_generation_prompt %}<go>{{ eos_token }}{% endif %}"
    )
    template = template_of(tmp_path, source, bos_token="<s>", eos_token={"content": "</s>"})
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    (theirs,), _ = transformers.render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert template.render(MESSAGES) == theirs


def test_the_file_goes_first_and_default_is_taken_of_several(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    assert template_of(tmp_path, named).render(MESSAGES) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template_of(tmp_path, named).render(MESSAGES) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set x = messages.__class__ %}{{ x() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ nothing.more }}",
    ],
)
def test_templates_stay_in_their_sandbox(tmp_path: Path, source: str) -> None:
    template = template_of(tmp_path, source)
    messages_before = json.dumps(MESSAGES)
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template") as caught:
        template.render(MESSAGES)
    assert "\n" not in str(caught.value) and json.dumps(MESSAGES) == messages_before


@pytest.mark.parametrize("source", ["{% for %}", "{{", 5, {"a": 1}])
def test_what_is_no_template_is_refused(tmp_path: Path, source: object) -> None:
    with pytest.raises(CheckpointError, match="template"):
        template_of(tmp_path, source)


# The command line and the configuration.


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


def test_other_commands_do_not_need_it() -> None:
    code = "import sys, launch.cli; print(sorted({*%r} & set(sys.modules)))" % (serve_command.LIBRARIES,)  # noqa: UP031
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
