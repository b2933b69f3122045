"""Log lines: their format, who says them, and what reaches the terminal and the file at each -v."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs.logs import LAUNCHER, find_speaker, quiet_libraries
from parallel.mpi_rank import MpiRank
from parallel.topology import Topology

ROOT = Path(__file__).resolve().parents[3]
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} node1 rank 2 target "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (trtrun\.part|somebody|py\.warnings|launch\.jobs\.logs): (.*)"
)
SETUP = """
import logging, os, sys, threading, warnings
from pathlib import Path
from launch.jobs.logs import FILE_ONLY, Speaker, set_up_logging, quiet_libraries
verbosity, directory = int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None
quiet_libraries(verbosity)
set_up_logging(Speaker("node1", "target", 2), verbosity, directory)
own, other = logging.getLogger("trtrun.part"), logging.getLogger("somebody")
"""
LEVELS = """
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    own.log(level, "own %d", level)
    other.log(level, "other %d", level)
warnings.warn("old", UserWarning)
"""


def python(code: str, *arguments: object, python_options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *python_options, "-c", SETUP + code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


def said(text: str) -> list[tuple[str, str, str]]:
    """Level, logger and message of each record; every one must have the format, or be the rest of one before it."""
    records = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        assert match is not None or line.startswith("    "), line
        if match is not None and match[2] != "launch.jobs.logs":
            records.append((match[1], match[2], match[3]))
    return records


def words(text: str) -> set[str]:
    """What was said of "own 20", "other 30" and the like, and "old" for the Python warning."""
    return {"old" if name == "py.warnings" else message for _, name, message in said(text)}


OWN = {f"own {level}" for level in (10, 20, 30, 40)}
OTHER = {f"other {level}" for level in (10, 20, 30, 40)}


@pytest.mark.parametrize(
    ("verbosity", "shown", "kept"),
    [
        (0, {"own 30", "own 40", "other 40"}, {"own 20", "own 30", "own 40", "other 30", "other 40", "old"}),
        (
            1,
            {"own 20", "own 30", "own 40", "other 30", "other 40", "old"},
            {"own 20", "own 30", "own 40", "other 30", "other 40", "old"},
        ),
        (2, {*OWN, *OTHER, "old"}, {*OWN, *OTHER, "old"}),
    ],
)
def test_what_is_shown_and_what_is_kept(tmp_path: Path, verbosity: int, shown: set[str], kept: set[str]) -> None:
    done = python(LEVELS, verbosity, tmp_path)
    assert done.returncode == 0, done.stderr
    assert words(done.stderr) == shown
    assert [path.name for path in tmp_path.iterdir()] == ["rank-002-target-node1.log"]
    assert words((tmp_path / "rank-002-target-node1.log").read_text()) == kept
    assert done.stdout == ""


def test_without_a_directory_there_is_no_file(tmp_path: Path) -> None:
    done = python(LEVELS + f"os.chdir({str(tmp_path)!r})", 0)
    assert words(done.stderr) == {"own 30", "own 40", "other 40"}
    assert list(tmp_path.iterdir()) == []


def test_a_user_who_asks_python_for_warnings_gets_them_as_python_shows_them() -> None:
    done = python("warnings.warn('old')", 0, python_options=("-W", "always"))
    assert "UserWarning: old" in done.stderr and "py.warnings" not in done.stderr


def test_many_lines_are_one_on_the_terminal_and_stay_together_in_the_file(tmp_path: Path) -> None:
    fake = "2026-11-20T12:00:00.000 node9 rank 9 draft INFO x: forged"
    code = f"""
try:
    raise ValueError("first\\n{fake}")
except ValueError:
    own.error("two\\n{fake}", exc_info=True)
