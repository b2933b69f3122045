"""`trtrun check` through the real command: a good job, bad set-ups, broken links and ranks that are stuck.

Ranks misbehave by tests/e2e/cli/faults/sitecustomize.py, by signals, or because their host really differs (a mount
namespace of their own).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import (
    FOUR_RANKS,
    MPIRUN,
    ONE_PROCESS,
    THREE_RANKS,
    Configs,
    Run,
    command_words,
    error_line,
    forked_command_words,
    is_alive,
    with_fault,
)
from forked_commands import ranks_below
from medusa_heads import make_heads, write_heads

Start = Callable[..., "subprocess.Popen[str]"]
TWO_TARGETS = {"target": ["cpu:0", "cpu:1"]}
PLAIN = {"speculation": {"method": "none"}}


def own_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What trtrun said on stderr; a user's own mpirun adds boxes of its own.

    Open MPI's end in a zero byte, which stands before the next line where a box comes first (see output_filter.py).
    """
    return [line for line in done.stderr.replace("\0", "").splitlines() if line.startswith("trtrun: ")]


def test_four_good_ranks(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(FOUR_RANKS, kv_cache={"max_tokens": 1000}), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["problems"] == []
    assert report["world_size"] == 4
    assert set(report["versions"]) == {"trtrun", "Python", "torch", "mpi4py", "MPI library"}
    assert [(rank["rank"], rank["role"], rank["device"]) for rank in report["ranks"]] == [
        (0, "orchestrator", "host"), (1, "draft", "cpu:0"), (2, "target", "cpu:1"), (3, "target", "cpu:2")
    ]  # fmt: skip
    assert [rank["kv_tokens"] for rank in report["ranks"]] == [None, 1008, 1008, 1008]
    assert len({rank["process"] for rank in report["ranks"]}) == 4
    told = [rank["surroundings"] for rank in report["ranks"]]
    assert {item["started_by"] for item in told} == {"mpirun of Open MPI 5 (PRRTE)"} and "tcp" in told[3]["providers"]
    links = {(link["carries"], *link["ranks"]): link for link in report["links"]}
    assert set(links) == {
        ("plans and reports", 0, 1), ("plans and reports", 0, 2), ("plans and reports", 0, 3),
        ("heartbeat", 0, 1), ("heartbeat", 0, 2), ("heartbeat", 0, 3), ("target all_reduce", 2, 3),
        ("draft tokens", 1, 2), ("draft tokens", 1, 3), ("verdict", 2, 1), ("verdict", 2, 3),
    }  # fmt: skip
    for (carries, *_), link in links.items():
        assert link["transport"] == ("TCP, one host" if carries == "heartbeat" else "MPI, shared memory")
        assert (link["faults"], link["is_tried"]) == ([], True)
        assert (link["timing"] is None) == (carries == "heartbeat")
        assert carries == "heartbeat" or min(link["timing"].values()) > 0


def test_prompt_lookup_is_checked_without_a_draft_rank(config: Configs, trtrun: Run) -> None:
    file = config(FOUR_RANKS, kv_cache={"max_tokens": 1000}, draft={"model": "/nowhere"})
    done = trtrun("check", "--config", file, "--json", "--speculation", "ngram")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"] and [rank["role"] for rank in report["ranks"]] == ["orchestrator", "target", "target"]
    tried = {(link["carries"], *link["ranks"]) for link in report["links"] if link["is_tried"] and not link["faults"]}
    assert tried == {
        ("plans and reports", 0, 1), ("plans and reports", 0, 2), ("heartbeat", 0, 1), ("heartbeat", 0, 2),
        ("target all_reduce", 1, 2), ("verdict", 1, 2),
    }  # fmt: skip


def test_heads_are_checked_beside_the_target(config: Configs, trtrun: Run, pair: Path, tmp_path: Path) -> None:
    path = write_heads(tmp_path / "heads", make_heads(pair / "target"))
    devices = {"target": ["cpu:0"]}
    file = config(devices, kv_cache={"max_tokens": 1000}, speculation={"method": "medusa"}, draft={"model": str(path)})
    done = trtrun("check", "--config", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (with_heads,) = json.loads(done.stdout)["ranks"]
    done = trtrun("check", "--config", file, "--json", "--speculation", "none")
    (without,) = json.loads(done.stdout)["ranks"]
    assert with_heads["shard_bytes"] > without["shard_bytes"]
    (path / "medusa_lm_head.safetensors").rename(path / "medusa_lm_head.pt")
    done = trtrun("check", "--config", file)
    assert done.returncode == 2 and "heads: " in done.stderr and "save the heads as safetensors" in done.stderr


@pytest.fixture
def beyond(pair: Path, tmp_path: Path) -> dict[str, Any]:
    """Sections of a model whose largest round needs more memory than any machine has."""
    model = Path(shutil.copytree(pair / "target", tmp_path / "long"))
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**values, "max_position_embeddings": 2**24}), encoding="utf-8")
    return {
        "target": {"model": str(model)},
        "scheduler": {"max_batch_size": 4096, "max_num_tokens": 30000},
    }


