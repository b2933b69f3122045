"""The templates under launch/configs: each one loads, and places the ranks, hosts and bytes that its comment says.

Checkpoints that do not ship are stood in for by directories that hold nothing but a config.json of the real dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.jobs.placement.run_config import load_run_config
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import is_counts
from trtrun.configuration.model_paths import ASSET_PREFIX
from trtrun.configuration.topology import make_topology
from trtrun.configuration.yaml_source import parse_yaml
from trtrun.loading.loading import shard_bytes
from trtrun.memory.memory_requirements import resolve_dtype
from trtrun.models.config import read_model_config
from trtrun.start.startup import device_of

TEMPLATES = Path(__file__).resolve().parents[3] / "launch" / "configs"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-70B-Instruct": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": {**SCALING, "factor": 8.0},
    },
    "Llama-3.2-1B-Instruct": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALING, "factor": 32.0},
    },
}
# Parameters of the published checkpoints, and those of norms, which every rank of a group holds whole.
PARAMETERS = {"Llama-3.1-70B-Instruct": 70_553_706_496, "Llama-3.2-1B-Instruct": 1_235_814_400}
NORMS = {"Llama-3.1-70B-Instruct": (2 * 80 + 1) * 8192, "Llama-3.2-1B-Instruct": (2 * 16 + 1) * 2048}


@dataclass(frozen=True)
class Expected:
    """What a template is to place.

    Attributes:
        ranks: of each rank, as messages name it.
        hosts: in rank order; one empty name where none is named.
        gigabytes: weights of each rank with a device, where the models do not ship.
        job: environment of the Slurm job that it is for.
    """

    ranks: tuple[str, ...]
    hosts: tuple[str, ...] = ("",)
    gigabytes: tuple[float, ...] = ()
    job: dict[str, str] = field(default_factory=dict)


ORCHESTRATOR = "orchestrator rank 0 (host)"
EXPECTED = {
    "one_process_cpu": Expected(("orchestrator+draft+target rank 0 (cpu:0)",)),
    "pard_cpu": Expected(("orchestrator+draft+target rank 0 (cpu:0)",)),
    "medusa_cpu": Expected(("orchestrator+target rank 0 (cpu:0)",)),
    "eagle3_cpu": Expected(("orchestrator+target rank 0 (cpu:0)",)),
    "cpu_pair": Expected(
        (ORCHESTRATOR, "draft rank 1 (cpu:0)", "target rank 2 (cpu:1)", "target rank 3 (cpu:2)"),
    ),
    "cpu_pair_on_two_cores": Expected((ORCHESTRATOR, "draft+target rank 1 (cpu:0)", "draft+target rank 2 (cpu:1)")),
    "one_gpu": Expected(("orchestrator+draft+target rank 0 (cuda:0)",)),
    "two_gpus": Expected((ORCHESTRATOR, "draft rank 1 (cuda:0)", "target rank 2 (cuda:1)")),
    "tp2_draft1": Expected((ORCHESTRATOR, "draft+target rank 1 (cuda:0)", "target rank 2 (cuda:1)")),
    "llama_70b_tp4_draft_1b": Expected(
        (
            ORCHESTRATOR,
            "draft+target rank 1 (cuda:0)",
            *(f"target rank {rank} (cuda:{rank - 1})" for rank in (2, 3, 4)),
        ),
        gigabytes=(37.8, 35.3, 35.3, 35.3),
    ),
    "llama_70b_tp8_draft_on_all": Expected(
        (ORCHESTRATOR, *(f"draft+target rank {rank} (cuda:{rank - 1})" for rank in range(1, 9))),
        gigabytes=(17.9,) * 8,
    ),
    "two_nodes": Expected(
        (
            "orchestrator rank 0 (node1)",
            "draft rank 1 (node2 cuda:0)",
            *(f"target rank {gpu + 2} (node1 cuda:{gpu})" for gpu in range(4)),
        ),
        ("node1", "node2"),
        (2.5, 35.3, 35.3, 35.3, 35.3),
    ),
    "two_nodes_slurm": Expected(
        (
            "orchestrator rank 0 (n7)",
            "draft rank 1 (n9 cuda:0)",
            *(f"target rank {gpu + 2} (n7 cuda:{gpu})" for gpu in range(4)),
        ),
        ("n7", "n9"),
        (2.5, 35.3, 35.3, 35.3, 35.3),
        {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[7,9]", "SLURM_GPUS_ON_NODE": "4", "SLURMD_NODENAME": "n7"},
    ),
}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models with config.json and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    for name, values in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process, in no Slurm job yet."""
    for name in ("SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE", "SLURM_GPUS", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch


def read(name: str) -> dict[str, Any]:
    values = parse_yaml((TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8"), name)
    assert isinstance(values, dict)
    return values


def load(name: str, models: Path, environment: pytest.MonkeyPatch) -> tuple[RuntimeConfig, Topology]:
    """The template as a run would load it, with the stand-ins in place of models that do not ship."""
    for variable, value in EXPECTED[name].job.items():
        environment.setenv(variable, value)
    overrides = [
        f"{role}.model={models / Path(section['model']).name}"
        for role, section in read(name).items()
        if role in ("target", "draft") and not section["model"].startswith(ASSET_PREFIX)
    ]
    config = load_run_config(TEMPLATES / f"{name}.yaml", overrides)
    return config, make_topology(config)


def test_every_template_is_validated_here() -> None:
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_begins_with_what_it_is_for(name: str) -> None:
    lines = (TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = [line for line in lines[: lines.index("target:")] if line]
    assert head and all(line.startswith("#") for line in head) and len(head) <= 6


@pytest.mark.parametrize("name", NAMES)
def test_ranks_and_hosts(name: str, models: Path, environment: pytest.MonkeyPatch) -> None:
    _, topology = load(name, models, environment)
    expected = EXPECTED[name]
    assert tuple(topology.describe(rank) for rank in range(topology.world_size)) == expected.ranks
    assert topology.world_size == len(expected.ranks)
    assert topology.hosts == expected.hosts


@pytest.mark.parametrize("name", [name for name in NAMES if EXPECTED[name].gigabytes])
def test_shards_of_the_real_dimensions(name: str, models: Path, environment: pytest.MonkeyPatch) -> None:
    config, topology = load(name, models, environment)
    held = dict.fromkeys(topology.worker_ranks, 0)
    assert config.draft is not None
    for section, ranks in ((config.draft, topology.draft_ranks), (config.target, topology.target_ranks)):
        model = read_model_config(section.model)
        dtype = resolve_dtype(section, model)
        assert dtype == torch.bfloat16
        total = 0
        for index, rank in enumerate(ranks):
            slot = topology.slot(rank)
            assert slot is not None
            size = shard_bytes(model, index, len(ranks), dtype, device_of(slot))
            held[rank] += size
            total += size
        copies = (len(ranks) - 1) * NORMS[section.model.name]
        assert total == 2 * (PARAMETERS[section.model.name] + copies)
    assert tuple(round(size / 1e9, 1) for size in held.values()) == EXPECTED[name].gigabytes


def test_the_eight_way_template_is_the_device_lists_of_the_other_runtime(
    models: Path, environment: pytest.MonkeyPatch
) -> None:
    config, _ = load("llama_70b_tp8_draft_on_all", models, environment)
    devices = tuple(f"cuda:{index}" for index in range(8))
    assert (config.speculation.draft_len, config.draft_devices, config.target.devices) == (10, devices, devices)
    assert not config.speculation.use_logits


def test_the_slurm_template_asks_for_what_its_counts_need() -> None:
    values = read("two_nodes_slurm")
    counts = [values[role]["devices"] for role in ("target", "draft")]
    assert all(is_counts(count) for count in counts)
    slurm = values["launch"]["slurm"]
    assert slurm["nodes"] == sum(count["nodes"] for count in counts)
    assert slurm["gres"] == f"gpu:{max(count['gpus_per_node'] for count in counts)}"
