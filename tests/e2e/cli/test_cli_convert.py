"""`trtrun convert` and TensorRT-LLM's convert_checkpoint.py command lines; and that targets and drafts run from what
they write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from commands import ROOT, TWO_SLOTS, Configs, Run, error_line

SCRIPT = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py")]


def test_a_pair_runs_from_what_the_script_writes(pair: Path, config: Configs, trtrun: Run, tmp_path: Path) -> None:
    """As a web page prints the command line: the texts are those of the directories that it came from."""
    for name, tp_size in (("target", 2), ("draft", 1)):
        words = [f"\u2013model_dir={pair / name}", "\u2013output_dir", tmp_path / "made" / name, "--dtype=float32"]
        more = ("--workers", "2", "--use_parallel_embedding", "--embedding_sharding_dim", "0")
        done = trtrun(*words, "\u2013tp_size", str(tp_size), *more, words=SCRIPT)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["tp_size"] == tp_size
    assert sorted(file.name for file in (tmp_path / "made" / "target").glob("rank*")) == [
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    values = config({"target": ["cpu:0"], "draft": ["cpu:0"]})
    models = ("--set", f"target.model={tmp_path / 'made' / 'target'}")
    models = (*models, "--set", f"draft.model={tmp_path / 'made' / 'draft'}")
    runs = [
        trtrun("run", "--config", values, "--prompt", "def main", "--max-tokens", 24, *more)
        for more in ((), models, (*models, "--speculation", "none"))
    ]
    assert [run.returncode for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    assert runs[0].stdout == runs[1].stdout == runs[2].stdout != ""
    plan = trtrun("plan", "--config", values, *models, *TWO_SLOTS)
    assert plan.returncode == 0 and "3 processes" in plan.stdout


def test_what_is_there_and_what_is_wrong(pair: Path, trtrun: Run, tmp_path: Path) -> None:
    output = tmp_path / "output"
    words = ("convert", "--model", pair / "target", "--output", output)
    assert trtrun(*words).returncode == 0
    assert "a checkpoint is there; --force writes over it" in error_line(trtrun(*words))
    assert trtrun(*words, "--force", "--tp-size", 2).returncode == 0
    assert len(list(output.glob("rank*"))) == 2
    done = trtrun(*words, "--force", "--layout", "huggingface")
    assert done.returncode == 0, done.stderr
    assert not list(output.glob("rank*")) and (output / "model.safetensors.index.json").exists()
    (output / "notes.txt").write_text("mine")
    for arguments, message in (
        ((*words, "--force"), "it has notes.txt, and is not written over"),
        (("convert", "--model", output, "--output", tmp_path / "no" / "where"), "does not exist"),
        ((*words[:4], tmp_path / "new", "--layout", "trtlm"), "unknown value 'trtlm' (did you mean 'trtllm'?)"),
        ((*words[:4], tmp_path / "new", "--layout", "huggingface", "--tp-size", 2), "any number of ranks reads them"),
    ):
        assert message in error_line(trtrun(*arguments))
    for option in ("--use_fp8", "--weight_only_precision=int4"):
        refused = trtrun("--model_dir", pair / "target", "--output_dir", tmp_path / "new", option, words=SCRIPT)
        assert refused.returncode == 2 and "this command does not quantize; scripts/quantize.py does" in refused.stderr
    assert not (tmp_path / "new").exists()
