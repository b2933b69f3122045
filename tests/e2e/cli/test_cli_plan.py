"""`trtrun plan` through the real command, and that the engines do what it says."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_tokenizer
from commands import FOUR_RANKS, ONE_PROCESS, Configs, Run, error_line
from eagle3_heads import eagle3, make_head, write_head
from eagle_heads import make_eagle_head, write_eagle_head
from medusa_heads import make_heads, write_heads
from quantized_checkpoints import make_pair

from trtrun.api.llm import LLM
from trtrun.configuration.config import load_config


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
    assert [(rank["rank"], rank["graphs"], rank["kernels"]) for rank in plan["start"]["ranks"]] == [
        (1, 0, "none"), (2, 0, "none"), (3, 0, "none")
    ]  # fmt: skip
    command = shlex.split(plan["command"])
    assert command[command.index("-n") + 1] == "4"
    assert command[command.index("launch.cli") + 1 :] == ["run", "--config", str(file), "--prompt", "TEXT"]


def test_the_table_shows_every_rank_and_the_command(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(FOUR_RANKS), "--set", "kv_cache.max_tokens=1000")
    assert done.returncode == 0, done.stderr
    for part in ("orchestrator", "cpu:0", "cpu:1", "cpu:2", "1008", "float32", "-m mpi4py -m launch.cli run"):
        assert part in done.stdout
    start = done.stdout[done.stdout.index("until it is ready") :]
    for part in ("MPI connects 4 processes", "rank 1 reads", "ranks 2, 3", "page cache", "4.6 to 4.8 s"):
        assert part in " ".join(line.strip("│ ") for line in start.splitlines()) or part in start, part
    assert "ready after" not in start, "there are no figures for most of it"


def test_one_process_needs_no_mpirun(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(ONE_PROCESS), "--json")
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 1
    assert "mpirun" not in plan["command"]


def test_what_becomes_of_quantized_weights_is_said(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    """And the bytes are those that are held: as many as of a model that is not quantized."""
    stored, dense = make_pair(tmp_path, "fp8 block")
    plans = []
    for model in (stored, dense):
        done = trtrun("plan", "--config", config(ONE_PROCESS), "--json", "--set", f"target.model={model}")
        assert done.returncode == 0, done.stderr
        plans.append(json.loads(done.stdout))
    quantized, plain = plans
    assert quantized["ranks"][0]["target_shard_bytes"] == plain["ranks"][0]["target_shard_bytes"]
    told = [note for note in quantized["notes"] if note not in plain["notes"]]
    assert len(told) == 1 and told[0].startswith("target: fp8 weights become float32 as they are read: ")


def test_how_keys_and_values_are_kept_is_said(config: Configs, trtrun: Run) -> None:
    """With their bytes, and which device has no kernel for them."""
    words = ("plan", "--config", config(ONE_PROCESS), "--json", "--set")
    done = [trtrun(*words, f"kv_cache.dtype={name}") for name in ("fp8", "plain", "fp9")]
    assert [one.returncode for one in done] == [0, 0, 2]
    codes, plain = (json.loads(one.stdout) for one in done[:2])
    told = [note for note in codes["notes"] if note not in plain["notes"]]
    assert [note.split(":")[0] for note in told] == ["target", "draft"]
    assert "kept in fp8, with a scale for each token and head: " in told[0] and "plain torch" in told[0]
    assert "unknown kv_cache.dtype 'fp9' (did you mean 'fp8'?); known: auto, fp8, int8, plain" in done[2].stderr


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["draft.quantization=int8", "draft.dtype=bfloat16"],
        [f"{name}.{item}" for name in ("target", "draft") for item in ("quantization=fp8", "dtype=bfloat16")],
    ],
)
def test_the_engines_do_what_the_plan_says(config: Configs, trtrun: Run, overrides: list[str]) -> None:
    file = config(
        ONE_PROCESS, scheduler={"max_batch_size": 2, "max_seq_len": 100}, kv_cache={"free_memory_fraction": 0.1}
    )
    options = [argument for override in overrides for argument in ("--set", override)]
    planned = json.loads(trtrun("plan", "--config", file, "--json", *options).stdout)
    plan = planned["ranks"][0]
    with LLM(config=load_config(file, overrides)) as llm:
        report = llm.report.ranks[0]
    assert report.kv_tokens == plan["kv_tokens"] == 2 * 112
    assert report.kv_bytes == plan["kv_bytes"]
    assert report.shard_bytes == plan["draft_shard_bytes"] + plan["target_shard_bytes"]
    assert report.bytes_read == planned["start"]["ranks"][0]["read_bytes"]


def test_the_plan_shows_the_links_of_every_pair(config: Configs, trtrun: Run) -> None:
    file = config(FOUR_RANKS, kv_cache={"max_tokens": 1000})
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)
    assert [(link["carries"], *link["ranks"], link["transport"]) for link in plan["links"]] == [
        ("plans and reports", 0, 1, "MPI, shared memory"),
        ("plans and reports", 0, 2, "MPI, shared memory"),
        ("plans and reports", 0, 3, "MPI, shared memory"),
        ("heartbeat", 0, 1, "TCP, one host"),
        ("heartbeat", 0, 2, "TCP, one host"),
        ("heartbeat", 0, 3, "TCP, one host"),
        ("target all_reduce", 2, 3, "MPI, shared memory"),
        ("draft tokens", 1, 2, "MPI, shared memory"),
        ("draft tokens", 1, 3, "MPI, shared memory"),
        ("verdict", 2, 1, "MPI, shared memory"),
        ("verdict", 2, 3, "MPI, shared memory"),
    ]
    assert (plan["hosts"], plan["notes"], plan["script"]) == ([os.uname().nodename], [], None)
    shown = trtrun("plan", "--config", file, "--set", "speculation.use_logits=true").stdout
    for part in (
        "what travels",
        "target all_reduce",
        "draft tokens, draft_probs",
        "1→2",
        "2→1, 3",
        "MPI, shared memory",
    ):
        assert part in shown


def test_prompt_lookup_is_planned_without_a_draft_rank_and_without_its_links(config: Configs, trtrun: Run) -> None:
    file = config(FOUR_RANKS, kv_cache={"max_tokens": 1000}, draft={"model": "/nowhere"})
    plan = json.loads(trtrun("plan", "--config", file, "--json", "--speculation", "ngram").stdout)
    assert [rank["role"] for rank in plan["ranks"]] == ["orchestrator", "target", "target"]
    assert {rank["draft_shard_bytes"] for rank in plan["ranks"]} == {0} and plan["draft_dtype"] is None
    assert [(link["carries"], *link["ranks"]) for link in plan["links"] if link["carries"] != "heartbeat"] == [
        ("plans and reports", 0, 1), ("plans and reports", 0, 2), ("target all_reduce", 1, 2), ("verdict", 1, 2)
    ]  # fmt: skip


TWO_TARGETS = {"target": ["cpu:1", "cpu:2"]}


def test_heads_are_planned_on_the_targets_ranks_and_looked_at(
    config: Configs, trtrun: Run, pair: Path, tmp_path: Path
) -> None:
    heads = make_heads(pair / "target")
    draft = {"model": str(write_heads(tmp_path / "heads", heads))}
    speculation = {"method": "medusa", "medusa_choices": [[0], [1], [0, 0]]}
    file = config(TWO_TARGETS, kv_cache={"max_tokens": 1000}, speculation=speculation, draft=draft)
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)
    assert [rank["role"] for rank in plan["ranks"]] == ["orchestrator", "target", "target"]
    vocab_size, hidden = heads.matrices[0].shape
    # Two of four heads: blocks whole, matrices cut over the vocabulary.
    numbers = 2 * (hidden * hidden + hidden + -(-vocab_size // 2) * hidden)
    size = numbers * {"float32": 4, "bfloat16": 2}[plan["target_dtype"]]
    assert [rank["draft_shard_bytes"] for rank in plan["ranks"]] == [0, size, size]
    assert plan["heads"] == "4 Medusa heads, 2 of them used" and plan["draft_dtype"] is None
    assert "4 Medusa heads, 2 of them used" in trtrun("plan", "--config", file).stdout
    deep = ("--set", "speculation.medusa_choices=null", "--set", "speculation.draft_len=5")
    wrong = error_line(trtrun("plan", "--config", file, *deep))
    assert "has 4 Medusa heads, and each drafts one token: set speculation.draft_len to 4 or less, not 5" in wrong
    devices = error_line(trtrun("plan", "--config", file, "--set", "draft.devices=[cpu:3]"))
    assert "draft.devices: heads of method medusa sit on the target's devices" in devices
    mistaken = error_line(trtrun("plan", "--config", file, "--set", f"target.model={tmp_path / 'heads'}"))
    assert "target: " in mistaken and "it has heads, which only draft: name the model that they were tr" in mistaken
    (tmp_path / "heads" / "medusa_lm_head.safetensors").unlink()
    assert "the heads' weights were not looked at, for they are not here" in trtrun("plan", "--config", file).stdout
    assert "has no weights: neither medusa_lm_head.safetensors" in error_line(
        trtrun("run", "--config", file, "--prompt", "x")
    )


def test_a_head_with_a_store_is_planned(config: Configs, trtrun: Run, pair: Path, tmp_path: Path) -> None:
    """Its layers are cut as the target's, and which of the target's it reads is told, however its file says so."""
    head = make_head(pair / "target", boundaries=(0, 1, 2))
    draft = {"model": str(write_head(tmp_path / "head", head, "specforge", pair / "target"))}
    file = config(TWO_TARGETS, kv_cache={"max_tokens": 1000}, speculation=eagle3(), draft=draft)
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)
    vocab_size = len(head.embedding)
    known = f"{vocab_size} of {vocab_size} tokens, reading outputs of the target's layers -1, 0, 1"
    assert plan["heads"] == f"EAGLE-3 head of 1 layer and {known}"
    numbers = {name: value.numel() for name, value in head.tensors.items()}
    # Projections and the feed-forward layer by halves, matrices over the vocabulary, too; norms and fc are whole.
    whole = sum(count for name, count in numbers.items() if "norm" in name or name == "fc.weight")
    hidden = head.tensors["norm.weight"].shape[0]
    lines = -(-vocab_size // 2) * hidden
    halves = (sum(numbers.values()) - whole - numbers["lm_head.weight"]) // 2
    size = (whole + halves + lines) * {"float32": 4, "bfloat16": 2}[plan["target_dtype"]]
    assert [rank["draft_shard_bytes"] for rank in plan["ranks"]] == [0, size, size]
    layers = ("--set", "speculation.eagle3_layers_to_capture=[0, 1]")
    assert "2 layers are named, but fc.weight takes" in error_line(trtrun("plan", "--config", file, *layers))
    three = error_line(trtrun("plan", "--config", file, "--set", "target.devices=[cpu:1, cpu:2, cpu:3]"))
    assert "tensor parallelism over 3 devices" in three


def test_a_head_on_a_rank_of_its_own_is_planned_checked_and_run(
    config: Configs, trtrun: Run, pair: Path, tmp_path: Path
) -> None:
    """Whole, beside the target's embedding, and told over a link of its own what it reads."""
    head = make_head(pair / "target", boundaries=(0, 1, 2))
    path = write_head(tmp_path / "head", head, "specforge", pair / "target")
    draft = {"model": str(path), "devices": ["cpu:0"]}
    sections = {"kv_cache": {"max_tokens": 1000}, "speculation": eagle3(), "draft": draft}
    file = config({"target": ["cpu:1"]}, **sections)
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)
    assert [rank["role"] for rank in plan["ranks"]] == ["orchestrator", "draft", "target"]
    numbers = sum(value.numel() for value in head.tensors.values()) + head.embedding.numel()
    size = numbers * {"float32": 4, "bfloat16": 2}[plan["target_dtype"]]
    assert [rank["draft_shard_bytes"] for rank in plan["ranks"]] == [0, size, 0]
    assert plan["ranks"][1]["kv_tokens"] == plan["ranks"][2]["kv_tokens"] and plan["ranks"][1]["kv_bytes"] > 0
    assert ["verdict, hidden states", [2, 1]] in [[link["carries"], link["ranks"]] for link in plan["links"]]
    done = trtrun("check", "--config", file, "--json")
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["ok"]
    words = ("--prompt", "def main(", "--max-tokens", "12")
    plain = trtrun("run", "--config", config({"target": ["cpu:0"]}), "--speculation", "none", *words).stdout
    drafted = trtrun("run", "--config", file, *words).stdout
    assert plain == drafted != ""


