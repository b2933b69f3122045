"""`trtrun chat`: a conversation with a server that runs, on a terminal and through pipes, and with one of its own."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers import Server

from launch.chat.client import ChatClient
from launch.serve.handover.name_file import DoorAddress, NameFile, ServedName
from trtrun.errors import ConfigError

pytestmark = pytest.mark.timeout(300)
PATIENCE = 150.0
CHAT = [sys.executable, "-m", "launch.cli", "chat"]
GREEDY = ("--temperature", "0")


def answer_of(server: Server, messages: list[dict[str, str]], max_tokens: int) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
    return str(server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(folder), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}


class Terminal:
    """A command on a terminal of its own, and what it has shown."""

    def __init__(self, words: list[str], folder: Path) -> None:
        master, other = pty.openpty()
        self._descriptor = master
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, env=environment(folder), start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # which makes it the session's terminal
        )  # fmt: skip
        os.close(other)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
        """What is shown up to a text, once it is there."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            assert time.monotonic() < deadline, self._shown
            if select.select([self._descriptor], [], [], 1.0)[0]:
                try:
                    self._shown += os.read(self._descriptor, 1 << 16).decode(errors="replace")
                except OSError:
                    raise AssertionError(self._shown) from None
        found, _, self._shown = self._shown.partition(text)
        return found

    def interrupt_at_the_prompt(self) -> None:
        """Ctrl-C until there is a new prompt.

        What comes between the prompt's letters and Python's wait for a key is seen with the next key alone.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            self.type("\x03")
            with suppress(AssertionError):
                self.wait_for("> ", seconds=1.0)
                return
            assert self.process.poll() is None and time.monotonic() < deadline, self._shown

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._descriptor)


@contextmanager
def on_a_terminal(words: list[str], folder: Path) -> Iterator[Terminal]:
    terminal = Terminal(words, folder)
    try:
        yield terminal
    finally:
        terminal.end()


def test_a_conversation_on_a_terminal_and_an_answer_that_is_stopped(server: Server, tmp_path: Path) -> None:
    words = [*CHAT, "--url", server.url, *GREEDY, "--max-tokens", "900"]
    with on_a_terminal(words, tmp_path) as terminal:
        terminal.wait_for("> ")
        terminal.type("def main(\n")
        terminal.wait_for(" tokens/s")  # the figures go along with the text
        terminal.type("\x03")
        assert "accepted drafts" in terminal.wait_for("; stopped")
        terminal.wait_for("> ")
        server.wait_idle()  # nothing goes on for nobody
        terminal.type("/system no\n")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("no system here")  # what the template says of it; the conversation goes on
        terminal.wait_for("> ")
        terminal.interrupt_at_the_prompt()  # which is no end
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    history = (tmp_path / "trtrun" / "chat_history").read_text(encoding="utf-8")
    assert "def main(\n" in history and (tmp_path / "trtrun" / "chat_history").stat().st_mode & 0o777 == 0o600


def test_lines_of_a_pipe_are_messages_of_one_conversation(server: Server, tmp_path: Path) -> None:
    typed = "def main(\nagain\n/retry\n/clear\n//def main(\n/nothing\n"
    name = ServedName(url=server.url, host="here", model="pair", since="now")
    NameFile(tmp_path / "name.json").take(name, DoorAddress(hosts=(), port=1, token="t"))
    done = subprocess.run(
        [*CHAT, "--url", str(tmp_path / "name.json"), *GREEDY, "--max-tokens", "12"],
        input=typed, capture_output=True, text=True, timeout=PATIENCE, env=environment(tmp_path), check=True,
    )  # fmt: skip
    told: list[dict[str, str]] = [{"role": "user", "content": "def main("}]
    first = answer_of(server, told, 12)
    told += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    second = answer_of(server, told, 12)
    third = answer_of(server, [{"role": "user", "content": "/def main("}], 12)
    assert done.stdout.startswith("\n".join([first, second, second, third]) + "\nthere is no command /nothing")
    assert done.stderr.count("trtrun: 12 tokens") == 4 and not (tmp_path / "trtrun").exists()


def test_a_server_of_its_own_begins_and_ends_with_the_conversation(pair: Path, server: Server, tmp_path: Path) -> None:
    words = [*CHAT, str(pair / "target"), "--draft", str(pair / "draft"), "--devices", "cpu:0", *GREEDY]
    words += ["--max-tokens", "12", "--set", "kv_cache.max_tokens=4096", "--set", "speculation.pacing=fixed"]
    words += ["--set", f"server.name_file={tmp_path / 'name.json'}"]  # which is another server's
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(tmp_path),
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("def main(\n")
        process.stdin.flush()
        told = process.stdout.readline()
        assert answer_of(server, [{"role": "user", "content": "def main("}], 12).startswith(told.rstrip("\n"))
        (worker,) = children_of(process.pid)
        assert not (tmp_path / "name.json").exists()
        rest = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "12 tokens" in rest[1]
        assert not Path(f"/proc/{worker}").exists()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def children_of(process: int) -> list[int]:
    folder = Path(f"/proc/{process}/task")
    return [int(worker) for task in folder.iterdir() for worker in (task / "children").read_text().split()]


@contextmanager
def answering(status: int, values: dict[str, Any]) -> Iterator[str]:
    """The address of a server that says one thing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "values", "message"),
    [
        (200, {"chat": False}, "the model has no chat template: use trtrun run"),
        (401, {}, "wants an API key: name a file with it, --api-key-file"),
        (404, {}, "no server of trtrun answers at .*: status 404 for /status"),
    ],
)
def test_what_cannot_be_talked_to_is_said_in_one_line(status: int, values: dict[str, Any], message: str) -> None:
    with answering(status, values) as url, pytest.raises(ConfigError, match=message):
        ChatClient(url).look()
    with pytest.raises(ConfigError, match=r"no server of trtrun answers at http://[0-9.:]+/v1: Connection refused$"):
        ChatClient(url).look()
    for wrong in ("127.0.0.1:8000", "http://[::1", "unix://"):
        with pytest.raises(ConfigError, match="--url must be such as"):
            ChatClient(wrong)
