"""`trtrun generate-data` and `trtrun train-drafter` through the real commands, on one rank and on two, killed and gone
on with; and that what they write drafts for the target without changing its texts."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MPIRUN, ONE_PROCESS, Configs, Run, error_line, forked_command_words, write_rows
from drains import wait_until
from engines import build_engine
from output_rows import read_rows, without_drafting
from safetensors.torch import load_file, save_file

from launch.jobs.mpi.start_progress import VARIABLE, StartWatch

TEXTS = ["def main(", "import os\n", "class Tree:", "for i in range(", "# The", "return ", "if x:\n    ", "try:\n"]
PROMPTS = [{"prompt": TEXTS[index % 8] * (1 + index // 8)} for index in range(16)]
PARD_TOKEN = 256
"""Of the pair's vocabulary of 260 the tokenizer knows 257: this is its end of text, which no text holds."""

TWO_RANKS = {"target": ["cpu:1"], "draft": ["cpu:0"]}
SMALL = (
    *("--num-tokens", 3, "--batch-size", 4, "--micro-batch-size", 2, "--max-length", 64, "--heldout-rows", 2),
    *("--learning-rate", 0.003, "--warmup-steps", 2, "--evaluation-steps", 4, "--checkpoint-steps", 2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    return write_rows(folder / "prompts.jsonl", PROMPTS)


@pytest.fixture
def data(folder: Path, prompts: Path, config: Configs, trtrun: Run) -> Path:
    """Made once, by the command."""
    path = folder / "data.jsonl"
    if not path.exists():
        words = ("--prompts", prompts, "--output", path, "--max-tokens", 24, "--seed", 7)
        done = trtrun("generate-data", "--config", config(ONE_PROCESS), *words)
        assert done.returncode == 0, done.stderr
    return path


def result_of(done: Any) -> dict[str, Any]:
    """The JSON of the last line."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_data_is_the_targets_own_answers(
    data: Path, prompts: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    """Plain decoding's, greedy and by seed; and rows that are there already are kept."""
    rows = read_rows(data)
    assert [row["index"] for row in rows] == list(range(16))
    assert [row["temperature"] for row in rows] == [0.0, 0.8] * 8
    assert [row["seed"] for row in rows[1::2]] == [8, 10, 12, 14, 16, 18, 20, 22]
    asked = [
        {"prompt_token_ids": row["prompt_token_ids"], "temperature": row["temperature"], "seed": row["seed"]}
        for row in rows
    ]
    again = write_rows(tmp_path / "asked.jsonl", asked)
    words = ("--prompts", again, "--output", tmp_path / "plain.jsonl", "--max-tokens", 24, "--speculation", "none")
    done = trtrun("run", "--config", config(ONE_PROCESS), *words)
    assert done.returncode == 0, done.stderr
    plain = read_rows(tmp_path / "plain.jsonl")
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in plain]
    assert [row["text"] for row in rows] == [row["text"] for row in plain]
    part = tmp_path / "part.jsonl.partial"
    part.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    words = ("--prompts", prompts, "--output", tmp_path / "part.jsonl", "--max-tokens", 24, "--seed", 7, "--resume")
    done = trtrun("generate-data", "--config", config(ONE_PROCESS), *words)
    assert done.returncode == 0, done.stderr
    assert "5 rows were done before" in done.stderr
    assert without_drafting(read_rows(tmp_path / "part.jsonl")) == without_drafting(rows)
    assert (tmp_path / "part.jsonl").read_text().splitlines()[:5] == data.read_text().splitlines()[:5]


def test_data_of_other_sampling_is_not_gone_on_with(
    data: Path, prompts: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    copy = shutil.copy(data, tmp_path / "data.jsonl")
    words = ("--prompts", prompts, "--output", copy, "--max-tokens", 24, "--seed", 8, "--resume")
    done = trtrun("generate-data", "--config", config(ONE_PROCESS), *words)
    assert done.returncode == 2
    assert "its row 1" in error_line(done)


def test_two_ranks_train_what_one_trains_and_the_drafter_drafts(
    data: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    train = ("--data", data, *SMALL, "--steps", 8, "--pard-token", PARD_TOKEN)
    one = result_of(trtrun("train-drafter", "--config", config(ONE_PROCESS), *train, "--output", tmp_path / "one"))
    two_ranks = config(TWO_RANKS)
    done = trtrun("train-drafter", "--config", two_ranks, *train, "--output", tmp_path / "two")
    two = result_of(done)
    assert "2 ranks" in done.stderr
    assert one["loss_by_depth"] == pytest.approx(two["loss_by_depth"], abs=2e-3)
    assert (one["steps"], one["num_tokens"], len(one["acceptance_by_depth"])) == (8, 3, 3)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    start = load_file(Path(json.loads(two_ranks.read_text())["draft"]["model"]) / "model.safetensors")
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-4, rtol=1e-3)
    assert any(not torch.allclose(value, weights[0][name], atol=1e-3) for name, value in start.items())
    metrics = read_rows(tmp_path / "two" / "training" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert [row["step"] for row in metrics if "acceptance_by_depth" in row] == [4, 8]
    assert (tmp_path / "two" / "training" / "curves.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (values["pard_token"], values["spd_type"]) == (PARD_TOKEN, "pard")
    prompt = ("--prompt", "def main(", "--max-tokens", 40)
    drafted = trtrun("run", "--config", config(ONE_PROCESS, draft={"model": str(tmp_path / "one")}), *prompt)
    plain = trtrun("run", "--config", config(ONE_PROCESS), "--speculation", "none", *prompt)
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    again = trtrun("train-drafter", "--config", config(ONE_PROCESS), *train, "--output", tmp_path / "one", "--resume")
    assert result_of(again) == one
    assert "nothing left to train" in again.stderr
    other = (*train, "--seed", 5, "--output", tmp_path / "one", "--resume")
    done = trtrun("train-drafter", "--config", config(ONE_PROCESS), *other)
    assert done.returncode == 2
    assert "--resume: the run in the output directory had another --seed; give the same, or another" in done.stderr
    target = Path(shutil.copytree(json.loads(two_ranks.read_text())["target"]["model"], tmp_path / "other target"))
    others = {name: value + 0.01 for name, value in load_file(target / "model.safetensors").items()}
    save_file(others, target / "model.safetensors", {"format": "pt"})
    same = (*train, "--output", tmp_path / "one", "--resume")
    done = trtrun("train-drafter", "--config", config(ONE_PROCESS, target={"model": str(target)}), *same)
    assert done.returncode == 2
    assert "the run in the output directory had another target; give another --output" in done.stderr


def test_an_eagle3_head_that_is_trained_on_two_ranks_drafts(
    data: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    """For a target of three layers, with the draft model of the configuration left alone. Rows that teach nothing are
    told."""
    more = tmp_path / "refused.jsonl"
    row = json.loads(data.read_text().splitlines()[0])
    more.write_text(json.dumps({**row, "token_ids": []}) + "\n")
    train = ("--method", "eagle3", "--data", data, "--data", more, *SMALL, "--steps", 4, "--draft-vocab-size", 100)
    words = (*train, "--precision", "bfloat16", "--output", tmp_path / "head")
    done = trtrun("train-drafter", "--config", config(TWO_RANKS), *words)
    found = result_of(done)
    assert "eagle3: begins 4 steps, with 14 rows on 2 ranks" in done.stderr
    assert "1 row was left out: refused, or without a completion within --max-length" in done.stderr
    assert (found["num_tokens"], len(found["acceptance_by_depth"])) == (3, 3)
    assert len(load_file(tmp_path / "head" / "model.safetensors")["d2t"]) == 100
    prompt = ("--prompt", "def main(", "--max-tokens", 40)
    path = config({"target": ["cpu:0"]}, draft={"model": str(tmp_path / "head")}, speculation={"method": "eagle3"})
    drafted = trtrun("run", "--config", path, *prompt)
    plain = trtrun("run", "--config", config(ONE_PROCESS), "--speculation", "none", *prompt)
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout


def test_ranks_tell_the_parent_that_they_have_started(data: Path, config: Configs, trtrun: Run, tmp_path: Path) -> None:
    """One that does not hear it ends a run of more than launch.start_seconds as one whose start hangs."""
    train = ("--method", "medusa", "--data", data, *SMALL, "--steps", 1, "--output", tmp_path / "heads")
    by_hand = [*MPIRUN, "-n", "2", *forked_command_words()]
    done = trtrun("train-drafter", "--config", config(TWO_RANKS), *train, env={VARIABLE: "1"}, words=by_hand)
    assert done.returncode == 0, done.stderr
    watch = StartWatch(str, 2, 0, "the start")
    watch.feed(done.stderr)
    assert watch.all_are_done


@pytest.mark.parametrize(("devices", "number"), [(ONE_PROCESS, signal.SIGKILL), (TWO_RANKS, signal.SIGTERM)])
def test_a_killed_run_comes_to_the_same_weights(
    data: Path,
    config: Configs,
    trtrun: Run,
    start_trtrun: Callable[..., Any],
    tmp_path: Path,
    devices: dict[str, list[str]],
    number: signal.Signals,
) -> None:
    train = ("--data", data, *SMALL, "--steps", 24, "--pard-token", PARD_TOKEN, "--divergence", 0)
    words = ("train-drafter", "--config", config(devices), *train)
    process = start_trtrun(*words, "--output", tmp_path / "killed")
    metrics = tmp_path / "killed" / "training" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 5, process, "five steps")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (3 if number == signal.SIGTERM else -number)
    assert not (tmp_path / "killed" / "config.json").exists()
    assert (tmp_path / "killed" / "training" / "state.safetensors").exists()
    done = trtrun(*words, "--output", tmp_path / "killed", "--resume")
    found = result_of(done)
    assert "goes on behind step" in done.stderr
    steps = [row["step"] for row in read_rows(metrics)]
    assert steps == list(range(1, 25))
    assert not (tmp_path / "killed" / "training" / "state.safetensors").exists()
    if devices is TWO_RANKS:  # what one rank comes to stands for both
        return
    whole = result_of(trtrun(*words, "--output", tmp_path / "whole"))
    names = ("loss_by_depth", "tokens_per_round", "acceptance_by_depth")
    assert [found[name] for name in names] == [whole[name] for name in names]
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert both[0] == both[1]
    lines = [read_rows(tmp_path / name / "training" / "metrics.jsonl") for name in ("whole", "killed")]
    assert [row["loss"] for row in lines[0]] == [row["loss"] for row in lines[1]]


def test_what_is_wrong_is_one_line_before_anything_is_written(
    data: Path, config: Configs, trtrun: Run, tmp_path: Path, pair: Path
) -> None:
    """Some of it; tests/unit/tools/training/test_training_input.py has all."""
    path = config(ONE_PROCESS)
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    foreign = write_rows(
        tmp_path / "foreign.jsonl", [{"prompt_token_ids": [1], "token_ids": [260], "temperature": 0}] * 3
    )
    output, more = tmp_path / "out", ("--pard-token", PARD_TOKEN, "--heldout-rows", 2)
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--data", data, "--output", output, "--method", "prad"), "unknown method 'prad' (did you mean 'pard'?)"),
        (("--data", foreign, "--output", output), "is another vocabulary's: line 1 holds token 260"),
        (("--data", data, "--output", full), "it is not empty; go on with --resume, or name another directory"),
        (
            ("--data", data, "--output", output, "--method", "eagle3", "--from", full),
            "and starts from no other: leave it",
        ),
        (
            ("--data", data, "--output", output, "--method", "eagle3", "--eagle3-layers-to-capture", "3"),
            "the target has no layer 3: name some from -1, the embedding, to 2",
        ),
        (("--data", data, "--output", output, "--speculation", "none"), "give a 'draft' section, or --from DIR"),
        (
            (
                "--data",
                data,
                "--output",
                output,
                "--set",
                f"target.model={build_engine(pair / 'target', tmp_path / 'e')}",
            ),
            "is an engine, and training reads checkpoints: name the one it is of",
        ),
    ]
    alone = ("--config", config({"target": ["cpu:0"]}), "--output", output)
    cases += [
        ((*alone, "--data", data), "give a 'draft' section, or --from DIR"),
        ((*alone, "--data", foreign, "--method", "medusa"), "is another vocabulary's: line 1 holds token 260"),
        ((*alone, "--data", data, "--set", "speculation.method=eagel3"), "unknown method 'eagel3'"),
    ]
    for words, said in cases:
        done = trtrun("train-drafter", "--config", path, *more, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert said in error_line(done)
    assert not output.exists()
    done = trtrun("generate-data", "--config", path, "--prompts", tmp_path / "none.jsonl", "--output", output)
    assert (done.returncode, "cannot read the prompts file" in error_line(done)) == (2, True)
