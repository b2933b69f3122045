"""Where the CPU kernels run and where they do not, each in a process of its own: it is found out once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from native import HAD, PROCESSORS

from trtrun.environment import CPU_LIMIT, OURS
from trtrun.errors import ConfigError
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.attention_code import attention_module
from trtrun.kernels.cpu.attention_form import form_for
from trtrun.kernels.cpu.delta_net.net_code import Form, delta_net_module
from trtrun.kernels.cpu.experts_code import grouped_matmul_module
from trtrun.kernels.cpu.fused_code import fused_module
from trtrun.kernels.cpu.matmul_code import FLOAT32_FORMS, FORMS, matmul_module, prefetch_for
from trtrun.kvcache.specs import STATE_BYTES

# A bfloat16 layer must work in any case.
PROGRAM = """
import sys
{before}
import torch
from trtrun.kernels.chooser import operations_of
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS
torch.set_num_threads(2)
weight, x = torch.eye(64).bfloat16(), torch.randn(3, 64).bfloat16()
layer = Linear(weight.shape, QUANTIZATIONS.get("none"), {{"weight": weight.clone()}})
assert torch.equal(layer(x), x)
print(operations_of("cpu").name(torch.bfloat16), operations_of("cpu").name(torch.float32))
print(any(name.startswith("llvmlite") for name in sys.modules))
"""


def run(before: str = "", **environment: str) -> list[str]:
    """What a fresh process says of its kernels and whether it has loaded LLVM, where nothing else is set."""
    ours = (CPU_LIMIT, *os.environ[OURS].split(","))
    clean = {name: value for name, value in os.environ.items() if name not in (*ours, OURS)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needed) for kind, needed in PROCESSORS.items()])
def test_the_kernels_of_each_kind_of_processor_are_used_where_they_run(kind: str) -> None:
    limit = os.environ.get(CPU_LIMIT, "") if kind == HAD[0] else kind
    assert run(**{CPU_LIMIT: limit}) == [kind, kind, "True"]


def test_without_a_compiler_torch_does_the_work() -> None:
    assert run("sys.modules['llvmlite'] = None")[:2] == ["torch", "torch"]


def test_without_gnu_openmp_torch_does_the_work() -> None:
    """As in builds of torch on another OpenMP: its libgomp is not there to be found."""
    hide = "import ctypes; real = ctypes.CDLL\n"
    hide += "class CDLL(real):\n    def __init__(self, name, *rest, **more):\n"
    hide += "        if name == 'libgomp.so.1': raise OSError(name)\n        super().__init__(name, *rest, **more)\n"
    assert run(hide + "ctypes.CDLL = CDLL")[:2] == ["torch", "torch"]


def test_a_processor_without_the_instructions_is_not_asked_to_load_llvm() -> None:
    assert run(ATEN_CPU_CAPABILITY="default") == ["torch", "torch", "False"]


def test_code_is_made_of_what_may_be_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_LIMIT, raising=False)
    whole = machine._processor_features()
    for limit, beyond in (("avx2", "avx512"), ("avx512", "avx512bf16")):
        monkeypatch.setenv(CPU_LIMIT, limit)
        found = machine._processor_features()
        assert not [name for name, there in found.items() if there and name.startswith(beyond)]
        assert found.get("avx2") == whole.get("avx2")
    assert found.get("avx512f") == whole.get("avx512f")
    monkeypatch.setenv(CPU_LIMIT, "avx3")
    with pytest.raises(ConfigError, match="TRTRUN_MAX_CPU_ISA is 'avx3': set it to avx2 or avx512"):
        machine._processor_features()


def test_every_kernel_of_an_arm_processor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one that is not here: what runs on it must have been emitted without another processor's instructions."""
    llvm = pytest.importorskip("llvmlite.binding", reason="needs llvmlite")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    monkeypatch.setattr(machine, "_target_machine", lambda: target.create_target_machine(cpu="neoverse-v2", opt=3))
    prefetch = prefetch_for("neoverse-v2")
    modules = [
        grouped_matmul_module(prefetch, FORMS[machine.NEON]),
        matmul_module(prefetch, FLOAT32_FORMS[machine.NEON]),
        *(attention_module(64, form_for(machine.NEON, is_float32=is_float32)) for is_float32 in (False, True)),
        *(delta_net_module(Form(1, True, dtype, machine.NEON)) for dtype in STATE_BYTES),
        *(fused_module(False, is_float32) for is_float32 in (False, True)),
    ]
    for module in modules:
        assert int.from_bytes(machine._compile(module)[18:20], "little") == 183  # the header's EM_AARCH64


def test_little_work_wakes_no_other_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert machine.team(machine.WORTH_A_TEAM_NS - 1, 100) == 1
        assert [machine.team(machine.WORTH_A_TEAM_NS, most) for most in (0, 1, 3, 4, 100)] == [1, 1, 3, 4, 4]
    finally:
        torch.set_num_threads(before)
