"""`trtrun quantize` through the real command: killed and gone on with, drained, refused; and that its output runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from commands import ROOT, Configs, Run, error_line, write_rows
from drains import wait_until

Start = Callable[..., "subprocess.Popen[str]"]
LAYERS = 5
WORDS = ("def", "main", "import", "class", "Tree", "range", "return", "else", "try", "with", "open", "yield", "None")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and texts that keep each of its layers busy for a while."""
    path = tmp_path_factory.mktemp("quantize")
    make_checkpoint(path / "model", tokenizer=True, num_hidden_layers=LAYERS, max_position_embeddings=1024)
    texts = [{"text": " ".join(WORDS[(index * step) % len(WORDS)] for step in range(1, 100))} for index in range(1, 17)]
    write_rows(path / "texts.jsonl", texts)
    return path


@pytest.fixture
def words(folder: Path) -> Callable[..., list[object]]:
    """Arguments of the command."""

    def make(output: Path, *more: object, format_: str = "int4_awq") -> list[object]:
        given = ["quantize", "--model", folder / "model", "--output", output, "--format", format_]
        return [
            *given,
            "--calibration",
            folder / "texts.jsonl",
            "--max-length",
            96,
            "--group-size",
            32,
            "--kv-cache",
            "fp8",
            *more,
        ]

    return make


def shard(output: Path, number: int) -> Path:
    return output / f"model-{number:05d}-of-{LAYERS + 1:05d}.safetensors"


