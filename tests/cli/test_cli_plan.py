"""`trtrun plan` through the real command, and that the engines do what it says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from commands import FOUR_RANKS, ONE_PROCESS, Configs, Run

from trtrun.config import load_config
from trtrun.llm import LLM


def test_the_plan_of_four_ranks(config: Configs, trtrun: Run) -> None:
    file = config(FOUR_RANKS, kv_cache={"max_tokens": 1000}, threads=1)
    done = trtrun("plan", "--config", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 4
    assert plan["threads"] == 1
    assert plan["kv_tokens"] == 1008  # whole blocks of 16
    roles = [(rank["rank"], rank["role"], rank["device"]) for rank in plan["ranks"]]
    assert roles == [(0, "orchestrator", "host"), (1, "draft", "cpu:0"), (2, "target", "cpu:1"), (3, "target", "cpu:2")]
    orchestrator, draft, first, second = plan["ranks"]
    assert orchestrator["kv_tokens"] == orchestrator["kv_bytes"] == 0
    assert draft["target_shard_bytes"] == first["draft_shard_bytes"] == 0
    assert first["target_shard_bytes"] == second["target_shard_bytes"]
    # Float32: 64 blocks of 16 tokens, keys and values; TP 2 halves the two KV heads of the target.
    assert draft["kv_bytes"] == 64 * 16 * 2 * 2 * 2 * 16 * 4
    assert first["kv_bytes"] == 64 * 16 * 2 * 3 * 1 * 16 * 4
    command = shlex.split(plan["command"])
    assert command[command.index("-n") + 1] == "4"
    assert command[command.index("launch.cli") + 1 :] == ["run", "--config", str(file), "--prompt", "TEXT"]


def test_the_table_shows_every_rank_and_the_command(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(FOUR_RANKS), "--set", "kv_cache.max_tokens=1000")
    assert done.returncode == 0, done.stderr
    for part in ("orchestrator", "cpu:0", "cpu:1", "cpu:2", "1008", "float32", "-m mpi4py -m launch.cli run"):
        assert part in done.stdout


def test_one_process_needs_no_mpirun(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(ONE_PROCESS), "--json")
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 1
    assert "mpirun" not in plan["command"]


def test_the_engines_do_what_the_plan_says(config: Configs, trtrun: Run, pair: Path) -> None:
    file = config(
        ONE_PROCESS, scheduler={"max_batch_size": 2, "max_seq_len": 100}, kv_cache={"free_memory_fraction": 0.1}
    )
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)["ranks"][0]
    with LLM(config=load_config(file)) as llm:
        report = llm.report.ranks[0]
    assert report.kv_tokens == plan["kv_tokens"] == 2 * 112
    assert report.kv_bytes == plan["kv_bytes"]
    assert report.shard_bytes == plan["draft_shard_bytes"] + plan["target_shard_bytes"]
