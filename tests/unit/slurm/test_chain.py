"""Jobs that follow each other: what a job's script asks of stand-ins for Slurm's programs, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from launch.cli import cli
from launch.commands.submit_arguments import make_job, parse_inner
from launch.jobs.batch.resources import read_resources
from launch.jobs.slurm.client import FIELDS, SEPARATOR
from launch.jobs.slurm.script import render_script
from launch.jobs.slurm.section import SlurmSection
from launch.serve.handover.name_file import DoorAddress, NameFile, ServedName
from trtrun.errors import ConfigError

LIMITED = {"time": "2:00:00", "chain_lead_seconds": 600}


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stand-ins for Slurm's programs write their calls; sbatch submits job 13, squeue says what is in a file."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    calls = tmp_path / "calls"
    answers = {
        "sbatch": 'echo "${SLURM_JOB_ID-unset} $SLURM_CONF" >>calls; echo "13;main"',
        "squeue": 'case "$*" in *Comment*) cat comments ;; *--jobs=12*) cat job ;; *) cat next ;; esac',
        "scontrol": "cat record 2>/dev/null",
        "scancel": "",
    }
    for name, answer in answers.items():
        words = f'echo {name} "$@" >>{calls}\n' if name != "squeue" else ""
        (programs / name).write_text(f"#!/bin/bash\n{words}{answer}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return calls


def script_of(*words: str, slurm: dict[str, Any] = LIMITED, chain: int = 3, **sections: Any) -> str:
    engines = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
    path = Path("run.yaml")
    path.write_text(json.dumps({**engines, **sections, "launch": {"slurm": slurm}}), encoding="utf-8")
    inner = parse_inner(words, path, ())
    resources = read_resources(path, inner.read(path, inner.overrides), SlurmSection)
    return render_script(make_job(inner, resources, (), None, chain))


def play(script: str, command: str, *arguments: str) -> str:
    """What the script prints where this is what the job runs."""
    played = re.sub(r"(?ms)^job=\(.*?^\)", f"job=(bash -c '{command}')", script)
    Path("script").write_text(played, encoding="utf-8")
    slurm = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", "SLURM_CONF": "/etc/slurm.conf"}
    process = subprocess.Popen(
        ["bash", "script", *arguments], env={**os.environ, **slurm}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=60)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_each_job_submits_the_next_one_but_the_last(called: Path) -> None:
    script = script_of("serve")
    assert "--http-port 0" in script and "--name-file trtrun.server.json" in script
    assert "trtrun: job 13 follows, 600 s before the time limit\n" in play(script, "true")
    begin = "sbatch --parsable --begin=now+6600 --comment=trtrun: follows 12 script"
    assert called.read_text().splitlines()[:2] == [f"{begin} 2", "unset /etc/slurm.conf"]
    called.unlink()
    play(script, "true", "2")
    assert called.read_text().startswith(f"{begin} 3\n")
    called.unlink()
    assert "follows" not in play(script, "true", "3") and not called.exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ('trap "exit 0" USR1; kill -s TERM $PPID; while true; do true; done', ["scancel --state=PENDING 13"]),
        ('trap "exit 0" USR1; kill -s USR1 $PPID; while true; do true; done', []),
        ("exit 1", ["scontrol update JobId=13 StartTime=now"]),
        ("exit 2", ["scancel --state=PENDING 13"]),
    ],
)
def test_the_next_job_is_cancelled_with_this_one_and_begins_where_this_one_fails(
    called: Path, command: str, said: list[str]
) -> None:
    play(script_of("serve"), command)
    assert called.read_text().splitlines()[2:] == said


def test_a_node_that_may_not_submit_is_told(called: Path, tmp_path: Path) -> None:
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/bash\necho 'Access denied' >&2; exit 1\n", encoding="utf-8")
    said = play(script_of("serve"), "echo served")
    assert "Access denied" in said and "none follows" in said and "served\n" in said


def test_ports_and_names_that_are_given_stay(called: Path) -> None:
    script = script_of("serve", "--grpc-port", "7001", server={"http_port": 7000, "name_file": "shared/name"})
    assert "--name-file" not in script and "--http-port" not in script and "--metrics-port 0" in script
    assert script.count("--grpc-port") == 1 and f'"name_file": "{Path.cwd()}/shared/name"' in script


@pytest.mark.parametrize(
    ("words", "slurm", "said"),
    [
        (("serve",), {}, "launch.slurm.time: a chain needs to know when a job ends"),
        (("serve",), {"time": "30"}, "begin 1800 s before a time limit of 30"),
        (("serve",), {"time": "30", "chain_lead_seconds": 120}, "120 s before the time limit is too late"),
        (("serve",), {**LIMITED, "job_name": "a/b"}, "no file can be called as launch.slurm.job_name is"),
        (("bench", "--rows", "1"), LIMITED, "--chain is of servers: bench is none"),
    ],
)
def test_what_cannot_be_a_chain_is_refused(
    called: Path, words: tuple[str, ...], slurm: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, click.UsageError)) as raised:
        script_of(*words, slurm=slurm)
    assert said in (raised.value.format_message() if isinstance(raised.value, click.UsageError) else str(raised.value))


def test_a_chain_is_shown_and_cancelled_whole(called: Path, tmp_path: Path) -> None:
    def tell(file: str, number: str, state: str, reason: str) -> None:
        values = dict.fromkeys(FIELDS, "0") | {"JobID": number, "ArrayJobID": number, "ArrayTaskID": "N/A"}
        values |= {"State": state, "ReasonList": reason, "NodeList": "n1", "Name": "x", "STDOUT": "log", "WorkDir": "."}
        Path(file).write_text("".join(f"{values[name]}{SEPARATOR}" for name in FIELDS) + "\n", encoding="utf-8")

    tell("job", "12", "RUNNING", "n1")
    tell("next", "13", "PENDING", "(BeginTime)")
    Path("comments").write_text(f"{'12':<20}{'':<80}\n{'13':<20}{'trtrun: follows 12':<80}\n", encoding="utf-8")
    Path("record").write_text(script_of("serve"), encoding="utf-8")
    name = ServedName(url="http://n1:7000", host="n1", model="m", since="now", job="12")
    NameFile(tmp_path / "trtrun.server.json").take(name, DoorAddress(hosts=(), port=1, token="t"))
    shown = CliRunner().invoke(cli, ["status", "12"], catch_exceptions=False).stdout
    assert f"  name     {tmp_path}/trtrun.server.json says job 12, http://n1:7000\n" in shown
    assert "  next     job 13 is PENDING (BeginTime)\n" in shown
    called.unlink()
    done = CliRunner().invoke(cli, ["cancel", "12"], catch_exceptions=False)
    assert "trtrun: job 13 is ended" in done.stderr
    assert called.read_text().splitlines() == ["scancel 13", "scancel --batch --signal=TERM 12"]