def without_times(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "quantization_report.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_a_killed_run_goes_on(
    words: Callable[..., list[object]], start_trtrun: Start, trtrun: Run, tmp_path: Path
) -> None:
    """To the same bytes as one that nothing ended, and without doing again what was done."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = trtrun(*words(whole))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["format"] == "int4_awq"
    process = start_trtrun(*words(broken))
    wait_until(shard(broken, 3).exists, process, "the second layer")
    process.kill()
    process.wait(timeout=60)
    assert not (broken / "config.json").exists()
    assert not shard(broken, LAYERS + 1).exists(), "the run was over before it was killed"
    first = shard(broken, 2).stat()
    shard(broken, LAYERS).with_suffix(".new").write_bytes(b"half")
    refused = error_line(trtrun(*words(broken, "--group-size", 16)))
    assert "it holds a run with another group_size: go on with that, or begin anew with --force" in refused
    done = trtrun(*words(broken))
    assert done.returncode == 0, done.stderr
    assert "goes on behind layer" in done.stderr and f"of {LAYERS}" in done.stderr
    assert (shard(broken, 2).stat().st_ino, shard(broken, 2).stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert {file.name for file in broken.iterdir()} == {file.name for file in whole.iterdir()}
    for file in whole.iterdir():
        if file.name != "quantization_report.jsonl":
            assert file.read_bytes() == (broken / file.name).read_bytes(), file.name
    assert without_times(broken) == without_times(whole)


def test_a_drain_and_what_is_there_already(
    words: Callable[..., list[object]], start_trtrun: Start, trtrun: Run, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    process = start_trtrun(*words(output))
    wait_until(shard(output, 2).exists, process, "the first layer")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3, errors
    assert "SIGTERM: some layers are left; the same command does the rest" in errors
    done = trtrun(*words(output, "--resume"))
    assert done.returncode == 0, done.stderr
    again = trtrun(*words(output, "--resume"))
    assert again.returncode == 0 and "nothing left to quantize" in again.stderr
    assert again.stdout == done.stdout
    assert "a quantized checkpoint is there; --force makes it anew" in error_line(trtrun(*words(output)))
    done = trtrun(*words(output, "--force", "--held-out-samples", 0, format_="fp8"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["format"] == "fp8" and "perplexity_after" not in summary
    assert "no perplexity: there were no texts to measure on" in done.stdout
    assert "float-quantized" in (output / "config.json").read_text()


def test_tensorrt_llms_layout_goes_on_and_runs(
    words: Callable[..., list[object]], folder: Path, config: Configs, start_trtrun: Start, trtrun: Run, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    given = words(output, "--layout", "trtllm", "--tp-size", 2)
    process = start_trtrun(*given)
    wait_until(shard(output / "quantizing" / "model", 3).exists, process, "the second layer")
    process.kill()
    process.wait(timeout=60)
    assert [file.name for file in output.iterdir()] == ["quantizing"]
    done = trtrun(*given)
    assert done.returncode == 0 and "goes on behind layer" in done.stderr, done.stderr
    assert sorted(file.name for file in output.glob("rank*")) == ["rank0.safetensors", "rank1.safetensors"]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["bytes_after"] == sum(file.stat().st_size for file in output.glob("rank*"))
    values = config({"target": ["cpu:0"]}, target={"model": str(output)}, speculation={"method": "none"})
    assert trtrun("run", "--config", values, "--prompt", "def main", "--max-tokens", 4).returncode == 0


def test_what_is_wrong_is_one_line(
    words: Callable[..., list[object]], folder: Path, trtrun: Run, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    output = tmp_path / "output"
    for arguments, message in (
        (words(output, format_="int4_awk"), "--format: unknown value 'int4_awk' (did you mean 'int4_awq'?)"),
        (words(output, "--calibration", "cnn_dailymail"), "no such file; data sets are not downloaded"),
        (words(tmp_path / "mine", "--force", "--resume"), "it is not empty, and was not made by trtrun quantize"),
        (words(folder / "model"), "that is the model itself"),
        (words(output, "--devices", "cuda:77"), "--devices: there is no cuda:77 here"),
        (words(output, "--devices", "cpu:0,cuda:0"), "name devices of one kind"),
        (words(output, "--group-sizes", "8"), "No such option"),
    ):
        done = trtrun(*arguments)
        assert done.returncode == 2 and message in error_line(done)
    done = trtrun("quantize", "--model", folder / "model", "--output", output, "--format", "int8_sq")
    assert "--format int8_sq needs --calibration FILE.jsonl" in error_line(done)
    assert not output.exists()


def test_it_runs_as_a_target(
    words: Callable[..., list[object]], folder: Path, config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    """Speculative texts are its plain ones."""
    output = tmp_path / "output"
    done = trtrun(*words(output, "--devices", "cpu:0,cpu:1"))
    assert done.returncode == 0, done.stderr
    values = config(
        {"target": ["cpu:0"], "draft": ["cpu:0"]}, target={"model": str(output)}, draft={"model": str(folder / "model")}
    )
    found = [
        trtrun("run", "--config", values, "--prompt", "def main", "--max-tokens", 24, *more)
        for more in ((), ("--speculation", "none"))
    ]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout != ""


def test_the_command_line_of_tensorrt_llm_as_a_web_page_prints_it(folder: Path, trtrun: Run, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "quantize.py")]
    output = tmp_path / "made" / "ckpt-target"
    given = [
        *("\u2013model_dir", "=", folder / "model", f"\u2013output_dir={output}", "\u2013dtype=float16"),
        *("\u2013qformat", "fp8", "\u2013calib_size", "512", "\u2013tp_size", "1"),
    ]
    few = ("\u2013calib_max_seq_length", "16", "\u2013calib_size", "2")
    done = trtrun(*given, *few, "\u2013kv_cache_dtype", "fp8", "--force", words=script)
    assert done.returncode == 0, done.stderr
    assert "cnn_dailymail is not downloaded: Python's documentation is calibrated with; save texts like" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["samples"] == 2
    texts = ("--calib_dataset", folder / "texts.jsonl", "--calib_max_seq_length", "32", "--batch_size", "12")
    done = trtrun(*given, "\u2013kv_cache_dtype", "fp8", *texts, "--force", words=script)
    assert done.returncode == 0, done.stderr
    values = json.loads((output / "config.json").read_text())
    assert values["dtype"] == "float16" and values["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
