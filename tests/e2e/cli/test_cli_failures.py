"""Killed ranks, signals, broken pipes: what is said, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import (
    ROOT,
    THREE_RANKS,
    Configs,
    Run,
    command_environment,
    is_alive,
    parent_of,
    with_fault,
    write_rows,
)
from decaying_family import ARCHITECTURE, decaying_family, make_decaying_checkpoint
from drains import wait_until
from eagle3_heads import make_head, write_head
from forked_commands import ranks_below
from output_rows import read_rows, without_drafting
from pipelines import make_llm, noisy_copy, tokens_of
from ports import lets_in

from trtrun import SamplingParams

Start = Callable[..., "subprocess.Popen[str]"]
PLAIN = ("--speculation", "none")
HELPERS = ROOT / "tests" / "helpers"
NAMES = ["orchestrator rank 0 (host)", "draft rank 1 (cpu:0)", "target rank 2 (cpu:1)"]


def start_endless(
    config: Configs, start_trtrun: Start, forks_ranks: bool = True
) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A job of three ranks in the middle of a very long text, and its ranks' processes."""
    file = config(THREE_RANKS, kv_cache={"max_tokens": 60000})
    words = ("run", "--config", file, "--prompt", "def main(", "--max-tokens", 50000, "--ignore-eos")
    process = start_trtrun(*words, forks_ranks=forks_ranks)
    assert process.stdout is not None
    assert process.stdout.read(1), process.stderr and process.stderr.read()
    ranks = ranks_below(process.pid)
    assert sorted(ranks) == [0, 1, 2]
    return process, ranks


