"""`trtrun plan` and `trtrun check` of a job on two hosts: what is only wrong on one of them is told with its name.

The hosts are namespaces of this machine (network.py) that see the same files, but for one directory that is their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import two_hosts
from checkpoints import make_checkpoint
from hub_caches import COMMIT, OTHER_COMMIT, fill_cache
from network import Network
from two_hosts import PATIENCE

ONE_OF_SOUTH = {"south": ["cpu:0"]}
"""Where it is the same for any number of ranks: each takes seconds of a core to start."""

pytestmark = pytest.mark.timeout(400)


@dataclass
class Site:
    """Two hosts, models that both see, and the command on the first host."""

    network: Network
    pair: Path
    folder: Path

    @property
    def private(self) -> Path:
        """A directory that is another one on each host."""
        return self.network.folder / "private"

    def config(self, name: str, **sections: Any) -> Path:
        """Rank 0 and the draft on north, the target on south."""
        values: dict[str, Any] = {
            "target": {"model": str(self.pair / "target"), "devices": {"south": ["cpu:0", "cpu:1"]}},
            "draft": {"model": str(self.pair / "draft"), "devices": {"north": ["cpu:0"]}},
            "launch": {"ssh_arguments": self.network.ssh_arguments, "check_seconds": 100},
            "kv_cache": {"max_tokens": 1000},
            "threads": 1,
        }
        for key, section in sections.items():
            values[key] = {**values[key], **section}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return path

    def trtrun(self, *words: object, variables: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run the command on north, with variables such as "HF_HOME=/a" beside."""
        return self.network.trtrun(words, dict(variable.split("=") for variable in variables), PATIENCE)


@pytest.fixture(scope="module")
def site(shared_site: two_hosts.Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(shared_site.network, shared_site.pair, tmp_path_factory.mktemp("configs"))


def own_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("trtrun: ")]


def test_every_link_of_two_hosts_is_tried(site: Site) -> None:
    """Each host may have a model in its own place."""
    for host, name in (("south", "own"), ("north", "usual")):
        site.network[host].run("cp", "-r", str(site.pair / "target"), str(site.private / name), check=True)
    paths = {"south": str(site.private / "own"), "default": str(site.private / "usual")}
    file = site.config("good", target={"model": paths})
    done = site.trtrun("check", "--config", file, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [rank["host"] for rank in report["ranks"]] == ["north", "north", "south", "south"]
    assert [rank["kv_tokens"] for rank in report["ranks"]] == [None, 1008, 1008, 1008]
    plan = json.loads(site.trtrun("plan", "--config", file, "--json").stdout)
    assert [rank["host"] for rank in plan["ranks"]] == ["north", "north", "south", "south"]
    assert [rank["free_bytes"] is None for rank in plan["ranks"]] == [False, False, True, True]
    planned = {(link["carries"], *link["ranks"]): link["transport"] for link in plan["links"]}
    tried = {(link["carries"], *link["ranks"]): link["transport"] for link in report["links"]}
    assert planned == tried
    assert tried["draft tokens", 1, 2] == "MPI over network"
    assert tried["target all_reduce", 2, 3] == "MPI, shared memory"
    assert tried["heartbeat", 0, 3] == "TCP over network"
    assert all(link["faults"] == [] and link["is_tried"] for link in report["links"])
    links = file.with_name("links.json")
    links.write_text(done.stdout)
    done = site.trtrun("plan", "--config", file, "--hosts", "--links", links, "--json")
    assert done.returncode == 0, done.stderr
    layouts = json.loads(done.stdout)
    assert [speed["source"] for speed in layouts["assumed"][1].values() if speed] == ["measured (links.json)"] * 3
    # The target's sums were tried on its own host alone, drafts between hosts.
    assert layouts["assumed"][1]["network_sums"] is None and layouts["layouts"][0]["round_s"] > 0


def test_a_model_missing_on_one_host_is_told_for_its_ranks(site: Site) -> None:
    site.network["north"].run("cp", "-r", str(site.pair / "target"), str(site.private / "gone"), check=True)
    file = site.config("missing", target={"model": str(site.private / "gone")})
    done = site.trtrun("check", "--config", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert own_lines(done) == [
        f"trtrun: {file}, on rank {rank} of host south: target.model: no such directory: {site.private}/gone"
        for rank in (2, 3)
    ]


def test_another_model_on_one_host_is_told(site: Site) -> None:
    model = site.private / "other"
    for name, layers in (("north", 2), ("south", 3)):
        source = make_checkpoint(site.folder / f"model of {name}", tokenizer=True, num_hidden_layers=layers)
        site.network[name].run("cp", "-r", str(source), str(model), check=True)
        shutil.rmtree(source)
    file = site.config("other", target={"model": str(model), "devices": ONE_OF_SOUTH})
    done = site.trtrun("check", "--config", file)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = own_lines(done)
    assert line.startswith("trtrun: target: config.json or hf_quant_config.json is not the same everywhere: ")
    assert "on rank 0, 1 (north); " in line
    assert "on rank 2 (south): copy one model to all hosts" in line


def test_a_host_that_is_down_is_named(site: Site) -> None:
    file = site.config("down", target={"devices": {"nobody": ["cpu:0", "cpu:1"]}})
    done = site.trtrun("check", "--config", file)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = own_lines(done)
    assert "host nobody" in line


def test_each_host_has_a_cache_of_its_own(site: Site) -> None:
    file = site.config("named", target={"model": "org/target", "devices": ONE_OF_SOUTH})
    cache, variables = site.private / "hub", [f"HF_HUB_CACHE={site.private}/hub"]

    def fill(host: str, commit: str) -> None:
        made = site.folder / f"cache of {host}"
        fill_cache(made, "org/target", site.pair / "target", commit=commit)
        site.network[host].run("cp", "-a", str(made), str(cache), check=True)
        shutil.rmtree(made)

    fill("north", COMMIT)
    done = site.trtrun("check", "--config", file, variables=variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = own_lines(done)
    assert line.startswith(f"trtrun: {file}, on rank 2 of host south: target.model: no such directory: ")
    assert f"org/target is not in the Hugging Face cache {cache}, which does not exist: run" in line
    fill("south", OTHER_COMMIT)
    (line,) = own_lines(site.trtrun("check", "--config", file, variables=variables))
    assert f"org/target@{COMMIT} on rank 0, 1 (north); org/target@{OTHER_COMMIT} on rank 2 (south): name one" in line
    site.network["south"].run("rm", "-r", str(cache), check=True)
    fill("south", COMMIT)
    done = site.trtrun("check", "--config", file, "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
