"""The `launch` section of the YAML file: what it takes, and what each refusal says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launch.cli import cli
from launch.commands.schedulers import check_batch_sections
from launch.exit_codes import MEANINGS
from launch.jobs.slurm.section import SlurmSection
from trtrun.configuration.config import RuntimeConfig, load_config, make_config
from trtrun.configuration.engine_sections import check_section
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import ConfigError


def configured(folder: Path, launch: object, devices: object = ("cpu:0",)) -> RuntimeConfig:
    values: dict[str, Any] = {
        "target": {"model": str(folder), "devices": devices},
        "speculation": {"method": "none"},
        "launch": launch,
    }
    check_batch_sections(values, "run.yaml")
    return make_config(values, where="run.yaml")


def test_all_keys_have_defaults(tmp_path: Path) -> None:
    assert configured(tmp_path, {}).launch == LaunchSection()
    assert check_section(SlurmSection, configured(tmp_path, {"slurm": {}}).launch.slurm, "run.yaml") == SlurmSection()


def test_a_whole_section(tmp_path: Path) -> None:
    launch = configured(
        tmp_path,
        {
            "mpi": "mpich",
            "mpirun_arguments": ["--verbose"],
            "ssh_arguments": ["-F", "cluster.conf"],
            "environment": {"NCCL_IB_HCA": "mlx5", "NCCL_P2P_DISABLE": 1, "SCALE": 0.5},
            "orchestrator_host": "node2",
            "heartbeat_seconds": 5,
            "log_directory": "logs",
            "slurm": {"partition": "gpu", "time": 90, "memory": 64000, "setup": ["module load cuda"], "requeue": True},
        },
        {"node1": [0], "node2": [0]},
    ).launch
    assert launch.environment == {"NCCL_IB_HCA": "mlx5", "NCCL_P2P_DISABLE": "1", "SCALE": "0.5"}
    assert launch.ssh_arguments == ("-F", "cluster.conf")
    assert (launch.orchestrator_host, launch.heartbeat_seconds, launch.log_directory) == ("node2", 5.0, Path("logs"))
    slurm = check_section(SlurmSection, launch.slurm, "run.yaml")
    assert (slurm.time, slurm.memory, slurm.setup) == ("90", "64000", ("module load cuda",))


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"mpirn": "x"}, "launch.mpirn: unknown key (did you mean 'mpirun'?)"),
        ({"slurm": {"partitoin": "x"}}, "launch.slurm.partitoin: unknown key (did you mean 'partition'?)"),
        ({"drain_second": 1}, "launch.drain_second: unknown key (did you mean 'drain_seconds'?)"),
        ({"mpi": "intel"}, "launch.mpi: must be 'auto', 'openmpi', 'openmpi4' or 'mpich', not 'intel'"),
        ({"environment": {"A B": "x"}}, "launch.environment: 'A B' is no name of an environment variable"),
        ({"environment": {"A=B": "x"}}, "launch.environment: 'A=B' is no name"),
        ({"environment": {"": "x"}}, "launch.environment: '' is no name"),
        ({"environment": {"LD_X\n": "x"}}, "is no name of an environment variable"),
        ({"environment": {"A": "x\0y"}}, "launch.environment: the value of A holds a zero byte"),
        ({"environment": {"A": True}}, "launch.environment.A: must be a valid string, not True"),
        ({"environment": ["A=1"]}, "launch.environment: must be a mapping"),
        ({"ssh_arguments": "-F x"}, "launch.ssh_arguments: must be a list with each word by itself"),
        ({"mpirun_arguments": ["a\nb"]}, "launch.mpirun_arguments.0: 'a\\nb' must be one line of text"),
        ({"orchestrator_host": "-oProxyCommand=x"}, "launch.orchestrator_host: '-oProxyCommand=x' is no host"),
        ({"orchestrator_host": "a b"}, "launch.orchestrator_host: 'a b' is no host"),
        ({"orchestrator_host": "node1"}, "launch.orchestrator_host: node1 has none of the devices (cpu:0)"),
        ({"heartbeat_seconds": 0}, "launch.heartbeat_seconds: must be greater than 0"),
        ({"heartbeat_seconds": True}, "launch.heartbeat_seconds: must be a number, not true"),
        ({"drain_seconds": float("nan")}, "launch.drain_seconds: must be greater than 0"),
        ({"start_seconds": "soon"}, "launch.start_seconds: must be a valid number"),
        ({"log_directory": 3}, "launch.log_directory: must be the path of a file or directory"),
        ({"slurm": {"account": "a\n#SBATCH --uid=0"}}, "launch.slurm.account: 'a\\n#SBATCH --uid=0' must be one line"),
        ({"slurm": {"setup": "module load cuda"}}, "launch.slurm.setup: must be a list"),
        ({"slurm": {"nodes": 0}}, "launch.slurm.nodes: must be greater than or equal to 1"),
        ({"slurm": {"signal_seconds": 70000}}, "launch.slurm.signal_seconds: must be less than or equal to 65535"),
        ({"slurm": {"launcher": "ssh"}}, "launch.slurm.launcher: must be 'mpirun' or 'srun', not 'ssh'"),
        ({"slurm": 3}, "launch.slurm: must be a section with keys (partition, "),
    ],
)
def test_refusals_name_the_key_and_the_remedy(tmp_path: Path, launch: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(tmp_path, launch)
    message = str(raised.value)
    assert message.startswith("run.yaml: ") and "\n" not in message
    assert said in message


def test_hosts_are_named_for_all_devices_or_for_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"some devices name a host and some do not \(node1/cuda:0, cuda:1\)"):
        configured(tmp_path, {}, ["node1/cuda:0", "cuda:1"])


def test_options_reach_the_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"target: {{model: {tmp_path}, devices: [0]}}\nspeculation: {{method: none}}\nlaunch:\n")
    config = load_config(file, ["launch.slurm.account=me", "launch.environment.NCCL_DEBUG=INFO"])
    assert (config.launch.slurm, config.launch.environment) == ({"account": "me"}, {"NCCL_DEBUG": "INFO"})


@pytest.mark.parametrize("command", [("plan",), ("plan", "--slurm"), ("run", "--prompt", "x"), ("check",)])
def test_every_command_refuses_wrong_keys_of_slurm_and_the_runtime_leaves_them_alone(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"target: {{model: {tmp_path}, devices: [0]}}\nspeculation: {{method: none}}\n"
        "launch: {slurm: {partitoin: x}}\n"
    )
    assert load_config(file).launch.slurm == {"partitoin": "x"}
    name, *options = command
    with pytest.raises(ConfigError, match=r"launch\.slurm\.partitoin: unknown key \(did you mean 'partition'\?\)"):
        cli.main([name, "--config", str(file), *options], standalone_mode=False)


def test_the_documentation_has_the_exit_statuses_of_the_commands() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "launch.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9]) \| (.*) \|$", text.partition("## Exit status")[2], re.MULTILINE)
    assert {int(number): words.replace("`", "") for number, words in rows} == {
        int(code): words.replace("`", "") for code, words in MEANINGS.items()
    }
