"""The processes that read long requests: what they find, what they may take, and that they end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.application.request_parser import RequestParser
from launch.serve.parsing import parsers, worker_pool
from launch.serve.parsing.messages import Facts
from launch.serve.parsing.parsers import Parsed, ParsedRequest, Parsers
from trtrun.configuration.model_paths import ASSETS
from trtrun.tokens.text import hash_tokenizer_files

PATIENCE = 120.0
ROOT = Path(__file__).resolve().parents[4]
FACTS = Facts(
    tokenizer=str(ASSETS / "target"), tokenizer_hash=hash_tokenizer_files(ASSETS / "target"), template=None,
    template_tokens={}, model_name="m", vocab_size=4096,
    eos_token_ids=(0,), draft_len=4, excludes_prompt=None, max_batch_size=8,
)  # fmt: skip
SLOW = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
CHAT = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


def with_parsers(
    check: Callable[[Parsers], Awaitable[None]], template: str | None = None, facts: Facts = FACTS
) -> None:
    """Check processes, all of which end."""

    pids: list[int] = []

    async def work() -> None:
        found = Parsers(msgspec.structs.replace(facts, template=template), 1 << 20, RequestParser(facts, None))
        found.start()
        pids.extend(process_ids(found))
        try:
            await asyncio.wait_for(check(found), PATIENCE)
        finally:
            pids.extend(process_ids(found))
            found.close()

    asyncio.run(work())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def process_ids(found: Parsers) -> list[int]:
    return [process.pid for these in (found._short, found._long) for process in these._all]


def output_of(program: str) -> str:
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


async def ask(found: Parsers, kind: str, body: bytes, most_tokens: int = 1 << 20) -> Parsed:
    return await found.read(kind, body, most_tokens)


def test_what_is_found_is_what_was_asked_for_and_reading_goes_on_behind_a_refusal() -> None:
    async def check(found: Parsers) -> None:
        body = {"prompt": [[1, 2, 3], "def"], "stop_token_ids": list(range(4000)), "logit_bias": {"5": 1.5}, "n": 2}
        pids = process_ids(found)
        for _ in range(2):
            read = await ask(found, "completion", json.dumps(body).encode())
            assert isinstance(read, ParsedRequest)
            assert list(read.prompts[0]) == [1, 2, 3] and list(read.lengths) == list(map(len, read.prompts))
            assert read.sampling[0] is read.sampling[1] and read.sampling[0].stop_token_ids == tuple(range(4000))
            assert read.sampling[0].logit_bias == {5: 1.5} and read.sampling[0].n == 2
            with pytest.raises(Refusal, match='the key "a" stands twice') as caught:
                await ask(found, "completion", b'{"a": 1, "a": 2, "b": "' + b"x" * 100_000 + b'"}')
            assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "invalid_json")
        assert process_ids(found) == pids
        read = await ask(found, "completion", b'{"prompt": [1, 2, 3]}', most_tokens=2)
        assert isinstance(read, ParsedRequest) and (list(read.lengths), read.prompts) == ([3], [])

    with_parsers(check)


def test_a_template_that_does_not_end_is_ended_and_the_next_request_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_BASE_SECONDS", 0.2)

    async def check(found: Parsers) -> None:
        with pytest.raises(Refusal, match="takes more than 0 s of processor time") as caught:
            await ask(found, "chat", CHAT)
        assert caught.value.kind is Kind.TOO_LARGE
        read = await ask(found, "completion", b'{"prompt": [1]}')
        assert isinstance(read, ParsedRequest)

    with_parsers(check, SLOW)


def test_a_reader_whose_client_is_gone_is_ended_and_the_next_request_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.0)

    async def check(found: Parsers) -> None:
        (first,) = found._short._all
        asking = asyncio.create_task(ask(found, "chat", CHAT))
        while first._streams is None:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        read = await ask(found, "completion", b'{"prompt": [1]}')
        assert isinstance(read, ParsedRequest) and found._short._all != {first}
        assert not caplog.records  # a client that goes is no error

    with_parsers(check, SLOW)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "_BASE_BYTES", 1 << 27)

    async def check(found: Parsers) -> None:
        for _ in range(2):
            with pytest.raises(Refusal, match="takes more memory than it may") as caught:
                await ask(found, "chat", CHAT)
            assert caught.value.kind is Kind.TOO_LARGE

    with_parsers(check, "{{ messages[0].content * 300000000 }}")  # not of constants, which Jinja reckons beforehand


def test_a_limit_on_memory_that_is_there_already_stays() -> None:
    """An ordinary user may not raise it (ulimit -v); root, who runs these tests, may."""
    program = """
