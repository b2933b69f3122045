"""The batch script for PBS: what stands in it, what a shell makes of it, and settings that would go wrong later."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from launch.cli import cli
from launch.commands.submit_arguments import make_job, parse_inner
from launch.jobs.batch.job import Array
from launch.jobs.batch.resources import read_resources
from launch.jobs.pbs.script import render_script
from launch.jobs.pbs.section import PbsSection
from trtrun.errors import ConfigError

PAIR = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
TWO_NODES = {
    "target": {"model": "asset:target", "devices": {"nodes": 2, "gpus_per_node": 4}},
    "draft": {"model": "asset:draft", "devices": {"nodes": 1, "gpus_per_node": 1}},
}
RUN = ("run", "--prompts", "p.jsonl", "--output", "o.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a prompts file of five rows."""
    folder = tmp_path / "it's a $(touch bad) folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("p.jsonl").write_text('{"prompt": "p"}\n' * 5, encoding="utf-8")
    return folder


def script_of(
    *words: str, pbs: dict[str, Any] | None = None, array: Array | None = None, engines: Any = PAIR, **launch: Any
) -> str:
    path = Path("run.yaml")
    path.write_text(json.dumps({**engines, "launch": {**launch, "pbs": pbs or {}}}), encoding="utf-8")
    inner = parse_inner(words, path, ())
    resources = read_resources(path, inner.read(path, ()), PbsSection, {}, inner.place_ranks)
    return render_script(make_job(inner, resources, (), array))


def directives(script: str) -> list[str]:
    return [line.removeprefix("#PBS ") for line in script.splitlines() if line.startswith("#PBS ")]


def test_the_settings_become_options_of_qsub(here: Path) -> None:
    pbs = {
        "queue": "prod", "account": "me", "project": "p1", "walltime": "2:00:00", "filesystems": "home:eagle",
        "job_name": "mine", "cpus_per_task": 4, "memory": "64gb", "resources": ["system=polaris"], "output": "a log",
        "requeue": True, "extra": ["-m e"],
    }  # fmt: skip
    *given, record, extra = directives(script_of(*RUN, pbs=pbs))
    assert given == [
        "-N mine", "-q prod", "-A me", "-P p1", "-j oe", "-k doe", f"-o {shlex.quote(f'{here}/a log')}",
        "-l select=1:ncpus=4:mpiprocs=1:mem=64gb:system=polaris", "-l place=scatter", "-l walltime=2:00:00",
        "-l filesystems=home:eagle", "-r y",
    ]  # fmt: skip
    assert extra == "-m e"
    assert json.loads(unquote(record.removeprefix("-v TRTRUN_JOB="))) == {
        "output": str(here / "o.jsonl"), "rows": 5, "parts": None,
    }  # fmt: skip


def test_nodes_ranks_and_gpus_are_asked_for_chunk_by_chunk() -> None:
    counted = directives(script_of("check", engines=TWO_NODES, pbs={"resources": ["ngpus=5"]}))
    assert "-l select=2:ncpus=12:mpiprocs=6:ngpus=5" in counted
    named = {name: {"model": f"asset:{name}", "devices": {"n2": ["cpu:0"], "n1": ["cpu:0"]}} for name in PAIR}
    chunks = directives(script_of("check", engines=named, pbs={"place": "scatter:excl"}))
    assert "-l select=1:ncpus=2:mpiprocs=2:host=n1+1:ncpus=2:mpiprocs=2:host=n2" in chunks
    four = {name: {"model": f"asset:{name}", "devices": [0, 3]} for name in PAIR}
    assert "-l select=1:ncpus=6:mpiprocs=3:ngpus=4" in directives(script_of("check", engines=four))
    with pytest.raises(ConfigError, match=r"launch\.pbs\.resources: 'gpus=2' asks for 2 GPUs a node, but the devices"):
        script_of("check", engines=four, pbs={"gpu_resource": "gpus", "resources": ["gpus=2"]})


