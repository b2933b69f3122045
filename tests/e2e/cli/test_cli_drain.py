"""Signals that drain a run: what is in flight finishes, the rest stays for --resume, and nothing finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import (
    FIXED,
    MPIRUN,
    ONE_PROCESS,
    ONE_SLOT,
    ROOT,
    THREE_RANKS,
    TWO_SLOTS,
    Configs,
    Run,
    command_environment,
    command_words,
    forked_command_words,
    is_alive,
    write_rows,
)
from drains import PATIENCE, handles, rank_of, wait_for_end_of, wait_until, written_indexes
from forked_commands import ForkedCommands, ranks_below
from output_rows import read_rows, without_drafting, without_times

PAIR = ROOT / "launch" / "configs" / "cpu_pair.yaml"
ONE_AND_THREE = [
    pytest.param(ONE_PROCESS, id="one-process"),
    pytest.param(THREE_RANKS, id="three-ranks"),
]
DONE, DRAINED, ROWS_REFUSED = 0, 3, 4
pytestmark = pytest.mark.timeout(600)  # several runs in each test, and machines may be busy
Start = Callable[..., "subprocess.Popen[str]"]


def drained_line(cause: str, num_done: int, num_rows: int) -> str:
    return (
        f"trtrun: drained after {cause}: {num_done} of {num_rows} rows are done, {num_rows - num_done} are left; "
        "the same command with --resume runs them"
    )


def own_lines(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("trtrun: ")]


# Drains in the middle of a run, again and again.

CHAIN = [
    {"prompt": f"def f{index}(", "max_tokens": 240 if index % 8 == 1 else 16, "ignore_eos": True} for index in range(24)
]
"""Every eighth prompt takes so long that several others pass it by."""

Target = Callable[[int], int | None]
TARGETS: dict[str, Target] = {
    "command": lambda command: command,  # trtrun itself, or the mpirun that a user has started
    "rank 0": lambda command: rank_of(command, 0),
}
STARTERS: dict[str, tuple[list[str], tuple[str, ...], list[tuple[str, signal.Signals]]]] = {
    "trtrun": (
        [],
        TWO_SLOTS,
        [("command", signal.SIGINT)],
    ),
    "mpirun": (
        [*MPIRUN, "-n", "3"],
        TWO_SLOTS,
        [("command", signal.SIGUSR1), ("rank 0", signal.SIGTERM)],
    ),
    "one process": ([], ONE_SLOT, [("command", signal.SIGTERM), ("command", signal.SIGUSR1)]),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forked_commands: ForkedCommands) -> list[dict[str, Any]]:
    """Rows of a run in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prompts = write_rows(folder / "prompts.jsonl", list(CHAIN))
    words = ["run", "--config", str(PAIR), *FIXED, *ONE_SLOT, "--prompts", str(prompts)]
    words += ["--output", str(folder / "out.jsonl"), "--set", "scheduler.max_batch_size=2"]
    done = forked_commands.run(words, command_environment(), ROOT, PATIENCE)
    assert done.returncode == DONE, done.stderr
    return read_rows(folder / "out.jsonl")


@pytest.mark.parametrize("starter", STARTERS)
def test_a_run_drained_again_and_again_ends_with_the_rows_of_an_undisturbed_one(
    trtrun: Run,
    start_trtrun: Start,
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    starter: str,
) -> None:
    before, devices, signals = STARTERS[starter]
    output, working = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    arguments = ["run", "--config", PAIR, *FIXED, "--set", "scheduler.max_batch_size=2", *devices]
    arguments += ["--prompts", write_rows(tmp_path / "prompts.jsonl", list(CHAIN)), "--resume", "--output"]
    done: set[int] = set()
    for target, number in signals:
        process = start_trtrun(*arguments, output, words=[*before, *forked_command_words()] if before else None)

        def has_passed_a_long_row() -> bool:
            now = written_indexes(working)
            return now != set(range(len(now)))

        wait_until(has_passed_a_long_row, process, "a row that passes another by")
        victim = TARGETS[target](process.pid)
        assert victim is not None
        os.kill(victim, number)
        text, errors = process.communicate(timeout=PATIENCE)
        before_drain, done = done, written_indexes(working)
        # Prompts are begun in order. So this says that the long row, which was in flight, has finished, and that no
        # row was begun behind those in flight: without an end to admissions all others would have passed it by.
        assert done == set(range(len(done))), "a row in flight did not finish"
        assert len(before_drain) < len(done) < len(CHAIN), errors
        assert process.returncode == DRAINED, errors
        assert text == ""
        cause = number.name
        announced, ended = own_lines(errors)
        assert announced.startswith(f"trtrun: {cause}: no more prompts are begun, those in flight have 30 s")
        assert ended == drained_line(cause, len(done), len(CHAIN))
        if starter != "mpirun":  # whose own words nobody filters
            assert len(errors.splitlines()) == 2, errors
        assert not output.exists()
    last = trtrun(*arguments, output, *ONE_SLOT)  # the second one of mpirun has gone on with all ranks
    assert last.returncode == DONE, last.stderr
    assert f"{len(CHAIN) - len(done)} prompts, " in last.stderr
    assert f"; {len(done)} rows were done before" in last.stderr
    assert not working.exists()
    comparable = without_times if starter == "one process" else without_drafting
    assert comparable(read_rows(output)) == comparable(undisturbed)