def test_a_head_of_eagle_1_is_planned_checked_and_run(config: Configs, trtrun: Run, pair: Path, tmp_path: Path) -> None:
    """By its method's name. By EAGLE-3's it is refused with the right one, and as pickle with what converts it."""
    head = make_eagle_head(pair / "target", own_embedding=True)
    path = write_eagle_head(tmp_path / "head", head, "reference", pair / "target")
    sections = {"kv_cache": {"max_tokens": 1000}, "draft": {"model": str(path)}}
    file = config(TWO_TARGETS, speculation={"method": "eagle"}, **sections)
    plan = json.loads(trtrun("plan", "--config", file, "--json").stdout)
    vocab_size = len(head.embedding)
    known = f"{vocab_size} of {vocab_size} tokens, reading what leaves the target's final norm"
    assert plan["heads"] == f"EAGLE head of 1 layer and {known}"
    numbers = {name: value.numel() for name, value in head.tensors.items() if name != "lm_head.weight"}
    # Norms and fc are whole, all else is halves, of an even vocabulary.
    whole = sum(count for name, count in numbers.items() if "norm" in name or name.startswith("fc."))
    size = (whole + (sum(numbers.values()) - whole) // 2) * {"float32": 4, "bfloat16": 2}[plan["target_dtype"]]
    assert vocab_size % 2 == 0 and [rank["draft_shard_bytes"] for rank in plan["ranks"]] == [0, size, size]
    one = config({"target": ["cpu:0"]}, **sections)
    done = trtrun("check", "--config", one, "--json", "--speculation", "eagle")
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["ok"]
    words = ("--prompt", "def main(", "--max-tokens", "12")
    plain, drafted = (
        trtrun("run", "--config", one, "--speculation", method, *words).stdout for method in ("none", "eagle")
    )
    assert plain == drafted != ""
    wrong = error_line(trtrun("plan", "--config", one, "--speculation", "eagle3"))
    assert "it is a head of EAGLE-1 or EAGLE-2: set speculation.method to eagle" in wrong
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    for command in ("plan", "check"):
        line = error_line(trtrun(command, "--config", one, "--speculation", "eagle"))
        assert "torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')" in line


ON_TWO_HOSTS = {"target": {"node1": [0, 1]}, "draft": {"node2": [0]}}


def test_hosts_and_gpus_that_are_not_here_are_planned_all_the_same(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(ON_TWO_HOSTS), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert [(rank["host"], rank["device"], rank["role"]) for rank in plan["ranks"]] == [
        ("node1", "host", "orchestrator"),
        ("node2", "cuda:0", "draft"),
        ("node1", "cuda:0", "target"),
        ("node1", "cuda:1", "target"),
    ]
    assert {rank["free_bytes"] for rank in plan["ranks"][1:]} == {None}
    assert {rank["kv_tokens"] for rank in plan["ranks"][1:]} == {plan["kv_tokens"]} == {None}
    assert plan["ranks"][2]["target_shard_bytes"] > 0
    transports = {(link["carries"], *link["ranks"]): link["transport"] for link in plan["links"]}
    assert transports["target all_reduce", 2, 3] == "NCCL, one host"
    assert transports["draft tokens", 1, 2] == "NCCL over network"
    assert transports["plans and reports", 0, 1] == "MPI over network"
    assert transports["plans and reports", 0, 2] == "MPI, shared memory"
    assert any("free memory of node2, node1 is not known here" in note for note in plan["notes"])
    assert "node2" in plan["command"]
    start = plan["start"]
    assert start["kernels"] == "unknown" and all(rank["graphs"] > 0 for rank in start["ranks"])
    phases = {phase["name"]: phase for phase in start["phases"]}
    assert "the GPUs are on node1, node2" in phases["kernels"]["work"]
    assert phases["weights"]["seconds"] is None and start["seconds"][0] < start["seconds"][1]
    assert any("trtrun warm-up on the GPUs' hosts" in line for line in start["shorter"])
    shown = trtrun("plan", "--config", config(ON_TWO_HOSTS)).stdout
    assert "ready after about " in shown and "shorter: trtrun warm-up" in shown


def test_kv_tokens_of_other_hosts_follow_from_max_tokens(config: Configs, trtrun: Run) -> None:
    plan = json.loads(trtrun("plan", "--config", config(ON_TWO_HOSTS, kv_cache={"max_tokens": 1000}), "--json").stdout)
    assert plan["kv_tokens"] == 1008
    assert [rank["kv_tokens"] for rank in plan["ranks"]] == [0, 1008, 1008, 1008]
    assert plan["ranks"][1]["kv_bytes"] > 0


def test_gpus_that_this_host_lacks_are_a_warning_in_a_plan(config: Configs, trtrun: Run) -> None:
    file = config({"target": [96, 97], "draft": [96]})
    done = trtrun("plan", "--config", file, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning: cuda:96, cuda:97 are not on this host: it has none" in done.stdout
    assert trtrun("run", "--config", file, "--prompt", "x", env={"CUDA_VISIBLE_DEVICES": ""}).returncode == 2


def test_weights_that_are_not_here_are_told_in_a_plan(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    """As on a laptop, with no more than the config.json of the big model."""
    bare = make_checkpoint(tmp_path / "bare", num_hidden_layers=3)
    (bare / "model.safetensors").unlink()
    done = trtrun("plan", "--config", config(FOUR_RANKS, target={"model": str(bare)}), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (note,) = json.loads(done.stdout)["notes"]
    assert note.startswith(f"the target's weights were not looked at, for they are not here: {bare} has no weights")
    file = config(ON_TWO_HOSTS, target={"model": str(bare)})
    notes = json.loads(trtrun("plan", "--config", file, "--json").stdout)["notes"]
    assert any("the target's weights were not looked at" in note for note in notes)


def test_weights_that_are_wrong_here_are_a_warning_where_only_other_hosts_hold_them(
    config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", tokenizer=True)
    (model / "model.safetensors").write_bytes(b"")
    plan = json.loads(trtrun("plan", "--config", config(ON_TWO_HOSTS, target={"model": str(model)}), "--json").stdout)
    (note,) = (note for note in plan["notes"] if "truncated" in note)
    assert note.startswith("warning: target: ") and "node1 will look at their own" in note


COUNTED = {"target": {"nodes": 2, "gpus_per_node": 1}, "draft": {"nodes": 1, "gpus_per_node": 1}}


def test_counts_are_planned_on_made_up_hosts_outside_an_allocation(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(COUNTED))
    assert (done.returncode, done.stderr) == (0, "")
    assert "there is no allocation yet: node-1, node-2 stand for the hosts that it will have" in done.stdout
    assert "3 processes on 2 hosts" in done.stdout
    plan = json.loads(trtrun("plan", "--config", config(COUNTED), "--json").stdout)
    assert [(rank["host"], rank["device"]) for rank in plan["ranks"]] == [
        ("node-1", "host"), ("node-1", "cuda:0"), ("node-2", "cuda:0")
    ]  # fmt: skip
    # CPU slots may outnumber cores: this host has room for a node's.
    here = config({"target": {"nodes": 1, "cpus_per_node": 2}, "draft": {"nodes": 1, "cpus_per_node": 2}})
    plan = json.loads(trtrun("plan", "--config", here, "--json", "--set", "speculation.method=none").stdout)
    assert plan["hosts"] == [os.uname().nodename]


def test_counts_are_planned_on_the_hosts_of_an_allocation(config: Configs, trtrun: Run) -> None:
    allocation = {"SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "17"}
    plan = json.loads(trtrun("plan", "--config", config(COUNTED), "--json", env=allocation).stdout)
    assert plan["hosts"] == ["gpu7", "gpu8"]
    assert not [note for note in plan["notes"] if "no allocation" in note]


def test_a_batch_job_is_planned_with_its_script(config: Configs, trtrun: Run) -> None:
    done = trtrun("plan", "--config", config(COUNTED, launch={"slurm": {"partition": "main"}}), "--slurm")
    assert (done.returncode, done.stderr) == (0, "")
    script = done.stdout[done.stdout.index("#!/bin/bash") :]
    for part in ("#SBATCH --nodes=2", "#SBATCH --gres=gpu:1", "#SBATCH --partition=main", "launch.cli run", "TEXT"):
        assert part in script
    assert "node-2" in done.stdout[: done.stdout.index("#!/bin/bash")]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ({"nodes": 2, "gpu_per_node": 1}, "target.devices.gpu_per_node: unknown key (did you mean 'gpus_per_node'?)"),
        ({"nodes": 0, "gpus_per_node": 1}, "target.devices.nodes: must be a number of 1 or more, not 0"),
        ({"nodes": 2}, "write gpus_per_node or cpus_per_node beside nodes"),
    ],
)
def test_wrong_counts_are_told_once(config: Configs, trtrun: Run, devices: dict[str, int], said: str) -> None:
    file = config({**COUNTED, "target": devices})
    done = trtrun("plan", "--config", file)
    assert done.returncode == 2
    line = error_line(done)
    assert said in line
    assert line.count(str(file)) == 1


def test_the_plan_and_the_check_say_how_a_draft_is_translated(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", tokenizer=True, vocab_size=300)
    make_tokenizer(draft, merges=9, special=("<think>",))
    file = config(ONE_PROCESS, draft={"model": str(draft)})
    plan, check = (json.loads(trtrun(command, "--config", file, "--json").stdout) for command in ("plan", "check"))
    expected = {"vocabulary": "intersection", "common_tokens": 257, "target_tokens": 257, "draft_tokens": 267}
    assert plan["translation"] == check["translation"] == expected
    shown = trtrun("plan", "--config", file, "--set", "draft.vocabulary=text")
    assert (
        "the draft has another tokenizer (draft.vocabulary: text): drafts become tokens as text; 257 tokens meet, "
        "100% of the target's 257 and 96% of the draft's 267"
    ) in shown.stdout.splitlines()
    assert json.loads(trtrun("plan", "--config", config(ONE_PROCESS), "--json").stdout)["translation"] is None
