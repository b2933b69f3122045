"""What importing trtrun sets: for whom, when, and that every way into trtrun is early enough for OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtrun.environment import CPU_LIMIT, OURS, SETTINGS, settle

ROOT = Path(__file__).resolve().parents[2]
NAMES = [setting.name for setting in SETTINGS if setting.value is not None]
EVERY_NAME = [setting.name for setting in SETTINGS]
CONFIG = str(ROOT / "launch" / "configs" / "one_process_cpu.yaml")
CONSOLE = "from launch.console import main; main()"
PLAN = ("plan", "--config", CONFIG)  # loads torch, and no model


def run(*arguments: str, **environment: str) -> str:
    """stderr of Python, in an environment in which trtrun has set nothing."""
    clean = {name: value for name, value in os.environ.items() if name not in (*EVERY_NAME, OURS, "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_the_user_has_set_stays() -> None:
    environment = {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}
    settle(environment)
    assert environment["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"
    assert environment[OURS].split(",") == [name for name in NAMES if name != "ONEDNN_MAX_CPU_ISA"]


def test_a_child_knows_what_its_parent_has_set_and_what_was_changed_since() -> None:
    environment: dict[str, str] = {}
    settle(environment)
    assert environment[OURS].split(",") == NAMES
    settle(environment)
    assert environment[OURS].split(",") == NAMES
    environment |= {"THP_MEM_ALLOC_ENABLE": "0", "OMP_WAIT_POLICY": "active", "TRITON_FORCE_DISABLE_FP_FUSION": "1"}
    settle(environment)
    assert environment["THP_MEM_ALLOC_ENABLE"] == "0"
    assert "GOMP_SPINCOUNT" not in environment  # the policy decides, and the count would override it
    assert environment[OURS].split(",") == ["ONEDNN_MAX_CPU_ISA", "TORCH_BLAS_PREFER_CUBLASLT"]


def test_less_than_the_processor_has_is_told_to_all_who_compute_and_taken_back() -> None:
    environment: dict[str, str] = {}
    settle(environment)
    environment[CPU_LIMIT] = "avx2"
    settle(environment)
    told = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    assert environment.items() >= told.items()
    assert set(environment[OURS].split(",")) == set(EVERY_NAME)
    del environment[CPU_LIMIT]
    settle(environment)
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert not environment.keys() & {"ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"}
    environment |= {CPU_LIMIT: "avx2", "ATEN_CPU_CAPABILITY": "default"}
    settle(environment)
    assert environment["ATEN_CPU_CAPABILITY"] == "default"  # the user's


@pytest.fixture(scope="module")
def uses_gomp() -> None:
    """Where torch's OpenMP is GNU's, which tells its settings; others know none of these."""
    if "GOMP_SPINCOUNT" not in run("-c", "import torch", OMP_DISPLAY_ENV="VERBOSE"):
        pytest.skip("needs a torch whose OpenMP is libgomp")


@pytest.mark.usefixtures("uses_gomp")
@pytest.mark.parametrize(
    "way",
    [
        ("-c", CONSOLE, *PLAN),
        ("-m", "trtrun", *PLAN),
        ("-m", "mpi4py", "-m", "launch.cli", *PLAN),
        ("-c", "import trtrun, torch"),
    ],
    ids=["trtrun", "python -m trtrun", "a rank", "import trtrun"],
)
def test_openmp_reads_how_long_to_spin_by_every_way_into_trtrun(way: tuple[str, ...]) -> None:
    said = run(*way, OMP_DISPLAY_ENV="VERBOSE")
    assert "GOMP_SPINCOUNT = '2000'" in said
    assert "trtrun was imported after torch" not in said


def test_importing_trtrun_after_torch_is_said_once_and_where_it_matters() -> None:
    late = "import torch; torch.cuda.device_count = lambda: {gpus}; import trtrun, trtrun.configuration.config"
    assert run("-c", late.format(gpus=0)).count("Import trtrun before torch, or set GOMP_SPINCOUNT=2000") == 1
    assert "Import trtrun" not in run("-c", late.format(gpus=1))
    assert "Import trtrun" not in run("-c", late.format(gpus=0), OMP_NUM_THREADS="1")
    assert "Import trtrun" not in run("-c", late.format(gpus=0), GOMP_SPINCOUNT="300000")
