"""The batch script: what stands in it, what a shell makes of it, and settings that would go wrong later."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import make_checkpoint

from launch.batch.merge import part_path
from launch.commands.submit_arguments import make_job, merge_words, parse_inner
from launch.jobs.batch.job import Array, part_output
from launch.jobs.batch.resources import read_resources
from launch.jobs.slurm.script import parse_time, quote_directive, render_script
from launch.jobs.slurm.section import SlurmSection
from trtrun.errors import CheckpointError, ConfigError

HARMFUL = """a 'b' "c" $(touch bad) `touch bad` \\ ; touch bad & #x"""


def script_of(*words: str, slurm: dict[str, Any] | None = None, array: Array | None = None, **launch: Any) -> str:
    engines = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
    values = {**engines, "launch": {**launch, "slurm": slurm or {}}}
    Path("run.yaml").write_text(json.dumps(values), encoding="utf-8")
    path = Path("run.yaml")
    inner = parse_inner(words, path, ())
    resources = read_resources(path, inner.read(path, inner.overrides), SlurmSection, place_ranks=inner.place_ranks)
    return render_script(make_job(inner, resources, (), array))


def test_weights_that_the_job_would_refuse_are_refused_before_it_is_queued(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(Path("model"), tokenizer=True)
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 3}), encoding="utf-8")

    def submit(devices: object) -> str:
        values = {"target": {"model": "model", "devices": devices}, "speculation": {"method": "none"}}
        Path("run.yaml").write_text(json.dumps(values), encoding="utf-8")
        inner = parse_inner(run(), Path("run.yaml"), ())
        return render_script(make_job(inner, read_resources(Path("run.yaml"), values, SlurmSection), (), None))

    with pytest.raises(CheckpointError, match=r"target: .* has no tensor 'model\.layers\.2\.input_layernorm\.weight'"):
        submit({"nodes": 2, "cpus_per_node": 1})
    assert "#SBATCH --nodelist=node1,node2" in submit({"node1": ["cpu:0"], "node2": ["cpu:0"]})
    assert "trtrun: warning: target: " in capsys.readouterr().err
    (model / "model.safetensors").unlink()
    submit({"nodes": 2, "cpus_per_node": 1})
    assert "the target's weights were not looked at" in capsys.readouterr().err


def run(*options: str) -> tuple[str, ...]:
    return ("run", "--prompts", "p.jsonl", "--output", "o.jsonl", *options)