def pals_words(script: str) -> str:
    """What bash makes of the command."""
    start, end = script.index("job=("), script.index("\n)\n")
    text = f'nodes=(x1 x2 x3); {script[start:end]})\necho "${{job[@]}}"'
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("nodes", "placed"),
    [(2, "-n 9 --ppn 5 --hosts x1,x2 "), (3, "-n 13 --ppn 1 --hosts x1,x1,x1,x1,x1,x2,x2,x2,x2,x3,")],
)
def test_pals_starts_ranks_node_by_node(nodes: int, placed: str) -> None:
    """Its mpiexec takes hosts and a number for all of them, and fills one after the other."""
    target = {"model": "asset:target", "devices": {"nodes": nodes, "gpus_per_node": 4}}
    pbs = {"launcher": "pals", "launcher_arguments": ["--no-vni"]}
    script = script_of("check", engines={**TWO_NODES, "target": target}, pbs=pbs)
    words = pals_words(script)
    assert words.startswith(f"mpiexec --no-transfer --line-buffer --cpu-bind none --no-vni {placed}")
    assert words.endswith(" -m mpi4py -m launch.cli check --config run.yaml\n")
    assert "pbs_tmrsh" not in script and "pbs_tmrsh" in script_of("check", engines=TWO_NODES)


def test_a_task_of_an_array_runs_its_part() -> None:
    script = script_of(*RUN, array=Array(4, 2))
    assert "-J 1-4%2" in directives(script)
    assert not [line for line in directives(script) if line.startswith("-r")]  # qsub refuses it in an array
    assert 'o.part-"$PBS_ARRAY_INDEX"-of-4.jsonl' in script


STUB = """\
#!/bin/bash
trap 'count=$((count + 1)); echo heard; (( count < SIGNALS )) || exit 3' USR1
trap 'echo terminated; exit 3' TERM
echo row >>"o.jsonl.partial"
echo begun
while :; do /bin/sleep 0.02; done
"""
"""In place of the command: it drains as trtrun does, behind so many signals."""


