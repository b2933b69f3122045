"""-v and --log-dir of real jobs of three ranks: who writes where, and that without them the terminal stays as it is."""

from __future__ import annotations

import re
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from commands import MPIRUN, ONE_PROCESS, THREE_RANKS, Configs, Run, error_line, write_rows
from forked_commands import forked_words
from output_rows import read_rows

HOST = socket.gethostname()
LINE = re.compile(
    rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}} {re.escape(HOST)} (launcher|rank \d+ [a-z+]+) "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([A-Za-z_][\w.]*): (.*)"
)
RANKS = ["rank 0 orchestrator", "rank 1 draft", "rank 2 target"]
FILES = [f"rank-00{rank.split()[1]}-{rank.split()[2]}-{HOST}.log" for rank in RANKS]
# A defect on one rank, in the middle of the real command.
DEFECT = """
import os
from launch.cli import main

def fail(*arguments, **options):
    raise ZeroDivisionError("the device is on fire")

if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    from trtrun.rounds.round import Worker
    Worker.launch_round = fail
main()
"""
FAILING_RANK = 2


def records(text: str) -> list[tuple[str, str, str, str]]:
    """Speaker, level, logger and message of every line; each must have the format."""
    found = [LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("    ")]
    assert all(match is not None for match in found), text
    return [(match[1], match[2], match[3], match[4]) for match in found if match is not None]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_rank_has_a_file_which_the_next_run_goes_on_with_and_v_shows_all_ranks(
    config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "x", "max_tokens": 4}] * 2)
    logs = tmp_path / "new" / "logs"
    run = ["run", "--config", config(THREE_RANKS), "--prompts", prompts, "--log-dir", logs]
    first = trtrun(*run, "--output", tmp_path / "quiet.jsonl")
    assert first.returncode == 0, first.stderr
    # Without -v the terminal has the summary alone, as without logs.
    assert [line.partition(",")[0] for line in first.stderr.splitlines()] == ["trtrun: 2 prompts"]
    assert files_in(logs) == FILES
    second = trtrun(*run, "--output", tmp_path / "loud.jsonl", "-v")
    assert second.returncode == 0, second.stderr
    assert [row["token_ids"] for row in read_rows(tmp_path / "loud.jsonl")] == [
        row["token_ids"] for row in read_rows(tmp_path / "quiet.jsonl")
    ]
    assert files_in(logs) == FILES
    for rank, name in zip(RANKS, FILES, strict=True):
        written = records((logs / name).read_text())
        assert {speaker for speaker, _, _, _ in written} == {rank}
        assert sum(message.startswith("started: trtrun ") for _, _, _, message in written) == 2
        assert sum(message == "ends with exit status 0" for _, _, _, message in written) == 2
        assert not [record for record in written if record[1] not in ("INFO", "WARNING")], written
    shown = [line for line in second.stderr.splitlines() if not line.startswith("trtrun: ")]
    speakers = Counter(speaker for speaker, _, _, _ in records("\n".join(shown)))
    assert sorted(speakers) == ["launcher", *RANKS]
    assert min(speakers.values()) > 1
    assert second.stdout == first.stdout == ""


def test_the_directory_of_the_file_is_used_and_one_process_has_one_log(
    config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    file = config(ONE_PROCESS, launch={"log_directory": str(tmp_path / "logs")})
    done = trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert files_in(tmp_path / "logs") == [f"rank-000-orchestrator+draft+target-{HOST}.log"]
    assert not [line for line in done.stderr.splitlines() if LINE.fullmatch(line)]
    other = trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 2, "--log-dir", tmp_path / "null: [x")
    assert other.returncode == 0, other.stderr
    assert files_in(tmp_path / "null: [x") == files_in(tmp_path / "logs")


@pytest.mark.parametrize("devices", [ONE_PROCESS, THREE_RANKS], ids=["one-process", "three-ranks"])
def test_a_directory_that_cannot_be_written_is_refused_before_a_rank_starts(
    config: Configs, trtrun: Run, tmp_path: Path, devices: dict[str, list[str]]
) -> None:
    (tmp_path / "file").write_text("")
    done = trtrun("run", "--config", config(devices), "--prompt", "x", "--log-dir", tmp_path / "file" / "logs")
    assert done.returncode == 2
    assert error_line(done) == (
        f"trtrun: the log directory cannot be used: {tmp_path}/file/logs: Not a directory; name another with --log-dir "
        "or launch.log_directory"
    )


def test_what_the_user_got_wrong_is_said_once_and_is_in_the_log(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    file = config(ONE_PROCESS, scheduler={"max_seq_len": 999999})
    done = trtrun("run", "--config", file, "--prompt", "x", "--log-dir", tmp_path, "-v")
    lines = [line for line in done.stderr.splitlines() if "scheduler.max_seq_len" in line]
    assert len(lines) == 1 and lines[0].startswith("trtrun: ")
    [path] = tmp_path.glob("*.log")
    logged = [record for record in records(path.read_text()) if "scheduler.max_seq_len" in record[3]]
    assert [(level, name) for _, level, name, _ in logged] == [("ERROR", "launch.cli")]


def test_a_defect_is_in_that_ranks_file_with_its_traceback(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    words = [*MPIRUN, "-n", "3", *forked_words(), sys.executable, "-m", "mpi4py", "-c", DEFECT]
    logs = tmp_path / "logs"
    done = trtrun(
        "run", "--config", config(THREE_RANKS), "--prompt", "x", "--log-dir", logs,
        words=words,
    )  # fmt: skip
    assert done.returncode != 0
    assert "the device is on fire" in done.stderr
    for number, name in enumerate(FILES):
        text = (logs / name).read_text()
        records(text)
        assert ("    ZeroDivisionError: the device is on fire" in text) == (number == FAILING_RANK), text
        assert ("    Traceback (most recent call last):" in text) == (number == FAILING_RANK)


def test_commands_that_start_no_rank_have_no_log(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    done = trtrun("plan", "--config", config(ONE_PROCESS, launch={"log_directory": str(tmp_path / "logs")}))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "logs").exists()
    assert "'--log-dir'" in error_line(trtrun("plan", "--config", "x", "--log-dir", tmp_path))
    assert "--log-dir DIR" in trtrun("bench", "--help").stdout