# How a drain ends.


def endless_run(config: Configs, folder: Path, devices: dict[str, list[str]], drain_seconds: float) -> list[object]:
    """A command line: prompt 0 is done at once, 1 never, and 2 to 4 wait for a row."""
    sections = {"kv_cache": {"max_tokens": 60000}, "scheduler": {"max_batch_size": 2}}
    file = config(devices, launch={"drain_seconds": drain_seconds}, **sections)
    endless = {"prompt": "x", "max_tokens": 50000, "ignore_eos": True}
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": "a", "max_tokens": 2}, *[endless] * 4])
    return ["run", "--config", file, "--prompts", prompts, "--output", folder / "out.jsonl"]


def start_endless(
    config: Configs, start_trtrun: Start, folder: Path, devices: dict[str, list[str]], drain_seconds: float
) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """The same, once prompt 0 is done; and its ranks' processes."""
    process = start_trtrun(*endless_run(config, folder, devices, drain_seconds))
    wait_until(lambda: len(written_indexes(folder / "out.jsonl.partial")) == 1, process, "the first row")
    return process, ranks_below(process.pid)


@pytest.mark.parametrize("devices", ONE_AND_THREE)
def test_rows_that_take_too_long_are_left_and_warnings_do_not_hurry(
    config: Configs, start_trtrun: Start, tmp_path: Path, devices: dict[str, list[str]]
) -> None:
    process, ranks = start_endless(config, start_trtrun, tmp_path, devices, drain_seconds=1.5)
    for victim in (process.pid, *ranks.values(), process.pid):  # as a batch system that signals every process
        os.kill(victim, signal.SIGUSR1)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == DRAINED, errors
    assert own_lines(errors)[1:] == [drained_line("SIGUSR1", 1, 5)]
    assert len(errors.splitlines()) == 2, errors
    assert written_indexes(tmp_path / "out.jsonl.partial") == {0}
    assert not (tmp_path / "out.jsonl").exists()
    assert not any(is_alive(rank) for rank in ranks.values())


@pytest.mark.parametrize(
    ("devices", "first", "second"),
    [
        pytest.param(ONE_PROCESS, "SIGTERM", "SIGINT", id="one-process-SIGINT"),
        pytest.param(ONE_PROCESS, "SIGUSR1", "SIGTERM", id="one-process-SIGTERM"),
        pytest.param(THREE_RANKS, "SIGINT", "SIGTERM", id="three-ranks-SIGTERM"),
    ],
)
def test_a_second_signal_ends_at_once(
    config: Configs, start_trtrun: Start, tmp_path: Path, devices: dict[str, list[str]], first: str, second: str
) -> None:
    process, ranks = start_endless(config, start_trtrun, tmp_path, devices, drain_seconds=1000)
    process.send_signal(signal.Signals[first])
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"trtrun: {first}: no more prompts are begun")
    process.send_signal(signal.Signals[second])
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.Signals[second]
    stopped = "; all ranks are stopped" if ranks else ""
    assert errors.splitlines() == [f"trtrun: ended by {second}{stopped}"]
    assert written_indexes(tmp_path / "out.jsonl.partial") == {0}
    assert not any(is_alive(rank) for rank in ranks.values())