def play(script: str, folder: Path, signals: str) -> str:
    """What a script says that is sent signals once its command has begun; the timer has all the time of the world."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in {
        "stub": STUB, "sleep": "#!/bin/sh\nexec tail -f /dev/null", "nodes": "n1\nn1\nn2\n",
        "qsub": '#!/bin/sh\necho "qsub $* start $TRTRUN_START, $(wc -c) bytes" >&2; echo 13.l\n',
    }.items():  # fmt: skip
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    start, end = script.index("job=("), script.index("\n)\n")
    (programs / "script").write_text(f"{script[:start]}job=(stub{script[end:]}", encoding="utf-8")
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PBS_O_PATH": "", "PBS_JOBID": "12.l",
        "PBS_NODEFILE": str(programs / "nodes"), "TRTRUN_JOB": "%7B%7D", "SIGNALS": str(len(signals.split())),
    }  # fmt: skip
    job = subprocess.Popen(
        ["bash", programs / "script"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return _follow(job, script, signals)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _follow(job: subprocess.Popen[str], script: str, signals: str) -> str:
    """What it says to its end, while it gets signals."""
    output, said = job.stdout, ""
    assert output is not None

    def read_to(word: str) -> str:
        lines = [""]
        while word not in lines[-1]:
            lines.append(output.readline())
            assert lines[-1], said + "".join(lines)
        return "".join(lines)

    said += read_to("begun")
    for name in signals.split():
        job.send_signal(signal.Signals[f"SIG{name}"])
        said += read_to("heard" if "heard" in script else "terminated")
    said += output.read()
    assert job.wait() == 3, said
    return said


def test_the_timer_drains_the_job_and_submits_the_next_and_a_users_signal_does_not(here: Path) -> None:
    script = script_of(*RUN, pbs={"walltime": "1:00:00", "requeue": True})
    assert "    sleep 3480 & wait" in script
    warned = play(script, here, "USR1")
    assert "job 12 on n1,n2, start 1\n" in warned
    assert "qsub -v TRTRUN_JOB,TRTRUN_START=2 start" in warned
    assert warned.endswith(
        "trtrun: job 13 goes on, with the rows that are left\ntrtrun: job 12 ends with exit status 3\n"
    )
    for signals in ("URG", "URG USR1"):
        assert "goes on" not in play(script, here, signals)
    assert "bad" not in os.listdir(here)


def test_a_command_that_cannot_drain_is_ended(here: Path) -> None:
    assert "terminated\ntrtrun: job 12 ends with exit status 3\n" in play(
        script_of("bench", "--rows", "1"), here, "URG"
    )


@pytest.mark.parametrize(
    ("pbs", "array", "said"),
    [
        ({"walltime": "90"}, None, "launch.pbs.walltime: '90' is no walltime"),
        ({"walltime": 90}, None, "launch.pbs.walltime: 90 is no walltime"),
        (
            {"walltime": "0:02:00"},
            None,
            "launch.pbs.walltime: with a limit of 0:02:00 the warning 120 s before the end",
        ),
        ({"requeue": True}, None, "launch.pbs.requeue: needs launch.pbs.walltime"),
        (
            {"requeue": True, "walltime": "1:00:00", "signal_seconds": 35},
            None,
            "too short for launch.drain_seconds (30)",
        ),
        ({"requeue": True, "walltime": "1:00:00"}, Array(2), "an array does not go on by itself"),
        ({}, Array(1), "PBS has no arrays of one job"),
        ({"output": "log"}, Array(2), "put ^array_index^ into its name"),
        ({"output": "none/log"}, None, "none does not exist"),
        ({"job_name": "a b"}, None, "launch.pbs.job_name: 'a b' is no name of a job of PBS"),
        ({"resources": ["a"]}, None, "launch.pbs.resources: 'a' is no resource of a node"),
        ({"memory": "64 GB"}, None, "launch.pbs.memory: '64 GB' is no size: write such as 64gb"),
        ({"extra": ["mail"]}, None, "launch.pbs.extra: 'mail' is no option of qsub"),
        ({"quue": "x"}, None, "launch.pbs.quue: unknown key (did you mean 'queue'?)"),
    ],
)
def test_what_would_go_wrong_later_is_refused_now(pbs: dict[str, Any], array: Array | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        script_of(*RUN, pbs=pbs, array=array)
    assert said in str(raised.value)


def test_options_of_submit_are_those_of_the_batch_system() -> None:
    script_of(*RUN)
    words = ["submit", "--scheduler", "pbs", "--config", "run.yaml", "--dry-run"]
    words += ["--partition", "q", "--time", "1:00:00"]
    shown = CliRunner().invoke(cli, [*words, "--", *RUN], catch_exceptions=False)
    assert {"-q q", "-l walltime=1:00:00"} <= set(directives(shown.output))
    refused = CliRunner().invoke(cli, [*words, "--gres", "gpu:1", "--", *RUN])
    assert "--gres is for Slurm" in str(refused.output) + str(refused.exception)


def test_every_command_refuses_wrong_keys() -> None:
    script_of(*RUN)
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace('"pbs": {}', '"pbs": {"quue": 1}'))
    batch = f"submit --scheduler slurm --dry-run -- {' '.join(RUN)}"
    for line in ("plan", "plan --pbs", "plan --slurm", "run --prompt x", "serve --print-config", batch):
        name, *words = line.split()
        with pytest.raises(ConfigError, match=r"launch\.pbs\.quue: unknown key"):
            CliRunner().invoke(cli, [name, "--config", "run.yaml", *words], catch_exceptions=False)


def test_a_plan_is_of_the_job_as_it_will_be() -> None:
    """A node more is the draft's own."""
    target = {"model": "asset:target", "devices": {"nodes": 2, "gpus_per_node": 2}}
    script_of("check", engines={**TWO_NODES, "target": target}, pbs={"nodes": 3})
    planned = [
        CliRunner().invoke(cli, ["plan", *option, "--config", "run.yaml", "--json"], catch_exceptions=False).output
        for option in ((), ("--pbs",))
    ]
    ranks, ranks_of_pbs = (json.loads(text)["ranks"] for text in planned)
    assert ranks == ranks_of_pbs and "node-3" in {rank["host"] for rank in ranks}