def test_a_job_of_one_process_is_checked_without_mpi(config: Configs, trtrun: Run, beyond: dict[str, Any]) -> None:
    done = trtrun("check", "--config", config(ONE_PROCESS), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert set(report["versions"]) == {"trtrun", "Python", "torch"}
    assert {link["transport"] for link in report["links"]} == {"same process"}
    small = trtrun("check", "--config", config(ONE_PROCESS, **beyond))
    assert small.returncode == 2
    assert "the largest round needs " in error_line(small)


def test_forms_of_calls_and_thoughts_are_named(config: Configs, trtrun: Run, pair: Path, tmp_path: Path) -> None:
    """By the chat template; and a name that there is not is refused before a server has it."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(pair / "target", tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    template = "{{ tools }}<tool_call><arg_key></arg_key>\n<arg_value></arg_value></think>"
    (tokenizer / "chat_template.jinja").write_text(template, encoding="utf-8")
    done = trtrun("check", "--config", config(ONE_PROCESS, tokenizer=str(tokenizer)))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "chats: calls glm45, thoughts qwen3")
    wrong = trtrun("check", "--config", config(ONE_PROCESS, server={"tool_parser": "kimi_k3"}), "--json")
    assert wrong.returncode == 2
    assert "server.tool_parser: there is no 'kimi_k3' (did you mean 'kimi_k2'" in error_line(wrong)


def test_devices_too_small_are_told_for_every_rank(config: Configs, trtrun: Run, beyond: dict[str, Any]) -> None:
    done = trtrun("check", "--config", config(THREE_RANKS, **beyond), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], len(report["problems"])) == (2, False, 2)
    host = os.uname().nodename
    lines = done.stderr.splitlines()
    assert [line.partition(": the largest")[0] for line in lines] == [
        f"trtrun: draft rank 1 (cpu:0) on {host}",
        f"trtrun: target rank 2 (cpu:1) on {host}",
    ]
    assert all("are free beside the weights" in line for line in lines)


def test_a_world_of_the_wrong_size(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(FOUR_RANKS), words=[*MPIRUN, "-n", "3", *forked_command_words()])
    assert done.returncode == 2
    (line,) = own_lines(done)
    assert "the devices need 4 ranks (orchestrator rank 0 (host), draft rank 1 (cpu:0), target rank 2 " in line
    assert "but 3 were started; run: " in line
    assert " -n 4 " in line
    assert line.endswith("-m launch.cli check --config " + line.rpartition(" ")[2])


def hide(folder: Path, ranks: tuple[int, ...], script: Path, num_ranks: int) -> list[str]:
    """Words of mpirun whose ranks run the command, some of them in a mount namespace in which `folder` is empty."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, for mount namespaces")
    script.write_text(
        "#!/bin/bash\n"
        f'if [[ " {" ".join(str(rank) for rank in ranks)} " == *" $OMPI_COMM_WORLD_RANK "* ]]; then\n'
        f'    exec unshare -m bash -c \'mount -t tmpfs none "$0" && exec "$@"\' {folder} "$@"\n'
        "fi\n"
        'exec "$@"\n'
    )
    script.chmod(0o755)
    return [*MPIRUN, "-n", str(num_ranks), str(script), *command_words()]


def test_a_model_that_is_empty_on_one_host(pair: Path, config: Configs, trtrun: Run, tmp_path: Path) -> None:
    words = hide(pair / "target", (1, 2), tmp_path / "start.sh", 3)
    done = trtrun("run", "--prompt", "x", "--config", config(TWO_TARGETS, **PLAIN), words=words)
    assert done.returncode == 2
    host = os.uname().nodename
    why = f"on {host}: target: {pair}/target has no config.json; give a Hugging Face model directory"
    expected = [f"trtrun: target rank 1 (cpu:0) {why}", f"trtrun: target rank 2 (cpu:1) {why}"]
    assert own_lines(done) == expected, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("check",), ("run", "--prompt", "x")])