@pytest.mark.parametrize(
    ("devices", "rows", "status"),
    [
        pytest.param(THREE_RANKS, [], DONE, id="good"),
        pytest.param(ONE_PROCESS, [{"promt": "bad"}], ROWS_REFUSED, id="refused"),
    ],
)
def test_a_drain_that_finds_time_enough_ends_as_ever(
    config: Configs,
    start_trtrun: Start,
    tmp_path: Path,
    devices: dict[str, list[str]],
    rows: list[Any],
    status: int,
) -> None:
    long = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "max_tokens": 1}, long, long, *rows])
    output, working = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    file = config(devices, launch={"drain_seconds": 1000})
    process = start_trtrun("run", "--config", file, "--prompts", prompts, "--output", output)
    wait_until(lambda: 0 in written_indexes(working), process, "the first row")
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    assert own_lines(errors)[0].startswith("trtrun: SIGTERM: no more prompts are begun")
    assert f"{3 + len(rows)} prompts, 601 tokens" in own_lines(errors)[-1]
    assert [len(row["token_ids"]) for row in read_rows(output)] == [1, 300, 300, *[0 for _ in rows]]
    assert not working.exists()


# Signals before anything runs.


def opened(output: Path) -> bool:
    return output.with_name(output.name + ".partial").exists()


Moment = Callable[[int, Path], bool]
MOMENTS: dict[str, tuple[dict[str, list[str]], Moment]] = {
    "one process, at its start": (ONE_PROCESS, lambda command, output: handles(command, signal.SIGUSR1)),
    "one process, before it loads": (ONE_PROCESS, lambda command, output: opened(output)),
    "parent, at its start": (THREE_RANKS, lambda command, output: handles(command, signal.SIGUSR1)),
    "ranks are started": (THREE_RANKS, lambda command, output: len(ranks_below(command)) == 3),
    "rank 0 hears": (THREE_RANKS, lambda command, output: handles(rank_of(command, 0) or 0, signal.SIGUSR1)),
    "ranks begin to load": (THREE_RANKS, lambda command, output: opened(output)),
}


@pytest.mark.parametrize(
    ("moment", "number"),
    [(moment, (signal.SIGINT, signal.SIGUSR1)[place % 2]) for place, moment in enumerate(MOMENTS)],
)
def test_a_signal_before_anything_runs_ends_soon_and_loses_nothing(
    config: Configs, start_trtrun: Start, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    devices, is_there = MOMENTS[moment]
    words = command_words() if "start" in moment else None  # what a forked one has behind it
    process = start_trtrun(*endless_run(config, tmp_path, devices, drain_seconds=5), words=words)
    wait_until(lambda: is_there(process.pid, tmp_path / "out.jsonl"), process, moment)
    ranks = ranks_below(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == DRAINED, errors
    assert own_lines(errors)[-1].startswith(f"trtrun: drained after {number.name}"), errors
    assert "--resume runs them" in errors
    if "load" not in moment:  # loading a tiny model may be over by then
        assert len(errors.splitlines()) == 1, "it went on to run before it ended"
    assert not (tmp_path / "out.jsonl").exists()
    assert written_indexes(tmp_path / "out.jsonl.partial") <= {0}  # 0 where loading was done by then
    assert not any(is_alive(rank) for rank in ranks.values())


def test_a_signal_to_a_users_own_mpirun_before_anything_runs(
    config: Configs, start_trtrun: Start, tmp_path: Path
) -> None:
    arguments = endless_run(config, tmp_path, THREE_RANKS, drain_seconds=5)
    process = start_trtrun(*arguments, words=[*MPIRUN, "-n", "3", *forked_command_words()])
    wait_until(lambda: handles(rank_of(process.pid, 0) or 0, signal.SIGTERM), process, "rank 0's handlers")
    ranks = ranks_below(process.pid)
    os.kill(ranks[0], signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == DRAINED, errors
    assert own_lines(errors)[-1].startswith("trtrun: drained after SIGTERM"), errors
    wait_for_end_of(ranks.values())


# Runs that keep no rows.


@pytest.mark.parametrize("devices", ONE_AND_THREE)
def test_without_an_output_file_a_warning_ends_the_job_at_once(
    config: Configs, start_trtrun: Start, devices: dict[str, list[str]]
) -> None:
    file = config(devices, kv_cache={"max_tokens": 60000}, launch={"drain_seconds": 1000})
    process = start_trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 50000, "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(1)
    ranks = ranks_below(process.pid)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGUSR1
    assert errors.splitlines() == ["trtrun: ended by SIGUSR1" + ("; all ranks are stopped" if ranks else "")]
    assert not any(is_alive(rank) for rank in ranks.values())