def words_in_shell(script: str, **environment: str) -> list[str]:
    """The words of the command, as bash takes them from the script's own lines."""
    lines = script.splitlines()
    start, end = lines.index("job=("), lines.index(")")
    text = "\n".join([*lines[start : end + 1], "printf '%s\\0' \"${job[@]}\""])
    done = subprocess.run(
        ["bash", "-c", text], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_everything_of_the_users_reaches_the_command_as_it_is(here: Path) -> None:
    words = words_in_shell(script_of(*run("--stop", HARMFUL, "--prompt", "--output")))
    given = ["--prompts", "p.jsonl", "--output", "o.jsonl", "--stop", HARMFUL, "--prompt", "--output"]
    assert words[1:] == ["-m", "launch.cli", "run", "--config", "run.yaml", *given, "--resume"]
    assert os.listdir(here).count("bad") == 0


def test_the_whole_script_is_a_script(here: Path) -> None:
    for slurm in ({}, {"requeue": True, "exclusive": True, "setup": ["module load cuda"]}):
        for script in (script_of(*run(), slurm=slurm), script_of("bench", "--rows", "1", slurm=slurm)):
            done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_the_settings_become_options_of_sbatch(here: Path) -> None:
    slurm = {
        "partition": "gpu", "account": "me", "qos": "high", "constraint": "a100&nvlink", "reservation": "r",
        "nodelist": "n[1-2]", "time": "2:00:00", "job_name": "it's mine", "cpus_per_task": 4, "memory": "64G",
        "gres": "gpu:a100:1", "exclusive": True, "output": "log-%j", "requeue": True, "extra": ["--mail-type=END"],
        "signal_seconds": 200,
    }  # fmt: skip
    script = script_of(*run(), slurm=slurm)
    assert [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")] == [
        '--job-name="it\'s mine"',
        f'--chdir="{here}"',
        "--output=log-%j",
        "--open-mode=append",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--reservation=r",
        "--constraint=a100&nvlink",
        "--time=2:00:00",
        "--nodes=1",
        "--nodelist=n[1-2]",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--mem=64G",
        "--gres=gpu:a100:1",
        "--exclusive",
        "--requeue",
        "--signal=B:USR1@200",
        "--mail-type=END",
    ]
    assert 'scontrol requeue "$SLURM_JOB_ID"' in script


def test_a_command_without_rows_is_neither_warned_nor_requeued(here: Path) -> None:
    script = script_of("bench", "--rows", "1", slurm={"requeue": True})
    assert "#SBATCH --no-requeue" in script
    assert "--signal" not in script
    assert "scontrol" not in script
    assert "--resume" not in script


def test_a_task_of_an_array_runs_its_part(here: Path) -> None:
    script = script_of(*run("--seed", "1"), array=Array(4, 2))
    assert "#SBATCH --array=1-4%2\n" in script
    assert "#SBATCH --output=trtrun-%A_%a.log\n" in script
    words = words_in_shell(script, SLURM_ARRAY_TASK_ID="3")
    part = ["--output", "o.part-3-of-4.jsonl", "--part", "3/4"]
    assert words[6:] == ["--prompts", "p.jsonl", "--seed", "1", *part, "--resume"]
    assert str(part_path("o.jsonl", 3, 4)) == "o.part-3-of-4.jsonl"


@pytest.mark.parametrize("name", ["o.jsonl", "o", "a.b.jsonl", "o.txt", "f/o.jsonl", "it's o.jsonl"])
def test_parts_are_named_as_merge_names_them(name: str) -> None:
    word = part_output(Path(name), 12)
    assert f"{word.before}7{word.after}" == str(part_path(name, 7, 12))
    assert shlex.split(word.spell("TASK").replace('"$TASK"', "7")) == [str(part_path(name, 7, 12))]


def test_merging_is_told_with_the_input_to_compare(here: Path) -> None:
    inner = parse_inner(run("--temperature", "0.5", "--resume"), Path("run.yaml"), ())
    assert merge_words(inner, Array(2)) == [
        "trtrun", "merge", "--prompts", "p.jsonl", "--temperature", "0.5", "--output", "o.jsonl",
        "o.part-1-of-2.jsonl", "o.part-2-of-2.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("gpu:a100:4", "gpu:a100:4"), ("a b", '"a b"'), ('say "x" \\', '"say \\"x\\" \\\\"'), ("#1", '"#1"'), ("", '""')],
)
def test_directives_are_quoted_as_sbatch_reads_them(text: str, quoted: str) -> None:
    assert quote_directive(text) == quoted


def test_a_folder_that_would_break_a_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot stand in a batch script"):
        quote_directive("a\ntouch bad")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("1:00:05", 3605), ("2-12", 216000), ("1-0:30", 88200), ("1-1:1:1", 90061),
        ("UNLIMITED", None), ("infinite", None),
    ],
)  # fmt: skip
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("words", "slurm", "launch", "said"),
    [
        (run(), {"time": "1"}, {}, "launch.slurm.time: with a limit of 1 the warning 120 s before the end"),
        (run(), {"time": "2"}, {}, "launch.slurm.time: with a limit of 2 the warning 120 s before the end"),
        (run(), {"time": "soon"}, {}, "launch.slurm.time: 'soon' is no time limit"),
        (
            run(),
            {"requeue": True, "signal_seconds": 35},
            {"drain_seconds": 30},
            "launch.slurm.signal_seconds: a warning of 35 s is too short for launch.drain_seconds (30)",
        ),
        (("run", "--prompt", "x"), {"requeue": True}, {}, "launch.slurm.requeue: only a run with --output"),
        (run(), {"extra": ["mail"]}, {}, "launch.slurm.extra: 'mail' is no option of sbatch"),
        (run(), {"output": "logs/%j"}, {}, "folder/logs does not exist, and Slurm does not make it"),
        (("run", "--prompts", "none.jsonl"), {}, {}, "cannot read the prompts file none.jsonl"),
        (("run", "--prompts", "p.jsonl", "--output", "no/o"), {}, {}, "no does not exist"),
    ],
)
def test_what_would_go_wrong_later_is_refused_now(
    here: Path, words: tuple[str, ...], slurm: dict[str, Any], launch: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        script_of(*words, slurm=slurm, **launch)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("words", "array", "said"),
    [
        ((), None, "name what the job runs"),
        (("rnu",), None, "'rnu' cannot be submitted (did you mean 'run'?)"),
        (("submit",), None, "'submit' cannot be submitted"),
        (run("--ouput", "x"), None, "No such option"),
        (run("--config", "b.yaml"), None, "give --config once, before the --"),
        (run("--config=b.yaml"), None, "give --config once, before the --"),
        (("run", "--output", "o.jsonl"), None, "nothing to do"),
        (("run", "--prompt", "x", "--resume"), None, "--resume needs --output"),
        (("bench",), Array(2), "--array splits the rows of `run`; bench has none"),
        (("run", "--prompts", "p.jsonl"), Array(2), "--array needs --output FILE.jsonl"),
        (run("--part", "1/2"), Array(2), "--array and --part exclude each other"),
        (run(), Array(6), "--array 6: the input has 5 rows"),
    ],
)
def test_the_commands_own_mistakes_are_told_before_submission(
    here: Path, words: tuple[str, ...], array: Array | None, said: str
) -> None:
    with pytest.raises((click.UsageError, ConfigError)) as raised:
        script_of(*words, array=array)
    message = raised.value.format_message() if isinstance(raised.value, click.UsageError) else str(raised.value)
    assert said in message


