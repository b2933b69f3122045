"""Names of processes: the right one is killed, though it is stopped, and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from parallel.watchdog.processes import kill_process, own_process

PROGRAM = """
import json, sys
from parallel.watchdog.processes import own_process
print(json.dumps(own_process()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that waits, and its name."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = json.loads(process.stdout.readline())
    yield process, name
    process.kill()
    process.communicate(timeout=30)


def test_a_stopped_process_is_killed(child: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    process, name = child
    os.kill(process.pid, signal.SIGSTOP)
    assert kill_process(name)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not kill_process(name)


@pytest.mark.parametrize(
    "change",
    [{"place": "another host"}, {"place": ""}, {"started": "1"}, {"started": None}, {"number": 1}, {"number": "x"}],
)
def test_another_process_is_not_killed(
    child: tuple[subprocess.Popen[str], dict[str, Any]], change: dict[str, object]
) -> None:
    process, name = child
    assert not kill_process({**name, **change})
    assert not kill_process(None)
    assert process.poll() is None


def test_the_own_name_is_json() -> None:
    assert json.loads(json.dumps(own_process()))["number"] == os.getpid()
