"""The end of a command's process: all that is to be done is done, only Python's teardown is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import atexit, sys, threading, time
from parallel import abort

class Torn:
    def __del__(self):
        sys.stderr.write("torn down")

torn = Torn()
torn.itself = torn
abort.stand_by()
atexit.register(print, "registered behind")
thread = threading.Thread(target=lambda: (time.sleep(0.2), print("the thread's end")))
thread.start()
print("the end of the program")
if sys.argv[1] != "none":
    abort.skip_teardown(int(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


def run(*arguments: str, stdout: object = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is printed is written at the end
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        words, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )


def test_threads_and_what_is_registered_have_their_turn_and_nothing_is_torn_down() -> None:
    done = run("3", "3")
    assert done.stdout.splitlines() == ["the end of the program", "the thread's end", "registered behind"]
    assert (done.returncode, done.stderr) == (3, "")


def test_a_program_that_told_no_status_ends_as_python_does() -> None:
    done = run("none", "4")
    assert (done.returncode, done.stderr) == (4, "torn down")


def test_output_that_does_not_fit_is_told_as_python_tells_it() -> None:
    with open("/dev/full", "w") as full:
        done = run("0", "0", stdout=full)
    assert done.returncode == 120 and "No space left on device" in done.stderr
