"""Kernels compiled ahead: by real processes and Triton's compiler, which needs no GPU; a GPU's launch finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses, settle_keys

FUSED = "trtrun.kernels.triton.fused"
TARGET = {"backend": "cuda", "arch": 90, "warp_size": 32}


def request(features: int, name: str = "_activate_and_multiply_kernel") -> dict[str, Any]:
    """A kernel's arguments as Triton writes them."""
    constants = {"FEATURES": features, "BLOCK": 1024, "GATE": 0, "LIMIT": float("inf"), "EARLY": False}
    data = {
        "signature": {"fused": "*bf16", "output": "*bf16", **dict.fromkeys(constants, "constexpr")},
        "constant_keys": [[2 + place] for place in range(len(constants))],
        "constant_vals": list(constants.values()),
        "attrs_keys": [[0], [1]],
        "attrs_vals": [[["tt.divisibility", 16]]] * 2,
        "options": {"num_warps": 4, "supported_fp8_dtypes": ["fp8e5"]},
    }
    return {"module": FUSED, "name": name, "data": json.dumps(data), "target": TARGET}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the processes that a test starts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


@pytest.fixture
def processes(cache: Path) -> Iterator[CompileProcesses]:
    """Two, which are ended."""
    started = CompileProcesses(2)
    try:
        yield started
    finally:
        started.close()
        assert all(process.poll() is not None for process in started._processes)


def test_kernels_are_compiled_side_by_side_into_the_cache(processes: CompileProcesses, cache: Path) -> None:
    """One that does not exist is no kernel, and does not end a process."""
    processes.submit(request(64, name="_no_such_kernel"))
    for features in (64, 128, 128):
        processes.submit(request(features))
    assert processes.wait() == 3
    compiled = list(cache.glob("*/_activate_and_multiply_kernel.cubin"))
    assert len(compiled) == 2 and all(path.stat().st_size for path in compiled)
    assert not list(cache.glob("**/*.tmp*"))


def test_a_process_that_ends_leaves_the_others_work_to_them(processes: CompileProcesses) -> None:
    processes._processes[0].kill()
    processes._processes[0].wait(20)
    for features in (64, 128, 256, 512):
        processes.submit(request(features))
    assert processes.wait() < 4, "what it was asked for is compiled by who launches it"


@pytest.mark.usefixtures("cache")
def test_processes_at_work_are_ended() -> None:
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    started = CompileProcesses(2, program)
    started.submit({})
    started.close()
    assert started.wait() == 0
    assert all(process.poll() is not None for process in started._processes)


IMPORTS = """
import importlib, pkgutil
from trtrun.kernels.triton.compilation.compile_worker import replace_torch
replace_torch()
import trtrun.kernels.triton as room
for module in pkgutil.walk_packages(room.__path__, "trtrun.kernels.triton."):
    importlib.import_module(module.name)
"""

KEYS = """
import importlib, sys, trtrun
for name in sys.argv[1:]:
    importlib.import_module(f"trtrun.kernels.triton.sampling.{name}")
from trtrun.kernels.triton.sampling import acceptance, threshold, token_choice
kernels = [threshold._sum_kernel, token_choice._scores_kernel, acceptance._last_scores_kernel]
for kernel in kernels if sys.argv[1] == "threshold" else kernels[::-1]:
    kernel.cache_key
print([kernel.cache_key for kernel in kernels])
"""


def program(source: str, *words: str) -> str:
    """What a Python program of its own prints last."""
    done = subprocess.run(
        [sys.executable, "-c", source, *words], env=dict(os.environ), capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.mark.usefixtures("cache")
def test_kernels_are_found_without_torch() -> None:
    assert program(IMPORTS) == ""


@pytest.mark.usefixtures("cache")
def test_a_kernel_has_the_same_key_whatever_is_launched_before_it() -> None:
    assert program(KEYS, "threshold", "token_choice") == program(KEYS, "acceptance", "threshold")


def test_keys_are_asked_for_in_the_order_in_which_functions_stand() -> None:
    """Triton from 3.9 on, where the test above cannot fail, does not need that."""
    asked: list[str] = []

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def cache_key(self) -> str:
            asked.append(self.name)
            return self.name

    settle_keys({"number": 5, "helper": Function("helper"), "kernel": Function("kernel")})
    assert asked == ["helper", "kernel"]


LAUNCH = """
import json, sys, torch
from triton import knobs
from trtrun.kernels.triton.compilation.launches import collecting, is_collecting
from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses
from trtrun.kernels.triton.fused import activate_and_multiply

requests, hits = [], []
x = torch.ones((3, 2 * 96), device="cuda", dtype=torch.bfloat16)
with collecting(requests.append):
    assert is_collecting() and not activate_and_multiply(x).any()
    activate_and_multiply(x)
assert not is_collecting()
(asked,) = requests
major, minor = torch.cuda.get_device_capability()
processes = CompileProcesses(1)
processes.submit({**vars(asked), "target": {"backend": "cuda", "arch": 10 * major + minor, "warp_size": 32}})
compiled = processes.wait()
processes.close()
knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
assert torch.equal(activate_and_multiply(x), torch.nn.functional.silu(x[:, :96]) * x[:, 96:])
print(json.dumps([compiled, hits]))
"""


@pytest.mark.usefixtures("cache")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_launch_finds_what_was_compiled_ahead() -> None:
    assert json.loads(program(LAUNCH)) == [1, [True]]


COLLECT = """
import sys, torch
from trtrun.kernels.triton.compilation.launches import collecting

x = torch.ones(2, 3)
with collecting(print):
    torch.empty(4)
print("torch._dynamo" in sys.modules)
torch.use_deterministic_algorithms(True)  # then memory that is left as it is holds NaN
makers = [
    lambda: torch.empty(4), lambda: torch.empty_like(x), lambda: torch.empty_strided((2, 2), (2, 1)),
    lambda: torch.empty_permuted((2, 3), (1, 0)), lambda: x.new_empty((2, 3)),
    lambda: x.new_empty_strided((2, 2), (2, 1)),
]
assert all(make().isnan().all() for make in makers)
with collecting(print):
    assert all((make() == 0).all() for make in makers) and (x @ x.T == 3).all()
assert torch.empty(4).isnan().all()
"""


def test_what_skipped_kernels_leave_is_zero_and_torchs_compiler_is_not_imported() -> None:
    """It takes seconds, in which a start would wait."""
    assert program(COLLECT).strip() == "False"
