"""A verdict's way to the host by a kernel: on a GPU where there is one, else in Triton's interpreter. Against torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compiling import last_line

from trtrun.kernels.torch.operations import TorchOperations

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")


@pytest.mark.parametrize("num_found", [None, 0, 2])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (5, 6), (3, 33)])
def test_a_verdict_comes_as_by_torch(count: int, width: int, num_found: int | None) -> None:
    """Bits of logits that are no numbers, too; some of what it is made of lies apart."""
    from trtrun.kernels.triton.sampling.acceptance import pack_verdict

    torch.manual_seed(count)
    of_rows = torch.randint(-1, 9, (count, 2), device=DEVICE)
    tokens = torch.randint(-1, 1 << 40, (count, width + 3), device=DEVICE)[:, :width]
    logits = torch.randn(count, width + 2, device=DEVICE)[:, 1 : 1 + width]
    logits[0, 0], logits[-1, -1] = -torch.inf, torch.nan
    found = None if num_found is None else torch.randint(1, 9, (min(num_found, count), 2), device=DEVICE)[:, 0]
    arguments = of_rows[:, 0], of_rows[:, 1], tokens, logits, found
    packed, expected = pack_verdict(*arguments), TorchOperations().pack_verdict(*arguments)
    if HAS_GPU:
        torch.cuda.synchronize()
        assert packed.is_pinned()
    assert packed.is_cpu and torch.equal(packed, expected)
    bits = packed[:, 2 + width : 2 + 2 * width].to(torch.int32).contiguous().view(torch.float32)
    assert torch.equal(bits.nan_to_num(7.0), logits.cpu().nan_to_num(7.0))


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton.sampling import acceptance

kernel = acceptance._pack_verdict_kernel
names = list(kernel.arg_names)
for has_found in (False, True):
    constants = {"HAS_FOUND": has_found, "WORDS": 16}
    sizes = ("token_stride", "logit_stride", "num_found", "width")
    kinds = {name: "constexpr" if name in constants else "i32" if name in sizes else "*i64" for name in names}
    kinds["logits"] = "*fp32"
    source = ASTSource(
        fn=kernel, signature=kinds, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    assert "st.global" in compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
told = [one.name for one in kernel.params if not one.is_constexpr and not one.do_not_specialize]
aligned = [one.name for one in kernel.params if one.name in told and not one.do_not_specialize_on_alignment]
print(json.dumps(aligned))
"""


def test_the_kernel_compiles_once_for_rounds_of_all_sizes(tmp_path: Path) -> None:
    """For Hopper, which needs no GPU; in a process without the interpreter."""
    line = last_line(COMPILE, tmp_path)
    assert json.loads(line) == []
