"""A conversation: what the user types, commands among it, and what is answered.

It knows messages and commands. It does not know who answers, or how a text is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from launch.chat.client import AnswerError, ChatClient
from launch.chat.screen import PlainScreen, TerminalScreen
from launch.jobs.terminal import output_console
from trtrun.errors import nearest

COMMANDS = {
    "/help": "what may be typed",
    "/clear": "forget the conversation; what the system was told stays",
    "/system": "/system TEXT: tell the system something, and forget the conversation; without a text nothing",
    "/retry": "answer the last message again",
    "/quit": "end, as Ctrl-D does",
}

PROMPT = "> "
_MOST_HISTORY = 1000


class Session:
    """One conversation.

    Attributes:
        messages: so far, in OpenAI's words.
    """

    def __init__(self, client: ChatClient, system: str | None, options: Mapping[str, Any]) -> None:
        """Begin.

        Args:
            client: asks the model.
            system: what the system is told; None for nothing.
            options: further fields of each request.
        """
        self._client = client
        self._options = options
        self._is_terminal = sys.stdout.isatty()
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = [*self._system]

    def run(self) -> None:
        """Read and answer to the end of the input.

        Raises:
            FailedError: the server is gone.
        """
        if self._is_terminal:
            print(
                f"{self._client.model}; /help says what may be typed, Ctrl-C stops an answer, Ctrl-D ends", flush=True
            )
        with _history(is_kept=self._is_terminal and sys.stdin.isatty()):
            while True:
                line = self._read()
                if line is None or line.strip() == "/quit":
                    break
                if line.startswith("/") and not line.startswith("//"):
                    self._obey(line)
                elif line.strip():
                    text = line[1:] if line.startswith("//") else line
                    self.messages.append({"role": "user", "content": text})
                    self._answer()

    def _read(self) -> str | None:
        """A line; None at the end of the input."""
        is_typed = sys.stdin.isatty()
        try:
            return input(PROMPT if is_typed else "")
        except EOFError:
            if is_typed:
                print(flush=True)
            return None
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print(flush=True)
            return ""

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/clear":
            self.messages = [*self._system]
        elif name == "/system":
            self._system = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            self.messages = [*self._system]
        elif name == "/retry":
            if self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if self.messages and self.messages[-1]["role"] == "user":
                self._answer()
            else:
                print("there is no message to answer yet", flush=True)
        elif name == "/help":
            for known, words in COMMANDS.items():
                print(f"{known:9}{words}", flush=True)
            print("//text   a message that begins with a /", flush=True)
        else:
            print(f"there is no command {name}{nearest(name, COMMANDS)}; // begins a message with a /", flush=True)

    def _answer(self) -> None:
        """Have the last message answered, and keep what was answered; Ctrl-C stops it, and what there is stays."""
        text = ""
        try:
            with (
                TerminalScreen(output_console()) if self._is_terminal else PlainScreen() as screen,
                closing(self._client.answer(self.messages, self._options)) as pieces,
            ):
                for piece in pieces:
                    text += piece.text
                    screen.show(piece)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except AnswerError as error:
            self.messages.pop()  # of the user: it may be what is wrong
            print(f"trtrun: {error}", file=sys.stderr, flush=True)
            return
        self.messages.append({"role": "assistant", "content": text})


@contextmanager
def _history(is_kept: bool) -> Iterator[None]:
    """Lines that are typed can be edited, and found again with the arrow up, in later conversations, too."""
    try:
        import readline  # what `input` then uses
    except ImportError:
        is_kept = False
    if not is_kept:
        yield
        return
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "trtrun" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MOST_HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