def test_a_model_directory_that_is_missing_on_one_host(
    pair: Path, config: Configs, trtrun: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    words = hide(pair, (1, 3), tmp_path / "start.sh", 4)
    file = config(FOUR_RANKS)
    done = trtrun(*command, "--config", file, words=words)
    assert done.returncode == 2
    host = os.uname().nodename
    assert own_lines(done) == [
        f"trtrun: {file}, on rank {rank} of host {host}: target.model: no such directory: {pair}/target"
        for rank in (1, 3)
    ], done.stderr


def test_another_version_on_one_rank(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(THREE_RANKS), env=with_fault("2 torch"))
    assert done.returncode == 2
    line = error_line(done)
    assert line.startswith("trtrun: torch is not the same everywhere: ")
    assert f"2.0.0 on rank 2 ({os.uname().nodename})" in line


def test_a_corrupted_message_is_told_with_its_link(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(FOUR_RANKS), env=with_fault("3 corrupt"))
    assert done.returncode == 1
    wrong = "message of 4096 bytes: its checksum is wrong: bytes were changed on the way (MPI, shared memory)"
    assert done.stderr.splitlines() == [
        f"trtrun: rank 3 to rank 1: {wrong}",
        f"trtrun: rank 3 to rank 2: {wrong}",
    ]
    shown = ("orchestrator", "cpu:2", "target all_reduce", "1→2", "0↔3", "right", "µs", "GB/s", "the same on all ranks")
    for part in (*shown, "4 ranks on 1 host: failed"):
        assert part in done.stdout


def test_a_wrong_sum_is_told_with_its_group(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(TWO_TARGETS, **PLAIN), "--json", env=with_fault("1 wrong-sum"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "trtrun: target all_reduce at rank 1: all_reduce of 64 bytes (float32): 1 of 16 elements are "
    )
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert [link["carries"] for link in report["links"] if link["faults"]] == ["target all_reduce"]


def test_a_run_over_a_broken_transport_ends_before_weights_load(config: Configs, trtrun: Run) -> None:
    done = trtrun("run", "--config", config(TWO_TARGETS, **PLAIN), "--prompt", "x", env=with_fault("2 wrong-sum"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "what came to rank 2 is wrong: target: all_reduce of 65536 bytes" in done.stderr


def test_a_rank_that_fails_ends_the_check_at_once(config: Configs, trtrun: Run) -> None:
    done = trtrun("check", "--config", config(TWO_TARGETS, **PLAIN), env=with_fault("2 no-group"))
    assert done.returncode == 1
    said = "step 'opening the communicators': RuntimeError: no way to the others"
    assert error_line(done) == f"trtrun: target rank 2 (cpu:1) failed: {said}"


def check_time(started: float, seconds: float) -> None:
    """It was the check's limit that ended it: its time, and as much again for a machine in use."""
    assert time.monotonic() - started < 2 * seconds


LATE = "trtrun: the check did not end within {} s (launch.check_seconds): "


@pytest.mark.parametrize(
    ("fault", "by_own_mpirun", "seconds", "said"),
    [
        (
            "1 stop",
            False,
            25,  # of which the step, that a busy machine reaches late, has some left
            rf"{re.escape('draft rank 1 (cpu:0)')}: in the step 'draft tokens, rank 1 to rank 2', silent for \d+ s; "
            rf"{re.escape('target rank 2 (cpu:1)')}: in the step 'draft tokens, rank 1 to rank 2'",
        ),
        (
            "2 sleep",
            True,
            15,
            rf"{re.escape('target rank 2 (cpu:1)')}: in the step 'reading the models' configurations'",
        ),
    ],
)
def test_a_rank_that_stops_in_the_middle_is_named_with_its_step(
    config: Configs, trtrun: Run, fault: str, by_own_mpirun: bool, seconds: int, said: str
) -> None:
    started = time.monotonic()
    file = config(THREE_RANKS, launch={"check_seconds": seconds})
    words = [*MPIRUN, "-n", "3", *forked_command_words()] if by_own_mpirun else None
    done = trtrun("check", "--config", file, env=with_fault(fault), words=words)
    assert (done.returncode, done.stdout) == (1, "")
    check_time(started, seconds)
    (line,) = own_lines(done)
    assert re.fullmatch(re.escape(LATE.format(seconds)) + said, line), line
    assert "--- main thread of " in done.stderr  # where each rank is that can answer


def test_the_short_check_before_a_run_names_a_rank_that_is_stuck(config: Configs, trtrun: Run) -> None:
    file = config(THREE_RANKS, launch={"check_seconds": 10})
    done = trtrun("run", "--config", file, "--prompt", "x", env=with_fault("2 sleep"))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = own_lines(done)
    assert line == f"{LATE.format(10)}target rank 2 (cpu:1): in the step 'reading the models' configurations'"


def test_a_rank_stopped_before_mpi_starts_is_named(config: Configs, start_trtrun: Start) -> None:
    started = time.monotonic()
    file = config(THREE_RANKS, launch={"check_seconds": 20})
    process = start_trtrun("check", "--config", file, forks_ranks=False)
    while 2 not in (ranks := ranks_below(process.pid)):
        assert process.poll() is None
        assert time.monotonic() - started < 60
        time.sleep(0.005)
    os.kill(ranks[2], signal.SIGSTOP)
    output, errors = process.communicate(timeout=90)
    done = subprocess.CompletedProcess([], process.returncode, output, errors)
    check_time(started, 20)
    assert (done.returncode, done.stdout) == (1, "")
    assert "target rank 2 (cpu:1)" in error_line(done)
    assert "rank 1" not in errors
    assert not any(is_alive(child) for child in ranks_below(process.pid).values())
    assert not is_alive(ranks[2])