own.error("for the file", extra=FILE_ONLY)
"""
    done = python(code, 0, tmp_path)
    assert said(done.stderr) == [("ERROR", "trtrun.part", f"two {fake}")]
    text = (tmp_path / "rank-002-target-node1.log").read_text()
    assert said(text) == [("ERROR", "trtrun.part", "two"), ("ERROR", "trtrun.part", "for the file")]
    assert f"\n    {fake}\n    Traceback (most recent call last):\n" in text
    assert f"\n    ValueError: first\n    {fake}\n" in text


def test_without_a_file_the_terminal_has_the_traceback() -> None:
    done = python("try:\n    1 / 0\nexcept ZeroDivisionError:\n    own.exception('two\\nwords')", 0)
    assert said(done.stderr) == [("ERROR", "trtrun.part", "two words")]
    assert "\n    Traceback (most recent call last):\n" in done.stderr
    assert done.stderr.endswith("\n    ZeroDivisionError: division by zero\n")


def test_a_file_is_appended_to_and_each_start_is_marked(tmp_path: Path) -> None:
    for number in range(2):
        python(f"own.info('run {number}')", 0, tmp_path)
    lines = (tmp_path / "rank-002-target-node1.log").read_text().splitlines()
    assert [line.partition(": ")[2].split()[0] for line in lines] == ["started:", "run", "started:", "run"]
    assert [line[-1] for line in lines[1::2]] == ["0", "1"]


def test_setting_up_again_ends_what_was_set_up_before(tmp_path: Path) -> None:
    code = "set_up_logging(Speaker('node1', 'target', 2), 0, directory / 'second')\nown.warning('once')\n"
    done = python(code, 0, tmp_path)
    assert done.stderr.count("once") == 1
    assert "once" not in (tmp_path / "rank-002-target-node1.log").read_text()
    assert "once" in (tmp_path / "second" / "rank-002-target-node1.log").read_text()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ZeroDivisionError('a defect')", "an exception that nothing caught"),
        (
            "thread = threading.Thread(target=lambda: 1 / 0, name='beat')\nthread.start()\nthread.join()",
            "an exception in thread beat that nothing caught",
        ),
    ],
)
def test_what_nothing_catches_is_in_the_file_with_its_stack(tmp_path: Path, code: str, told: str) -> None:
    done = python(code, 0, tmp_path)
    text = (tmp_path / "rank-002-target-node1.log").read_text()
    assert f" CRITICAL launch.jobs.logs: {told}\n    Traceback (most recent call last):\n" in text
    assert "    ZeroDivisionError: " in text
    assert "ZeroDivisionError" in done.stderr and "launch.jobs.logs" not in done.stderr


def test_on_a_terminal_a_line_takes_the_place_of_a_progress_bar() -> None:
    done = python("os.environ['TRTRUN_TERMINAL'] = '80'\nsys.stderr.write('bar')\nown.warning('careful')", 0)
    # Python reads the carriage return as the end of a line.
    assert re.fullmatch(r"bar\n\x1b\[K\S+ node1 rank 2 target WARNING trtrun.part: careful\n", done.stderr)


@pytest.mark.parametrize("place", ["file/logs", "file"])
def test_a_directory_that_cannot_be_is_refused_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    done = python("", 0, tmp_path / place)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"trtrun.errors.ConfigError: the log directory cannot be used: {tmp_path / place}: ")
    assert "--log-dir" in last


def test_a_log_file_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rank-002-target-node1.log").mkdir()
    done = python("", 0, tmp_path)
    assert "rank-002-target-node1.log: Is a directory" in done.stderr.splitlines()[-1]


def test_a_disk_that_is_full_does_not_end_the_job_nor_fill_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "rank-002-target-node1.log").symlink_to("/dev/full")
    done = python("own.info('lost')\nown.warning('shown')\nprint('went on')", 0, tmp_path)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert said(done.stderr) == [("WARNING", "trtrun.part", "shown")]


# Who speaks.

FOUR = Topology.from_devices(["node1/cuda:0"], ["node1/cuda:0", "node2/cuda:0"])


@pytest.mark.parametrize(
    ("rank", "text", "name"),
    [
        (0, "node1 rank 0 orchestrator", "rank-000-orchestrator-node1.log"),
        (1, "node1 rank 1 draft+target", "rank-001-draft+target-node1.log"),
        (2, "node2 rank 2 target", "rank-002-target-node2.log"),
    ],
)
def test_a_rank_is_named_by_host_number_and_role(rank: int, text: str, name: str) -> None:
    speaker = find_speaker(FOUR, MpiRank(rank, 3))
    assert (str(speaker), speaker.file_name) == (text, name)


def test_the_process_that_starts_mpirun_is_the_launcher_and_a_job_of_one_process_is_rank_0() -> None:
    assert find_speaker(FOUR, None).role == find_speaker(FOUR, MpiRank(0, 1)).role == LAUNCHER
    alone = find_speaker(Topology.from_devices(["cpu:0"], ["cpu:0"]), None)
    assert (alone.rank, alone.role) == (0, "orchestrator+draft+target")
    elsewhere = Topology.from_devices([], ["240.0.0.1/cpu:0"])
    assert find_speaker(elsewhere, None).role == LAUNCHER
    assert find_speaker(elsewhere, MpiRank(0, 1)).rank == 0


# Libraries.


def test_libraries_are_quiet_without_v_and_the_user_wins() -> None:
    quiet: dict[str, str] = {}
    quiet_libraries(0, quiet)
    assert quiet["NCCL_DEBUG"] == "WARN"
    assert quiet["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert quiet["TRANSFORMERS_VERBOSITY"] == "error"
    loud: dict[str, str] = {}
    quiet_libraries(2, loud)
    assert loud["NCCL_DEBUG"] == "INFO"
    assert "TORCH_CPP_LOG_LEVEL" not in loud
    own = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": "/tmp/nccl.%h", "TORCH_CPP_LOG_LEVEL": "INFO"}
    chosen = dict(own)
    quiet_libraries(0, chosen)
    assert {name: chosen[name] for name in own} == own
    logging.captureWarnings(False)


def test_nccl_writes_to_stderr_unless_that_is_a_file_which_it_would_empty(tmp_path: Path) -> None:
    code = "print(os.environ.get('NCCL_DEBUG_FILE'))"
    assert python(code, 0).stdout == "/dev/stderr\n"
    with open(tmp_path / "errors", "w") as errors:
        words = [sys.executable, "-c", SETUP + code, "0"]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=60, cwd=ROOT, check=True)
    assert done.stdout == "None\n"
