"""What a process runs that reads requests of all protocols for a frontend, whatever their length: from bytes to tokens
and checked parameters, one request after the other, until the frontend is gone.

    python -m launch.serve.application.parser_worker        its standard input is a socket

What it makes of them is what the frontend's event loop makes of short ones, by the same functions. The kernel bounds
it: the processor time of a task, and the memory that it may have. A task that goes beyond ends the process, or is
refused; the frontend starts another one. It ends with the frontend, and with nothing else that a terminal or a batch
system sends to all, as it has a session of its own: then requests are still read.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path

from launch.jobs.mpi.processes import end_with_parent
from launch.serve.admission.refusals import Kind
from launch.serve.application.request_parser import RequestParser, Result
from launch.serve.parsing.messages import (
    BLOCK_HEAD_BYTES,
    CHANGED,
    HEAD_BYTES,
    Facts,
    Refused,
    Reply,
    Task,
    pack,
    too_much_memory,
    unpack,
)
from trtrun.errors import CheckpointError
from trtrun.tokens.text import hash_tokenizer_files, read_tokenizer

MOST_KEPT_BYTES = 1 << 28
"""How much a process may have grown to read another request: memory that Python does not give back."""

_CHANGED_LINE = "the tokenizer's files have changed since the server has read them: start the server again"


def main() -> None:
    """Parse requests until the frontend is gone."""
    parent = int(sys.argv[1])
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as frontend:
        head = _receive(frontend, HEAD_BYTES)
        facts = unpack(_receive(frontend, int.from_bytes(head, "big")), Facts)
        os.nice(facts.niceness)
        parser = _make_parser(facts)
        if parser is not None:
            parser.prepare()
        _read_on(frontend, parser, facts)


def _make_parser(facts: Facts) -> RequestParser | None:
    """Make the parser; None if the tokenizer's files are not the ones that the frontend has read."""
    if facts.tokenizer is None:
        return RequestParser(facts, None)
    directory = Path(facts.tokenizer)
    try:
        tokenizer = read_tokenizer(directory)
    except CheckpointError:
        tokenizer = None  # as while they are being replaced
    # Behind the reading: whatever has come between shows.
    return RequestParser(facts, tokenizer) if hash_tokenizer_files(directory) == facts.tokenizer_hash else None


def _read_on(frontend: socket.socket, parser: RequestParser | None, facts: Facts) -> None:
    """Do one task after the other."""
    has_at_first = _pages()[0]
    _bound_memory(facts.most_bytes)
    while head := _receive(frontend, HEAD_BYTES):
        task = unpack(_receive(frontend, int.from_bytes(head, "big")), Task)
        body = _receive(frontend, int.from_bytes(_receive(frontend, BLOCK_HEAD_BYTES), "big"))
        signal.setitimer(signal.ITIMER_PROF, task.seconds)  # what it sends then ends the process
        result, blocks = _do(parser, task, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = parser is None or _pages()[0] - has_at_first > MOST_KEPT_BYTES
        frontend.sendall(pack(Reply(result=result, sizes=tuple(map(len, blocks)), is_last=is_last)))
        for block in blocks:
            frontend.sendall(block)
        del result, blocks, body
        if is_last:
            return


def _do(parser: RequestParser | None, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
    if parser is None:
        return Refused(kind=Kind.FAILED.name, reason=_CHANGED_LINE, field=None, code=CHANGED), []
    try:
        return parser.read(task, body)
    except MemoryError:
        return Refused.of(too_much_memory()), []
    except Exception:  # a defect, whose traceback goes where the frontend's goes
        traceback.print_exc()
        return Refused(kind=Kind.FAILED.name, reason="the server failed; its log says how", field=None, code=None), []


def _bound_memory(most_bytes: int) -> None:
    """Let this process have so much more than it has now, as far as it may have that."""
    wanted, (_, hard) = _pages()[1] + most_bytes, resource.getrlimit(resource.RLIMIT_AS)
    # The hard limit stays: an ordinary user may not raise it.
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # requests are nobody's but the client's


def _pages() -> tuple[int, int]:
    """Bytes of this process that are in memory, and of its address space."""
    size, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(resident) * resource.getpagesize(), int(size) * resource.getpagesize()


def _receive(frontend: socket.socket, count: int) -> bytes:
    """So many bytes; none where the frontend has ended the connection."""
    found = bytearray(count)
    view, num_received = memoryview(found), 0
    while num_received < count:
        got = frontend.recv_into(view[num_received:])
        if not got:
            return b""
        num_received += got
    return bytes(found)


if __name__ == "__main__":
    main()
