"""`trtrun run --resume`: runs killed in the middle and gone on with, what is refused, and what needs no model."""

from __future__ import annotations

import json
import os
import select
import shutil
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
    error_line,
    forked_command_words,
    parent_of,
    write_rows,
)
from drains import wait_until
from forked_commands import ForkedCommands, ranks_below
from output_rows import read_rows, without_drafting

PAIR = ROOT / "launch" / "configs" / "cpu_pair.yaml"
TEXTS = [
    "def main(",
    "import os\n",
    "class Tree:",
    "for i in range(",
    "# The quick",
    "return ",
    "if x:\n    ",
    "try:\n",
]
LENGTHS = [150, 30, 90, 150, 60, 120, 20, 150, 100, 40, 150, 80]
"""Tokens of each prompt: so different that rows finish in another order than they come in, and so many that a run can
be killed between them."""

PROMPTS = [
    {"prompt": TEXTS[i % 8] * (1 + i // 8), "max_tokens": LENGTHS[i % 12], "ignore_eos": True} for i in range(20)
]
Victim = Callable[[int, dict[int, int]], int]

VICTIMS: dict[str, Victim] = {
    "rank 0": lambda command, ranks: ranks[0],
    "mpirun": lambda command, ranks: parent_of(ranks[0]),
    "the command": lambda command, ranks: command,
}


def whole_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_when(process: subprocess.Popen[str], working: Path, num_rows: int, victim: Victim) -> None:
    """Kill one process of a run as soon as the working file has `num_rows` rows, and wait for the rest."""
    wait_until(lambda: whole_lines(working) >= num_rows, process, f"{num_rows} rows")
    ranks = ranks_below(process.pid)
    watched = [os.pidfd_open(rank) for rank in ranks.values()]
    os.kill(victim(process.pid, ranks), signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode != 0
    for rank in watched:
        ended, _, _ = select.select([rank], [], [], 30)
        if not ended:
            signal.pidfd_send_signal(rank, signal.SIGKILL)
            pytest.fail("a rank outlived its job")
        os.close(rank)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forked_commands: ForkedCommands) -> list[dict[str, Any]]:
    """Rows of a run of the shipped pair in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prompts = write_rows(folder / "prompts.jsonl", list(PROMPTS))
    words = ["run", "--config", str(PAIR), *FIXED, *ONE_SLOT, "--prompts", str(prompts)]
    words += ["--output", str(folder / "out.jsonl")]
    done = forked_commands.run(words, command_environment(), ROOT, 120)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["out.jsonl", "prompts.jsonl"]
    return read_rows(folder / "out.jsonl")


@pytest.mark.parametrize(
    ("starter", "victims"),
    [
        ("trtrun", ["rank 0", "the command"]),
        ("mpirun", ["mpirun"]),
    ],
)
def test_killed_again_and_again_a_run_ends_with_the_rows_of_an_undisturbed_one(
    trtrun: Run,
    start_trtrun: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    starter: str,
    victims: list[str],
) -> None:
    output, working = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    prompts = write_rows(tmp_path / "prompts.jsonl", list(PROMPTS))
    words = [*MPIRUN, "-n", "3", *forked_command_words()] if starter == "mpirun" else None
    arguments = ["run", "--config", str(PAIR), *FIXED, *TWO_SLOTS]
    arguments += ["--prompts", str(prompts), "--output", str(output)]
    kept = 0
    for round_, name in enumerate(victims):
        resume = ["--resume"] if round_ else []
        # What ends the ranks of a command that is killed is the kernel: those are new programs.
        process = start_trtrun(*arguments, *resume, words=words, forks_ranks=name != "the command")
        kill_when(process, working, kept + 2, VICTIMS[name])
        assert not output.exists()
        assert whole_lines(working) >= kept + 2
        kept = whole_lines(working)
    assert kept < len(PROMPTS), "nothing was left for the last run"
    again = trtrun(*arguments)
    assert "go on with --resume" in error_line(again)
    # The second of several runs has gone on on three ranks; the last needs no more than one process.
    last = ONE_SLOT if len(victims) > 1 else ()
    done = trtrun(*arguments, *last, "--resume", words=words)
    assert done.returncode == 0, done.stderr
    assert f"{len(PROMPTS) - kept} prompts, " in done.stderr
    assert f"; {kept} rows were done before" in done.stderr
    rows = read_rows(output)
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert without_drafting(rows) == without_drafting(undisturbed)
    assert not working.exists()


def poisoned(pair: Path, folder: Path) -> Path:
    """The target with a NaN, which is found when its weights are loaded and not before."""
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(pair / "target", folder / "poisoned"))
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize(
    "starter",
    ["one process", "mpirun"],
)
def test_with_nothing_left_no_model_is_loaded(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path, starter: str
) -> None:
    rows = [{"prompt": "a", "max_tokens": 3}, {"promt": "b"}, {"prompt": "c", "max_tokens": 2}]
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    files = ("--prompts", prompts, "--output", output)
    assert trtrun("run", "--config", config(ONE_PROCESS), *files).returncode == 4
    first = read_rows(output)
    devices = ONE_PROCESS if starter == "one process" else THREE_RANKS
    model = poisoned(pair, tmp_path)
    file = config(devices, target={"model": str(model)})
    words = [*MPIRUN, "-n", "3", *forked_command_words()] if starter == "mpirun" else None

    # The bad row is refused again, for which no model is needed either. A command that is no rank does not even look
    # at the model; ranks of a user's own mpirun are checked before they agree that there is nothing to load.
    weights = model / "model.safetensors"
    if starter != "mpirun":
        weights.rename(model / "elsewhere")
    done = trtrun("run", "--config", file, *files, "--resume", words=words, timeout=60)
    if starter != "mpirun":
        (model / "elsewhere").rename(weights)
    lines = [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]
    assert done.returncode == 4, done.stderr
    assert lines[0].startswith("trtrun: row 1 (line 2) refused: unknown key 'promt'")
    assert lines[1:] == ["trtrun: nothing left to run; 2 rows were done before"]
    assert read_rows(output) == first

    # With a row more the models are needed, and are found to be bad; what is done stays.
    write_rows(prompts, [rows[0], {"prompt": "b"}, rows[2]])
    done = trtrun("run", "--config", file, *files, "--resume", words=words, timeout=60)
    assert done.returncode == 2
    assert "holds NaN" in done.stderr
    assert read_rows(output) == first
    done = trtrun("run", "--config", config(ONE_PROCESS), *files, "--resume")
    assert done.returncode == 0, done.stderr
    ended = read_rows(output)
    assert [ended[0], ended[2]] == [first[0], first[2]]
    assert (ended[1]["error"], len(ended[1]["token_ids"])) == (None, 128)


def test_what_cannot_be_resumed_is_refused_before_ranks_start(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2}]
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    files = ("--prompts", prompts, "--output", output)
    assert trtrun("run", "--config", config(ONE_PROCESS), *files).returncode == 0
    before = output.read_bytes()

    def refusal(*arguments: object) -> str:
        done = trtrun("run", "--config", config(THREE_RANKS), *arguments)
        assert done.returncode == 2
        assert output.read_bytes() == before
        return error_line(done)

    for option in ((), ("--output", "-")):
        assert "--resume needs --output FILE.jsonl" in refusal("--prompts", prompts, *option, "--resume")
    assert "/dev/null is not one" in refusal("--prompts", prompts, "--output", "/dev/null", "--resume")
    assert "its row 0 is of another input row or sampling options" in refusal(*files, "--resume", "--temperature", 1)
    write_rows(prompts, [rows[0], {"prompt": "B", "max_tokens": 2}])
    assert "its row 1 is of another input row" in refusal(*files, "--resume")
    write_rows(prompts, rows[:1])
    assert "its row 1 is not in the input" in refusal(*files, "--resume")
    write_rows(prompts, rows)
    output.write_bytes(b'{"index": 0, "te\n' + before)
    before = output.read_bytes()
    assert f"{output}: line 1 is not a whole output row" in refusal(*files, "--resume")


def test_sampled_rows_without_a_seed_are_kept_as_they_are(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "temperature": 1.5, "max_tokens": 12} for _ in range(3)]
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    arguments = ("run", "--config", config(ONE_PROCESS), "--prompts", prompts, "--output", output)
    assert trtrun(*arguments).returncode == 0
    first = read_rows(output)
    working = tmp_path / "out.jsonl.partial"
    working.write_text(json.dumps(first[1]) + "\n" + json.dumps(first[0])[:40])
    done = trtrun(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    second = read_rows(output)
    assert [row["index"] for row in second] == [0, 1, 2]
    assert second[1] == first[1]
    assert second[2]["token_ids"] != first[2]["token_ids"]