def listening_ports(process: int) -> list[int]:
    """Ports that a process listens on, of either protocol."""
    names = {os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in names:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_named_and_takes_the_job_along(config: Configs, start_trtrun: Start, rank: int) -> None:
    process, ranks = start_endless(config, start_trtrun)
    os.kill(ranks[rank], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    lines = errors.splitlines()
    assert process.returncode == 137
    assert len(lines) == 1, errors
    assert lines[0].startswith(f"trtrun: {NAMES[rank]} was killed by signal 9 (SIGKILL)")
    assert not any(is_alive(child) for child in ranks.values())


@pytest.mark.parametrize("has_head", [False, True])
def test_a_killed_draft_rank_costs_drafts_and_no_token(
    config: Configs, start_trtrun: Start, trtrun: Run, pair: Path, tmp_path: Path, has_head: bool
) -> None:
    """A draft model's, or that of a head, which the target sends hidden states to."""
    rows = [
        {"prompt": f"def f{place}(", "max_tokens": 20 + 5 * place, "temperature": place % 2, "seed": 1}
        for place in range(30)
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    outputs = (tmp_path / "undisturbed.jsonl", tmp_path / "killed.jsonl")
    file = config(THREE_RANKS)
    if has_head:
        head = make_head(pair / "target", boundaries=(0, 1, 2))
        path = write_head(tmp_path / "head", head, "specforge", pair / "target")
        section = {"model": str(path), "devices": ["cpu:0"]}
        file = config({"target": ["cpu:1"]}, draft=section, speculation={"method": "eagle3"})
    ahead = ("--set", "speculation.ahead=on")
    words = ("--prompts", prompts, "--ignore-eos", "--output")
    assert trtrun("run", "--config", config({"target": ["cpu:0"]}), *PLAIN, *words, outputs[0]).returncode == 0
    process = start_trtrun("run", "--config", file, *ahead, *words, outputs[1])
    working = outputs[1].with_name("killed.jsonl.partial")
    wait_until(lambda: working.exists() and working.stat().st_size > 0, process, "a finished row")
    os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (line,) = [line for line in errors.splitlines() if "lost" in line]
    assert f"{NAMES[1]} is lost" in line and line.endswith("the job goes on without drafts")
    undisturbed, killed = (without_drafting(read_rows(path)) for path in outputs)
    assert killed == undisturbed


@pytest.mark.parametrize("rank", [2])
def test_an_exception_on_a_rank_is_one_line_and_status_1(config: Configs, trtrun: Run, rank: int) -> None:
    file = config(THREE_RANKS, kv_cache={"max_tokens": 60000})
    words = ("run", "--config", file, "--prompt", "def main(", "--max-tokens", 50000, "--ignore-eos")
    done = trtrun(*words, env=with_fault(f"{rank} raise"))
    assert done.returncode == 1
    said = "failed: ZeroDivisionError: one of the defects of this world"
    assert done.stderr.splitlines() == [f"trtrun: {NAMES[rank]} {said}"]


def test_a_rank_that_stands_still_is_one_line_status_1_and_the_ranks_stacks(config: Configs, trtrun: Run) -> None:
    file = config(THREE_RANKS, kv_cache={"max_tokens": 60000}, launch={"heartbeat_seconds": 2})
    words = ("run", "--config", file, "--prompt", "def main(", "--max-tokens", 50000, "--ignore-eos")
    done = trtrun(*words, env=with_fault("2 endless"))
    assert done.returncode == 1
    line, stacks, *_ = done.stderr.splitlines()
    said = r"failed: stands still in round \d+ \(verifying\) for longer than 2 s"
    assert re.fullmatch(rf"trtrun: {re.escape(NAMES[2])} {said}", line), done.stderr
    assert stacks == f"--- main thread of {NAMES[2]}, innermost call last:"
    assert done.stderr.count("trtrun: ") == 1


def test_a_signal_to_the_command_ends_all_ranks(config: Configs, start_trtrun: Start) -> None:
    process, ranks = start_endless(config, start_trtrun)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.splitlines() == ["trtrun: ended by SIGINT; all ranks are stopped"]
    assert not any(is_alive(child) for child in ranks.values())


def test_strangers_do_not_reach_mpirun_and_killed_it_takes_the_ranks_along(
    config: Configs, start_trtrun: Start
) -> None:
    process, ranks = start_endless(config, start_trtrun, forks_ranks=False)
    launcher = parent_of(ranks[0])
    # Three bytes at a rank's port or at mpirun's would hold all of them up: ranks have none, mpirun's let nobody in.
    assert [listening_ports(rank) for rank in ranks.values()] == [[]] * 3
    assert (ports := listening_ports(launcher)) and not any(map(lets_in, ports))
    os.kill(launcher, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 137
    assert not any(is_alive(child) for child in ranks.values())


def test_a_reader_that_leaves_ends_the_job(config: Configs, start_trtrun: Start) -> None:
    process, ranks = start_endless(config, start_trtrun)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")
    assert not any(is_alive(child) for child in ranks.values())


def test_the_ranks_of_a_users_own_mpirun_end_with_it(config: Configs, tmp_path: Path) -> None:
    file = config(THREE_RANKS, kv_cache={"max_tokens": 60000})
    rows = [{"prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": 50000, "ignore_eos": True}]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    # A pipe with a name tells when the first row is done; the ranks' own output must not be what ends them.
    output = tmp_path / "rows"
    os.mkfifo(output)
    words = [str(Path(sys.executable).parent / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words += ["-n", "3", sys.executable, "-m", "launch.cli", "run", "--config", str(file)]
    words += ["--prompts", str(prompts), "--output", str(output)]
    with subprocess.Popen(words, env=command_environment(), cwd=ROOT) as process, open(output) as reader:
        assert json.loads(reader.readline())["index"] == 0
        watched = [os.pidfd_open(child) for child in ranks_below(process.pid).values()]
        assert len(watched) == 3
        process.kill()
        ended: set[int] = set()
        while len(ended) < 3:
            ready, _, _ = select.select([child for child in watched if child not in ended], [], [], 20)
            if not ready:
                for child in watched:
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                pytest.fail("a rank outlived its mpirun")
            ended.update(ready)
        for child in watched:
            os.close(child)


def test_a_killed_draft_rank_costs_no_token_where_layers_keep_states(
    start_trtrun: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family of another package, whose drafts were made ahead until then."""
    site = tmp_path / "site" / "decaying_package-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: decaying-package\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text(f"[trtrun_families]\n{ARCHITECTURE} = decaying_package\n")
    registers = "MODEL_FAMILIES.register(ARCHITECTURE)(FAMILY)"
    source = f"from decaying_family import ARCHITECTURE, FAMILY, MODEL_FAMILIES\n{registers}\n"
    (site.parent / "decaying_package.py").write_text(source)
    places = [str(site.parent), str(HELPERS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    texts = [[5, 6, place] for place in range(30)]
    kinds = [{"max_tokens": 20 + 5 * place, "temperature": float(place % 2), "seed": 1} for place in range(30)]
    rows = [{"prompt_token_ids": text, **kind} for text, kind in zip(texts, kinds, strict=True)]
    with decaying_family():
        target = make_decaying_checkpoint(tmp_path / "target")
        with make_llm(target, speculation={"method": "none"}) as llm:
            alone = tokens_of(llm.generate(texts, [SamplingParams(ignore_eos=True, **kind) for kind in kinds]))
    config = {
        "threads": 1,
        "target": {"model": str(target), "devices": ["cpu:1"]},
        "draft": {"model": str(noisy_copy(tmp_path / "draft", target, 0.03)), "devices": ["cpu:0"]},
        "speculation": {"method": "draft_target", "ahead": "on", "draft_len": 3, "pacing": "fixed"},
        "kv_cache": {"max_tokens": 2048},
        "scheduler": {"max_batch_size": 4},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    output = tmp_path / "killed.jsonl"
    process = start_trtrun(
        "run", "--config", tmp_path / "job.yaml", "--prompts", write_rows(tmp_path / "prompts.jsonl", rows),
        "--ignore-eos", "--output", output, words=[sys.executable, "-m", "launch.cli"],
    )  # fmt: skip
    working = output.with_name("killed.jsonl.partial")
    wait_until(lambda: working.exists() and working.stat().st_size > 0, process, "a finished row")
    os.kill(ranks_below(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"{NAMES[1]} is lost" in errors
    found = read_rows(output)
    assert [[tuple(row["token_ids"])] for row in found] == alone
    assert sum(row["num_accepted_draft_tokens"] for row in found) > 20
