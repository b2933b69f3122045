"""`trtrun plan --hosts`: what a round sends over which link, by arithmetic by hand, and the layout that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from family_checkpoints import write_family

from launch.cli import cli
from launch.commands.inspect_job import plan
from launch.jobs.check.report import CheckReport, LinkReport, report_json
from launch.jobs.plan import round_traffic
from launch.jobs.plan.link_speeds import BETWEEN_HOSTS, IN_A_HOST, LinkSpeed, LinkSpeeds, read_check
from launch.jobs.plan.round_traffic import Group, forward_traffic
from parallel.probe import Timing
from parallel.transports.nccl import GATHERED_BYTES
from trtrun.errors import ConfigError

TWO_HOSTS = {
    "target": {"model": "asset:target", "devices": {"node1": [0], "node2": [0]}},
    "draft": {"model": "asset:draft", "devices": {"node1": [0]}},
    "speculation": {"draft_len": 4},
}
FAR = ("--latency-us", "10", "--gbit", "80")  # 10 GB/s
NETWORK, LOCAL = LinkSpeed(10e-6, 10e9, "far", 5e-6), LinkSpeed(2e-6, 100e9, "near")
SPEEDS = LinkSpeeds(NETWORK, LOCAL)


def run(tmp_path: Path, values: dict[str, Any], *options: str) -> Result:
    file = tmp_path / "job.json"  # YAML, too
    file.write_text(json.dumps(values))
    return CliRunner().invoke(cli, ["plan", "--config", str(file), "--hosts", *options], catch_exceptions=False)


def layouts(tmp_path: Path, values: dict[str, Any], *options: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    plan = json.loads(run(tmp_path, values, *options, "--json").stdout)
    return {cost["layout"]["name"]: cost for cost in plan["layouts"]}, plan


def test_the_shipped_pair_over_two_hosts(tmp_path: Path) -> None:
    """12 layers of 256 numbers, 4096 tokens, bfloat16: 5 tokens go through 25 sums of 2,560 bytes."""
    found, plan = layouts(tmp_path, TWO_HOSTS, *FAR)
    own = found["as configured"]
    sent = {item["what"]: (item["over"], item["times"], item["nbytes"]) for item in own["traffic"]}
    assert sent == {
        "target all_reduce": ("network", 25, 5 * 256 * 2),
        "target logits": ("network", 1, 5 * 2048 * 2),
        "verdict": ("network", 1, 6 * 8),
        "plans": ("network", 1, 18 * 8 + 3 * 8),
    }
    # NCCL's 6.6 µs, a latency of 10 µs and the bytes; plans are sent ahead on GPUs, and not waited for.
    assert own["sent_s"] == pytest.approx(27 * 16.6e-6 + (25 * 2560 + 20480 + 48) / 10e9)
    assert own["round_s"] == pytest.approx(own["reading_s"] + own["drafting_s"] + own["sent_s"])
    apart = found["target on node1, draft apart on node2"]
    sent = {item["what"]: (item["over"], item["nbytes"]) for item in apart["traffic"]}
    assert sent["draft tokens"] == ("network", 3 * 8 + (5 + 4) * 8)
    assert sent["verdict to the draft"] == ("network", 3 * 8 + 6 * 8)
    assert apart["sent_s"] == pytest.approx(20e-6 + (96 + 72) / 10e9)
    # One row's verdict is guessed 99 times of 100: then nothing waits for the draft.
    one_by_one = sum(apart[part] for part in ("reading_s", "drafting_s", "sent_s"))
    hit = max(apart["drafting_s"], apart["reading_s"] + apart["sent_s"])
    assert apart["round_s"] == pytest.approx(0.99 * hit + 0.01 * one_by_one)
    together = found["target and draft on node1"]
    assert together["traffic"] == [] and together["drafting_s"] == pytest.approx(apart["drafting_s"])
    assert plan["chosen"] == min(found, key=lambda name: found[name]["round_s"]) == "target and draft on node1"
    assert "the exchange takes 0.00 ms and 0.02 ms of these" in plan["reason"]


def test_slow_memory_and_a_fast_network_pay_for_more_hosts(tmp_path: Path) -> None:
    found, plan = layouts(tmp_path, TWO_HOSTS, "--latency-us", "0.1", "--gbit", "800", "--memory-gbs", "2")
    assert plan["chosen"] == "target and draft over all hosts"
    half, whole = found["as configured"]["reading_s"], found["target and draft on node1"]["reading_s"]
    assert half == pytest.approx(whole / 2, rel=0.01)
    shown = run(tmp_path, TWO_HOSTS, "--memory-gbs", "2").stdout
    assert "chosen: target and draft over all hosts: " in shown and "InfiniBand HDR" in shown


def test_what_has_no_room_is_not_chosen(tmp_path: Path) -> None:
    found, plan = layouts(tmp_path, TWO_HOSTS, *FAR, "--gpu-gib", "0.019", "--set", "kv_cache.max_tokens=64")
    assert {name: cost["fits"] for name, cost in found.items()}["target and draft on node1"] is False
    assert found[plan["chosen"]]["fits"] is True


def test_sums_of_large_tensors_travel_in_slices() -> None:
    assert round_traffic.GATHERED_BYTES == GATHERED_BYTES
    group = Group("target", hosts=(4, 4), hidden=1024, vocab=8000, itemsize=2, sums=3)
    small, logits = forward_traffic(group, 8, 8, 1, SPEEDS)
    assert (small.over, small.times, small.nbytes) == ("network", 3, 4 * 8 * 1024 * 2)
    assert small.seconds == pytest.approx(3 * (15e-6 + 4 * 16384 / 10e9))
    assert logits.nbytes == 4 * 8 * 1000 * 2
    large, _ = forward_traffic(group, 1024, 8, 1, SPEEDS)
    # Two exchanges; each host gets half of what the four ranks of the other have, twice.
    assert large.nbytes == 2 * 4 * (1024 * 1024 * 2) // 2
    assert large.seconds == pytest.approx(3 * (5e-6 + 20e-6 + large.nbytes / 10e9))
    on_one = Group("target", hosts=(4,), hidden=1024, vocab=8000, itemsize=2, sums=3)
    inside, _ = forward_traffic(on_one, 8, 8, 1, SPEEDS)
    assert (inside.over, inside.nbytes) == ("host", 3 * 16384)
    assert inside.seconds == pytest.approx(3 * (2e-6 + 3 * 16384 / 100e9))


def test_experts_that_lie_whole_send_what_they_made() -> None:
    """Of 8 tokens with 4 experts each, hidden states of 1,024 numbers; two hosts of 4 ranks."""
    state = 8 * 1024 * 2
    on_gpus = Group("target", (4, 4), 1024, 8000, 2, sums=1, chosen=(4, 4))
    experts = {item.what: item for item in forward_traffic(on_gpus, 8, 8, 1, SPEEDS)}["target experts"]
    assert (experts.times, experts.nbytes) == (2, 4 * 4 * state // 2 + 4 * state // 8)
    assert experts.seconds == pytest.approx(2 * (2 * 15e-6 + experts.nbytes / 10e9))
    on_cpus = Group("target", (4, 4), 1024, 8000, 2, sums=1, chosen=(4,), on_gpus=False)
    experts = {item.what: item for item in forward_traffic(on_cpus, 8, 8, 1, SPEEDS)}["target experts"]
    assert experts.nbytes == 4 * (4 * state // 8) // 2 + 4 * state // 8
    assert experts.seconds == pytest.approx(2 * 10e-6 + experts.nbytes / 10e9)


def test_experts_are_planned_by_both_cuts(tmp_path: Path) -> None:
    path = write_family(tmp_path / "experts", "mixtral")
    values: dict[str, Any] = {"target": {"model": str(path), "devices": {"a": ["cpu:0"], "b": ["cpu:0"]}}}
    found, _ = layouts(tmp_path, {**values, "speculation": {"method": "none"}}, *FAR)
    by_features = found["as configured, experts cut by features"]
    by_experts = found["as configured, experts cut by experts"]
    counts = [{item["what"]: item["times"] for item in cost["traffic"]} for cost in (by_features, by_experts)]
    layers = counts[1]["target experts"]
    assert counts[0]["target all_reduce"] == 1 + 2 * layers and counts[1]["target all_reduce"] == 1 + layers
    # A token reads 2 of 5 experts, so less than a rank holds.
    assert by_features["reading_s"] < by_features["weight_bytes"] / 40e9


def test_what_a_check_measured_is_taken(tmp_path: Path) -> None:
    links = (
        LinkReport("plans and reports", (0, 1), "MPI over network", (), Timing(90e-6, 1e8)),
        LinkReport("target all_reduce", (1, 2), "NCCL over network", (), Timing(30e-6, 5e9)),
        LinkReport("verdict", (1, 2), "NCCL over network", (), Timing(12e-6, 9e9)),
        LinkReport("draft tokens", (3, 1), "NCCL, one host", (), Timing(4e-6, 8e10)),
        LinkReport("draft tokens", (3, 2), "NCCL, one host", (), Timing(5e-6, 9e10)),
        LinkReport("heartbeat", (0, 1), "TCP over network", (), None),
    )
    file = tmp_path / "links.json"
    file.write_text(report_json(CheckReport((), (), (), links, 1.0)))
    speeds = read_check(file, SPEEDS)
    assert (speeds.network.latency_s, speeds.network.bytes_per_s) == (12e-6, 9e9)
    assert (speeds.local.latency_s, speeds.local.bytes_per_s) == (5e-6, 8e10), "the slowest stands for all"
    found, plan = layouts(tmp_path, TWO_HOSTS, "--links", str(file))
    sums = next(item for item in found["as configured"]["traffic"] if item["what"] == "target all_reduce")
    assert sums["seconds"] == pytest.approx(25 * (30e-6 + 2560 / 5e9))
    assert plan["assumed"][1]["network"]["source"] == "measured (links.json)"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not what trtrun check --json prints"):
        read_check(file, SPEEDS)


def test_one_host_and_options_without_their_flag_are_refused(tmp_path: Path) -> None:
    one = {**TWO_HOSTS, "target": {"model": "asset:target", "devices": {"node1": [0]}}}
    with pytest.raises(ConfigError, match="the devices are on one host"):
        run(tmp_path, one)
    choices = {option.name: option.type.choices for option in plan.params if isinstance(option.type, click.Choice)}
    assert {*choices["link"]} == {*BETWEEN_HOSTS} and {*choices["within"]} == {*IN_A_HOST}
    file = tmp_path / "job.json"
    done = CliRunner().invoke(cli, ["plan", "--config", str(file), "--rows", "4"])
    assert done.exit_code == 2 and "--rows goes with --hosts" in done.output
    done = CliRunner().invoke(cli, ["plan", "--config", str(file), "--slurm", "--pbs"])
    assert done.exit_code == 2 and "--slurm and --pbs exclude each other" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu-gib", "inf"), "inf is no finite number"),
        (("--latency-us", "nan"), "nan is no finite number"),
        (("--gbit", "-1"), "-1.0 is not in the range"),
        (("--rows", "100000000"), "100000000 is not in the range"),
    ],
)
def test_numbers_that_no_host_has_are_refused(tmp_path: Path, words: tuple[str, str], said: str) -> None:
    done = CliRunner().invoke(cli, ["plan", "--config", str(tmp_path / "job.yaml"), "--hosts", *words])
    assert done.exit_code == 2 and said in done.output
