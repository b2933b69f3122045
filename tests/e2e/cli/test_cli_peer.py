"""`trtrun bench --peer vllm`, with a package that stands for vLLM in the peer's interpreter alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import FOUR_RANKS, ONE_PROCESS, THREE_RANKS, Configs, Run
from drains import wait_for_end_of, wait_until
from engines import build_engine

FAKE = Path(__file__).parent / "fake_vllm"
MEDUSA = Path(__file__).parents[3] / "launch" / "configs" / "medusa_cpu.yaml"
DUMMY = ("--set", "target.load_format=dummy", "--set", "draft.load_format=dummy")
SHORT = ("--repeats", 1, "--max-tokens", 4, "--prompt-tokens", 6)


def peer_python(folder: Path, fault: str = "") -> Path:
    """An interpreter with a fake vLLM, in an environment of its own."""
    file = folder / "python"
    names = f"PYTHONPATH={FAKE} FAKE_VLLM={folder} FAKE_VLLM_FAULT={fault}"
    file.write_text(f'#!/bin/sh\n{names} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return file


def read_calls(folder: Path, mode: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    values = json.loads((folder / mode).read_text())
    return values["arguments"], values["calls"]


def test_vllm_gets_the_same_weights_prompts_and_limits(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    file = config({"target": ["cpu:0", "cpu:1"], "draft": ["cpu:0"]})
    rows = ("--rows", "1,3x9@0.8", "--top-p", 0.9, "--repeats", 2, "--max-tokens", 5, "--prompt-tokens", 6)
    own = {"draft_sample_method": "probabilistic", "draft_tensor_parallel_size": 1}
    peer = ("--peer", "vllm", "--peer-python", peer_python(tmp_path), "--peer-options", json.dumps(own))
    done = trtrun("bench", "--config", file, *rows, *peer)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["peer"] == {"name": "vllm", "version": "0.26.0+fake", "options": own, "error": None}
    for mode in ("plain", "speculative"):
        arguments, calls = read_calls(tmp_path, mode)
        assert arguments["model"] == report["target"] and arguments["dtype"] == report["dtype"]
        assert (arguments["tensor_parallel_size"], arguments["max_num_seqs"]) == (2, 3)
        assert arguments["max_model_len"] == 9 + 5 + 4 + 1
        assert [[len(prompt) for prompt in call["prompts"]] for call in calls] == [[6]] * 5 + [[9] * 3] * 5
        assert [(call["temperature"], call["top_p"]) for call in calls] == [(0, 1)] * 5 + [(0.8, 0.9)] * 5
        assert calls[3]["prompts"] != calls[4]["prompts"], "each repeat has prompts of its own"
    plain, _ = read_calls(tmp_path, "plain")
    speculative, _ = read_calls(tmp_path, "speculative")
    assert "speculative_config" not in plain
    assert speculative["speculative_config"] == {
        "method": "draft_model", "model": report["draft"], "num_speculative_tokens": 4, **own
    }  # fmt: skip
    for entry in report["results"]:
        theirs = entry["vllm"]
        assert theirs["speculative_mean_acceptance_length"] == 4
        assert theirs["plain_time_to_first_token_ms"] == 250 and "plain_mean_acceptance_length" not in theirs
        assert set(entry["ratios"]) == {
            "speculative_over_plain", "plain_over_peer_plain", "speculative_over_peer_speculative"
        }  # fmt: skip
        ratio = entry["speculative"]["tokens_per_s"] / theirs["speculative_tokens_per_s"]
        assert entry["ratios"]["speculative_over_peer_speculative"] == pytest.approx(ratio, abs=1e-3)
    for line in ("vllm plain", "vllm speculative", "3x9@0.8", 'draft_sample_method="probabilistic"'):
        assert line in done.stdout


def test_vllm_gets_heads_that_draft_here(trtrun: Run, tmp_path: Path) -> None:
    peer = ("--peer", "vllm", "--peer-python", peer_python(tmp_path))
    done = trtrun("bench", "--config", MEDUSA, "--rows", "1", *SHORT, *peer)
    assert done.returncode == 0, done.stderr
    speculative, _ = read_calls(tmp_path, "speculative")
    found = speculative["speculative_config"]
    assert found["method"] == "medusa" and Path(found["model"]).name == "medusa"


def test_vllm_makes_weights_up_where_the_job_does(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    peer = ("--peer", "vllm", "--peer-python", peer_python(tmp_path))
    done = trtrun("bench", "--config", config(ONE_PROCESS), "--rows", "1", *SHORT, *peer, *DUMMY)
    assert done.returncode == 0, done.stderr
    assert {read_calls(tmp_path, mode)[0]["load_format"] for mode in ("plain", "speculative")} == {"dummy"}
    zeros = json.loads((tmp_path / "zeros").read_text())
    assert zeros == [f"layers.0.mlp.{name}.bias" for name in ("router", "gate", "down")], (
        "else all choose the same experts"
    )


def test_a_vllm_that_fails_costs_none_of_our_figures(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    words = ("bench", "--config", config(ONE_PROCESS), "--rows", "1", *SHORT, "--peer", "vllm", "--json")
    done = trtrun(*words, "--peer-python", peer_python(tmp_path, "raise"))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["results"][0]["speculative"]["tokens_per_s"] > 0
    first, *rest = done.stderr.splitlines()
    assert first == "trtrun: the peer vllm ended with status 1; trtrun's own figures are complete"
    assert report["peer"]["error"] == first.removeprefix("trtrun: ")
    assert rest[-1] == "RuntimeError: No available memory for the cache blocks."

    done = trtrun(*words, "--peer-python", peer_python(tmp_path, "import"))
    assert done.returncode == 2
    assert json.loads(done.stdout)["results"]
    (line,) = done.stderr.splitlines()
    assert "libcudart.so.13: cannot open shared object file" in line and "--peer-python" in line


def test_an_interpreter_without_vllm_is_refused_before_anything_runs(
    config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    words = ("bench", "--config", config(FOUR_RANKS))
    engine = build_engine(config.pair / "draft", tmp_path / "engine")
    cases = {
        ("--peer", "vllm", "--set", f"draft.model={engine}"): "engine is an engine: name the one it is of",
        ("--peer", "vllm"): f"vllm cannot be imported by {sys.executable}: name an interpreter that has it",
        ("--peer", "vllm", "--peer-python", tmp_path / "no"): "no cannot be started: No such file or directory",
        ("--peer-python", sys.executable): "--peer-python names the interpreter of a peer: add --peer",
        ("--peer-options", '{"a": 1}'): "--peer-options are a peer's: add --peer vllm",
        ("--peer", "vllm", "--peer-options", '{"model": "x"}'): "--peer-options: model is the job's own",
        ("--peer", "transformers", "--peer-options", '{"a": 1}'): "fields of vLLM's speculative_config",
        ("--peer", "vllm", "--peer-options", "[1]"): "write a JSON object",
        ("--peer", "vllm", "--peer-options", '{"a": 1, "a": 2}'): 'the key "a" stands twice',
        ("--peer", "vllm", "--peer-options", '{"a": 1}', "--speculation", "none"): "speculation.method is none",
        ("--peer", "vllm", "--speculation", "suffix"): "is not started with speculation.method suffix: choose draft_",
        ("--peer", "vllm", "--set", "target.load_format=dummy"): "set load_format: dummy for all or none",
        ("--peer", "transformers", *DUMMY): "reads the models' weights, and load_format is dummy",
    }
    of_heads = ("bench", "--config", MEDUSA, "--set", "speculation.medusa_choices=mc_sim_7b_63")
    told = [(words, *case) for case in cases.items()]
    told.append((of_heads, ("--peer", "vllm"), "vllm drafts chains, and medusa drafts trees by its options: leave"))
    for command, arguments, said in told:
        done = trtrun(*command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert said in line


def test_a_vllm_that_runs_ends_with_its_processes_when_bench_is_ended(
    config: Configs, start_trtrun: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    python = peer_python(tmp_path, "stay")
    process = start_trtrun(
        "bench", "--config", config(THREE_RANKS), "--rows", "1", *SHORT, "--peer", "vllm", "--peer-python", python
    )
    children = tmp_path / "child"
    wait_until(lambda: children.exists() and children.read_text().count(" ") == 1, process, "the peer's child")
    peers = [int(word) for word in children.read_text().split()]
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    wait_for_end_of(peers)