import os, resource
from launch.serve.application import parser_worker as process
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
process._pages()  # has Python read what it needs for it
if os.getuid() == 0:
    os.setuid(65534)
process._bound_memory(1 << 20)
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
process._bound_memory(1 << 50)
print(soft < 1 << 40, hard == 1 << 40, resource.getrlimit(resource.RLIMIT_AS) == (hard, hard))
"""
    assert output_of(program) == "True True True"


def test_a_tokenizer_that_is_replaced_under_the_server_makes_no_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (ASSETS / "target" / "tokenizer.json").read_text(encoding="utf-8")
    file = tmp_path / "tokenizer.json"
    file.write_text(content, encoding="utf-8")
    facts = msgspec.structs.replace(FACTS, tokenizer=str(tmp_path), tokenizer_hash=hash_tokenizer_files(tmp_path))

    async def check(found: Parsers) -> None:
        for _ in range(2):  # the processes of the start, and those that take their place
            with pytest.raises(Refusal, match="files have changed since the server has read them: start") as caught:
                await ask(found, "completion", b'{"prompt": "def"}')
            assert caught.value.kind is Kind.FAILED and len(caplog.records) == 1
            assert "files have changed" in caplog.records.pop().getMessage()

    for other in (content + " ", "{"):
        file.write_text(other, encoding="utf-8")
        with_parsers(check, facts=facts)
    file.write_text(content, encoding="utf-8")

    async def read(found: Parsers) -> None:
        assert isinstance(await ask(found, "completion", b'{"prompt": "def"}'), ParsedRequest)

    with_parsers(read, facts=facts)


def test_readers_make_themselves_ready_before_the_first_request() -> None:
    """Seen by what a process does with what it is told first: it is nice from then on."""

    async def check(found: Parsers) -> None:
        (process,) = found._long._all
        while os.getpriority(os.PRIO_PROCESS, process.pid) < parsers.LONG_NICENESS:
            await asyncio.sleep(0.01)
        assert process._streams is None

    with_parsers(check)


def test_what_readers_are_told_first_may_be_longer_than_a_socket_holds() -> None:
    async def check(found: Parsers) -> None:
        assert isinstance(await ask(found, "chat", CHAT), ParsedRequest)

    with_parsers(check, "{# " + "x" * (1 << 22) + " #}{{ messages[0].content }}")


def test_signals_to_all_of_the_fronts_session_do_not_reach_readers_and_they_end_with_the_front() -> None:
    facts = msgspec.structs.replace(FACTS, template=SLOW, most_bytes=1 << 32)
    program = f"""
import asyncio, os, signal
from launch.serve.parsing.messages import pack
from launch.serve.parsing.worker_pool import WorkerPool
from launch.serve.parsing.messages import Facts, Task
async def work():
    found = WorkerPool(pack(Facts(**{msgspec.structs.asdict(facts)!r})), 1)
    found.start_one()
    (process,) = found._all
    print(process.pid, os.getpgid(process.pid) != os.getpgid(0), os.getsid(process.pid) != os.getsid(0), flush=True)
    await found.read(Task(kind="completion", seconds=1000, most_tokens=10), b'{{"prompt": [1]}}')
    reading = asyncio.create_task(found.read(Task(kind="chat", seconds=1000, most_tokens=10), {CHAT!r}))
    for _ in range(9):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(work())
"""
    frontend = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with frontend:
        assert frontend.stdout is not None
        pid, *apart = frontend.stdout.readline().split()
        assert apart == ["True", "True"]
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(int(pid))
            try:
                assert select.select([ended], [], [], 30.0)[0]
            finally:
                signal.pidfd_send_signal(ended, signal.SIGKILL)
                os.close(ended)
    assert frontend.returncode == -signal.SIGKILL


def test_what_a_template_writes_is_bounded() -> None:
    async def check(found: Parsers) -> None:
        with pytest.raises(Refusal, match="the model's chat template writes more than 16777216 characters"):
            await ask(found, "chat", CHAT)

    with_parsers(check, "{% for i in range(1000) %}{{ 'a' * 100000 }}{% endfor %}")


def test_a_reader_needs_no_torch() -> None:
    program = "import sys, launch.serve.application.parser_worker; print('torch' in sys.modules)"
    assert output_of(program) == "False"
