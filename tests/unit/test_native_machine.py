"""Where the CPU kernels run and where they do not, each in a process of its own: it is found out once."""

from __future__ import annotations

import os
import subprocess
import sys

from native import needs_kernels

# A bfloat16 layer must work in any case.
PROGRAM = """
import sys
{before}
import torch
from trtrun.kernels.choice import kernels_for
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS
torch.set_num_threads(2)
weight, x = torch.eye(64).bfloat16(), torch.randn(3, 64).bfloat16()
layer = Linear(weight.shape, QUANTIZATIONS.get("none"), {{"weight": weight.clone()}})
assert torch.equal(layer(x), x)
print(kernels_for(torch.device("cpu"), torch.bfloat16), kernels_for(torch.device("cpu"), torch.float32))
print(any(name.startswith("llvmlite") for name in sys.modules))
"""


def run(before: str = "", **environment: str) -> list[str]:
    """What a fresh process says of its kernels and whether it has loaded LLVM."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_kernels
def test_the_kernels_are_used_where_they_run() -> None:
    assert run() == ["avx512_bf16", "torch", "True"]


def test_without_a_compiler_torch_does_the_work() -> None:
    assert run("sys.modules['llvmlite'] = None")[:2] == ["torch", "torch"]


def test_without_gnu_openmp_torch_does_the_work() -> None:
    """As in builds of torch on another OpenMP: its libgomp is not there to be found."""
    hide = "import ctypes; real = ctypes.CDLL\n"
    hide += "class CDLL(real):\n    def __init__(self, name, *rest, **more):\n"
    hide += "        if name == 'libgomp.so.1': raise OSError(name)\n        super().__init__(name, *rest, **more)\n"
    assert run(hide + "ctypes.CDLL = CDLL")[:2] == ["torch", "torch"]


def test_a_processor_without_the_instructions_is_not_asked_to_load_llvm() -> None:
    assert run(ATEN_CPU_CAPABILITY="avx2") == ["torch", "torch", "False"]
