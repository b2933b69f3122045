"""The real commands with models by name, out of a Hugging Face cache: `plan`, `check`, `run`, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ONE_PROCESS, THREE_RANKS, Configs, Run, error_line
from hub_caches import COMMIT, OTHER_COMMIT, fill_cache

NAMES = {"target": {"model": "org/target"}, "draft": {"model": "org/draft@v1"}, "kv_cache": {"max_tokens": 1000}}
PROMPT = ("--prompt", "two words", "--max-tokens", "12")
NO_NETWORK = """
import socket
def refuse(*_, **__):
    raise AssertionError("nothing goes over the network")
socket.create_connection = socket.socket.connect = socket.getaddrinfo = refuse
"""


@pytest.fixture
def home(pair: Path, tmp_path: Path) -> Path:
    """A home of Hugging Face whose cache has the pair; the draft by a tag alone."""
    fill_cache(tmp_path / "home" / "hub", "org/target", pair / "target")
    fill_cache(tmp_path / "home" / "hub", "org/draft", pair / "draft", "v1", OTHER_COMMIT)
    return tmp_path / "home"


def environment(home: Path) -> dict[str, str]:
    """Of a command that has this home of Hugging Face."""
    return {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}


def test_three_ranks_by_names(config: Configs, trtrun: Run, home: Path) -> None:
    by_name, env = config(THREE_RANKS, **NAMES), environment(home)
    planned = trtrun("plan", "--config", by_name, "--json", env=env)
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["ranks"]) == 3
    checked = trtrun("check", "--config", by_name, "--json", env=env)
    assert checked.returncode == 0, checked.stderr
    snapshots = {"target": f"org/target@{COMMIT}", "draft": f"org/draft@{OTHER_COMMIT}"}
    assert [rank["snapshots"] for rank in json.loads(checked.stdout)["ranks"]] == [snapshots] * 3
    # What is left open the parent chooses, and its ranks hear of it.
    placed = ("--devices", "cpu:1", "--draft-devices", "cpu:0", "--set", "kv_cache.max_tokens=1000")
    without_file = ("org/target", "--draft", "org/draft@v1", *placed, "--set", "speculation.pacing=fixed")
    texts = [trtrun("run", *words, *PROMPT, env=env) for words in (without_file, ("--config", config(ONE_PROCESS)))]
    assert [done.returncode for done in texts] == [0, 0], [done.stderr for done in texts]
    assert texts[0].stderr.count("trtrun: chosen: speculation.method draft_target (") == 1
    assert texts[0].stdout == texts[1].stdout != ""


def test_a_run_without_network(config: Configs, trtrun: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK, encoding="utf-8")
    env = environment(home) | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[3]}", "HF_HUB_OFFLINE": "0"}
    done = trtrun("run", "--config", config(ONE_PROCESS, **NAMES), *PROMPT, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == trtrun("run", "--config", config(ONE_PROCESS), *PROMPT).stdout != ""


@pytest.mark.parametrize("command", ["plan", "check", "run"])
def test_a_name_that_is_not_in_the_cache_is_refused_before_a_rank_starts(
    command: str, config: Configs, trtrun: Run, home: Path
) -> None:
    file = config(THREE_RANKS, **NAMES, launch={"mpirun": "/no/mpirun"})  # a rank cannot be started
    words = (*PROMPT,) if command == "run" else ()
    done = trtrun(command, "--config", file, "--set", "draft.model=org/draft", *words, env=environment(home))
    assert done.returncode == 2
    line = error_line(done)
    assert f"draft.model: no such directory: {file.parent}/org/draft and " in line
    assert f"org/draft is not in the Hugging Face cache {home}/hub (of it there: v1, {OTHER_COMMIT}): " in line
    assert line.endswith("run `hf download org/draft` on each host, or set HF_HOME or HF_HUB_CACHE to where it is")


@pytest.mark.parametrize("command", ["plan", "check", "run"])
def test_a_download_that_was_interrupted(
    command: str, config: Configs, trtrun: Run, home: Path, tmp_path: Path
) -> None:
    snapshot = home / "hub" / "models--org--target" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", names, strict=True))})
    )
    file = config(THREE_RANKS, **NAMES, launch={"mpirun": "/no/mpirun"})
    done = trtrun(command, "--config", file, *(PROMPT if command == "run" else ()), env=environment(home))
    assert done.returncode == 2
    assert error_line(done) == (
        f"trtrun: target: {snapshot} lacks shards {', '.join(names)} (2 in its index); its download is not complete: "
        f"run `hf download org/target --revision {COMMIT}`"
    )
