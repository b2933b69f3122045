"""`trtrun warm-up` through the real command: caches are filled without weights, and later jobs find them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from commands import ONE_PROCESS, THREE_RANKS, Configs, Run, error_line

BFLOAT16 = ("--set", "target.dtype=bfloat16", "--set", "draft.dtype=bfloat16")
"""Which has kernels that are compiled."""


def compiled(cache: Path) -> set[str]:
    """Files of kernels."""
    return {path.name for path in (cache / "trtrun" / "kernels").glob("*.o")}


def test_a_job_finds_what_was_compiled_without_its_weights(
    config: Configs, trtrun: Run, pair: Path, tmp_path: Path
) -> None:
    bare, cache = tmp_path / "bare", tmp_path / "cache"
    for role in ("target", "draft"):
        (bare / role).mkdir(parents=True)
        shutil.copy(pair / role / "config.json", bare / role)
    models = {role: {"model": str(bare / role)} for role in ("target", "draft")}
    done = trtrun("warm-up", "--config", config(THREE_RANKS, **models), *BFLOAT16, "--cache", cache)
    assert done.returncode == 0, done.stderr
    ready, told = done.stdout.splitlines()
    assert ready.startswith("ready after ")
    variables = dict(word.split("=", 1) for word in told.split() if "=" in word)
    assert variables == {"TRITON_CACHE_DIR": str(cache / "triton"), "XDG_CACHE_HOME": str(cache)}
    found = compiled(cache)
    assert found
    prompt = ("--prompt", "def f(", "--max-tokens", 4)
    done = trtrun("run", "--config", config(THREE_RANKS), *BFLOAT16, *prompt, env=variables)
    assert done.returncode == 0, done.stderr
    assert compiled(cache) == found


def test_it_refuses_what_a_run_would_refuse(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    done = trtrun("warm-up", "--config", config({"target": ["cuda:77"]}, speculation={"method": "none"}))
    assert done.returncode == 2
    assert "cuda:77" in error_line(done)
    (tmp_path / "file").write_text("")
    done = trtrun("warm-up", "--config", config(ONE_PROCESS), "--cache", tmp_path / "file")
    assert done.returncode == 2
    assert "--cache" in done.stderr
    values = json.loads(config(ONE_PROCESS).read_text())
    values["target"]["model"] = str(tmp_path / "nowhere")
    (tmp_path / "wrong.yaml").write_text(json.dumps(values))
    done = trtrun("warm-up", "--config", tmp_path / "wrong.yaml")
    assert done.returncode == 2
    assert "nowhere" in error_line(done)