def test_rows_of_another_input_are_found_before_submission(here: Path) -> None:
    row = {"index": 0, "input_hash": "0" * 16, "error": None, "token_ids": [1], "text": "x"}
    Path("o.part-1-of-2.jsonl.partial").write_text(json.dumps(row) + "\n", encoding="utf-8")
    script_of(*run())
    with pytest.raises(ConfigError, match=r"o\.part-1-of-2\.jsonl\.partial"):
        script_of(*run(), array=Array(2))


def test_a_server_is_warned_before_its_time_limit_and_drains(here: Path) -> None:
    script = script_of("serve", "--http-port", "0", slurm={"time": "2:00:00", "requeue": True})
    assert "#SBATCH --signal=B:USR1@120\n" in script and "#SBATCH --no-requeue\n" in script
    assert "kill -s USR1" in script and '"server": true' in script
    assert words_in_shell(script)[-5:] == ["serve", "--config", "run.yaml", "--http-port", "0"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert words_in_shell(script_of("serve"))[-2:] == ["--uds", "auto"]
    assert words_in_shell(script_of("serve", "--set", "server.host=0.0.0.0"))[-1] == "server.host=0.0.0.0"
    with pytest.raises(ConfigError, match=r"too short for launch\.drain_seconds"):
        script_of("serve", slurm={"signal_seconds": 35})
    with pytest.raises(ConfigError, match=r"server\.http_port"):
        script_of("serve", "--http-port", "70000")
    with pytest.raises(ConfigError, match=r"scheduler\.max_waiting"):
        script_of("serve", "--set", "scheduler.max_waiting=3")
    with pytest.raises(click.UsageError, match="serve has none"):
        script_of("serve", array=Array(2))


def test_data_is_generated_like_a_run(here: Path) -> None:
    data = ("generate-data", "--prompts", "p.jsonl", "--output", "d.jsonl")
    script = script_of(*data)
    assert words_in_shell(script)[-5:] == ["--prompts", "p.jsonl", "--output", "d.jsonl", "--resume"]
    assert "#SBATCH --signal=B:USR1@120\n" in script
    with pytest.raises(click.UsageError, match="submit its --part"):
        script_of(*data, array=Array(2))


def test_a_drafter_is_trained_on_a_rank_a_device_and_gone_on_with(here: Path) -> None:
    row = {"prompt_token_ids": [1], "token_ids": [2, 3], "temperature": 0.0}
    Path("d.jsonl").write_text((json.dumps(row) + "\n") * 3, encoding="utf-8")
    train = ("train-drafter", "--data", "d.jsonl", "--output", "drafter", "--heldout-rows", "1")
    two = ("--set", 'target.devices=["cpu:0", "cpu:1"]')
    script = script_of(*train, *two)
    assert words_in_shell(script)[-1] == "--resume"
    ranks = [line for line in script.splitlines() if line.startswith("#   ")]
    assert ranks == ["#   training rank 0 (node-1 cpu:0)", "#   training rank 1 (node-1 cpu:1)"]
    assert "#SBATCH --ntasks-per-node=2\n" in script
    assert "#SBATCH --signal=B:USR1@120\n" in script and "#SBATCH --no-requeue\n" in script
    assert "scontrol requeue" not in script
    again = script_of(*train, slurm={"requeue": True})
    assert "#SBATCH --requeue\n" in again and "scontrol requeue" in again
    steps = here / "drafter" / "training" / "metrics.jsonl"
    assert json.loads(again.split("# trtrun-job: ")[1].splitlines()[0])["steps"] == str(steps)
    assert f"cat {shlex.quote(str(steps))}" in again
    without = ("--set", "draft=null")
    assert "#   training rank 0 " in script_of(*train, *without, "--method", "medusa")
    with pytest.raises(ConfigError, match="give a 'draft' section, or --from DIR"):
        script_of(*train, *without)
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read"):
        script_of(*train, "--data", "nothing.jsonl")
    with pytest.raises(ConfigError, match="--steps is -1"):
        script_of(*train, "--steps", "-1")
    with pytest.raises(click.UsageError, match="train-drafter has none"):
        script_of(*train, array=Array(2))


def test_a_job_without_a_yaml_file(here: Path) -> None:
    with pytest.raises(click.UsageError, match="name the devices on the job's node: --devices 0,1"):
        parse_inner(("serve", "asset:target"), None, ())
    inner = parse_inner(("serve", "asset:target", "--devices", "0,1"), None, ("speculation.draft_len=3",))
    resources = read_resources(inner.settled.path, inner.read(inner.settled.path, inner.overrides), SlurmSection)
    assert (resources.gpus, resources.config.draft_len) == (2, 3)
    words = words_in_shell(render_script(make_job(inner, resources, ("speculation.draft_len=3",), None)))
    assert "--config" not in words and words[-5:] == ["asset:target", "--devices", "0,1", "--uds", "auto"]
    changes = {words[index + 1] for index, word in enumerate(words) if word == "--set"}
    assert {"draft.devices=[0, 1]", "speculation.draft_len=3"} <= changes  # what was chosen here holds there
