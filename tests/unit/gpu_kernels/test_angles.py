"""Rotary angles by a kernel: on a GPU where there is one, else in Triton's interpreter. Against torch's operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiling import last_line

from trtrun.kernels.torch.operations import TorchOperations

pytest.importorskip("triton", reason="needs triton: pip install triton")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "width"), [(0, 8), (1, 64), (5, 80), (17, 12)])
def test_angles_are_those_of_torch(count: int, width: int, dtype: torch.dtype) -> None:
    """Padding, which stands at -1, has those of position 0; positions lie apart."""
    from trtrun.kernels.triton.row_functions import select_angles

    torch.manual_seed(width)
    cosines, sines = (torch.randn(40, width, device=DEVICE).to(dtype) for _ in range(2))
    positions = torch.randint(-1, 40, (count, 2), device=DEVICE)[:, 0]
    positions[:2] = torch.tensor([-1, 39], device=DEVICE)[:count]
    found = select_angles(cosines, sines, positions)
    for name, one, expected in zip(
        ("cosines", "sines"), found, TorchOperations().select_angles(cosines, sines, positions), strict=True
    ):
        assert torch.equal(one, expected), name
    if count:
        assert torch.equal(found[0][0], cosines[0]) and torch.equal(found[1][0], sines[0])


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import row_functions

kernel, constants = row_functions._select_angles_kernel, {"SIZE": 128, "EARLY": True}
kinds = dict.fromkeys(("cosines", "sines", "cosine", "sine"), "*bf16") | {"positions": "*i64", "width": "i32"}
names = list(kernel.arg_names)
source = ASTSource(
    fn=kernel, signature={name: kinds.get(name, "constexpr") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
)
print("griddepcontrol.wait" in compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_the_kernel_compiles(tmp_path: Path) -> None:
    """For Hopper, which needs no GPU; in a process without the interpreter."""
    line = last_line(COMPILE, tmp_path)
    assert line == "True"
