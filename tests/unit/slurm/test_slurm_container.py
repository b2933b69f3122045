"""`launch.slurm.container`: what the batch script says to enter an image, by each runtime, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_slurm_script import HARMFUL, run, script_of, words_in_shell

from trtrun.errors import ConfigError

TWO_RANKS = ("--set", 'target.devices=["cpu:0", "cpu:1"]')
TWO_NODES = ("--set", "target.devices={nodes: 2, cpus_per_node: 1}")


def container(runtime: str = "apptainer", image: str = "docker://trtrun", **keys: Any) -> dict[str, Any]:
    return {"container": {"image": image, "runtime": runtime, **keys}}


def srun(**keys: Any) -> dict[str, Any]:
    return {"launcher": "srun", **container(**keys)}


def variables_in_shell(script: str) -> dict[str, str]:
    """What the script's lines before the command add to a job's environment."""
    lines = script.splitlines()
    text = "\n".join(
        [
            *lines[lines.index("# The host's own Python packages must not get into the image.") : lines.index("job=(")],
            "env -0",
        ]
    )
    given = {**os.environ, "PYTHONPATH": "/of/the/host", "SLURM_CPUS_ON_NODE": "7"}
    done = subprocess.run(["bash", "-c", text], env=given, capture_output=True, text=True, check=True)
    values = dict(item.split("=", 1) for item in done.stdout.split("\0")[:-1])
    return {name: value for name, value in values.items() if os.environ.get(name) != value}


def test_ranks_start_in_an_image_of_apptainer(here: Path) -> None:
    slurm = srun(binds=["/models", "/scratch/me:/scratch:ro"], env={"A": HARMFUL, "B": 1})
    words = words_in_shell(script_of(*run("--stop", HARMFUL, *TWO_RANKS), slurm=slurm))
    start = words.index("apptainer")
    assert words[:start] == [
        "srun", "--mpi=pmi2", "--nodes=1", "--ntasks=3", "--cpu-bind=none", "--kill-on-bad-exit=1", "--overcommit"
    ]  # fmt: skip
    assert words[start : words.index("run")] == [
        "apptainer", "exec", "--bind", str(here), "--bind", "/models", "--bind", "/scratch/me:/scratch:ro",
        "--pwd", str(here), "docker://trtrun", "python3", "-m", "mpi4py", "-m", "launch.cli",
    ]  # fmt: skip
    assert words[words.index("--stop") + 1] == HARMFUL
    added = variables_in_shell(script_of(*run(*TWO_RANKS), slurm=slurm))
    assert added.pop("APPTAINERENV_A") == HARMFUL
    assert {"PYTHONNOUSERSITE": "1", "APPTAINER_NO_EVAL": "1", "APPTAINERENV_B": "1"}.items() <= added.items()
    assert "PYTHONPATH" not in added
    assert os.listdir(here).count("bad") == 0


def test_gpus_and_other_nodes_are_those_of_srun(here: Path) -> None:
    script = script_of(*run(*TWO_NODES), slurm=srun(runtime="singularity"))
    assert "--distribution=arbitrary " in script and "--overcommit singularity exec --bind" in script
    words = words_in_shell(script_of(*run("--set", "target.devices=[0]", "--set", "draft.devices=[1]"), slurm=srun()))
    assert words[words.index("exec") + 1] == "--nv"


def test_ranks_start_in_an_image_of_pyxis_and_of_ce(here: Path) -> None:
    slurm = srun(runtime="pyxis", image="nvcr#trtrun:1", binds=["/models", "/a:/b:ro"], env={"A": HARMFUL, "B": "2"})
    script = script_of(*run(*TWO_RANKS), slurm=slurm)
    words = words_in_shell(script)
    assert words[: words.index("python3")][-4:] == [
        "--container-image=nvcr#trtrun:1",
        f"--container-mounts={here}:{here},/models:/models,/a:/b:ro",
        f"--container-workdir={here}",
        "--container-env=A,B",
    ]
    assert variables_in_shell(script).get("A") == HARMFUL
    words = words_in_shell(script_of(*run(*TWO_RANKS), slurm=srun(runtime="ce", image="trtrun")))
    assert words[: words.index("python3")][-2:] == ["--overcommit", "--environment=trtrun"]


def test_mpirun_and_single_processes_are_inside_as_one(here: Path) -> None:
    words = words_in_shell(script_of(*run(*TWO_RANKS), slurm=container()))
    assert words[:2] == ["apptainer", "exec"]
    assert words[words.index("python3") :][:4] == ["python3", "-m", "launch.cli", "run"]
    for launcher in ("mpirun", "srun"):  # one process is no rank
        script = script_of(*run(), slurm={"launcher": launcher, **container("pyxis")})
        words = words_in_shell(script)
        assert words[:4] == ["srun", "--mpi=none", "--nodes=1", "--ntasks=1"] and "mpi4py" not in words
        assert variables_in_shell(script)["SRUN_CPUS_PER_TASK"] == "7"


def test_files_that_the_command_names_elsewhere_are_bound_too(here: Path, tmp_path: Path) -> None:
    for name in ("prompts", "outputs"):
        (tmp_path / name).mkdir()
    (tmp_path / "prompts" / "q.jsonl").write_bytes(Path("p.jsonl").read_bytes())
    files = (
        "--prompts",
        "../prompts/q.jsonl",
        f"--output={tmp_path}/outputs/o.jsonl",
        "--stop",
        "x" * 5000,
        "--stop",
        "/usr/bin",
    )
    words = words_in_shell(script_of("run", *files, slurm=container()))
    bound = [words[place + 1] for place, word in enumerate(words) if word == "--bind"]
    assert bound == [str(here), f"{tmp_path}/prompts", f"{tmp_path}/outputs"]


def test_the_whole_script_is_a_script(here: Path) -> None:
    for runtime in ("apptainer", "pyxis", "ce"):
        script = script_of(*run(*TWO_RANKS), slurm=srun(runtime=runtime))
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"container": {}}, "launch.slurm.container.image: missing"),
        (container(image="a.sif"), "a.sif does not exist"),
        (container("pyxis", "./a.sqsh"), "a.sqsh does not exist"),
        (container("ce", "a.toml"), "a.toml does not exist"),
        (container("docker"), "launch.slurm.container.runtime: must be 'apptainer', 'singularity', 'pyxis' or 'ce'"),
        (container(bind=["/a"]), "launch.slurm.container.bind: unknown key (did you mean 'binds'?)"),
        (container(binds=["data"]), "launch.slurm.container.binds: 'data' must be /SOURCE"),
        (container(binds=["/a,/b"]), "without commas"),
        (container(binds=["/a:/b:rw"]), "/SOURCE:/TARGET:ro"),
        (container("ce", "x", binds=["/a"], env={"A": "1"}), "binds and env of the runtime ce stand in the EDF file"),
    ],
)
def test_what_a_runtime_would_refuse_is_refused_now(here: Path, slurm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        script_of(*run(), slurm=slurm)
    assert said in str(raised.value)


def test_combinations_that_cannot_work_are_refused_by_name(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot start ranks on the other nodes: set launch\.slurm\.launcher: srun"):
        script_of(*run(*TWO_NODES), slurm=container())
    with pytest.raises(ConfigError, match=r"srun cannot start the ranks of Open MPI 5"):
        script_of(*run(*TWO_RANKS), slurm=srun(), mpi="openmpi")
    assert "--mpi=pmix" in script_of(*run(*TWO_RANKS), slurm=srun(), mpi="openmpi4")


def test_a_folder_that_cannot_be_bound_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "a,b"
    folder.mkdir()
    (folder / "p.jsonl").write_bytes((here / "p.jsonl").read_bytes())
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="a comma or a colon in its name"):
        script_of(*run(), slurm=container())
    script_of(*run())
