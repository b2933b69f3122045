"""Dense products as they are compiled for Hopper, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling import last_line

pytest.importorskip("triton")

COMPILE = r"""
import json, re, subprocess, tempfile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton.matmul import dense

def orders(has_bias, kind):
    names = list(dense._product_kernel.arg_names)
    kinds = dict.fromkeys(("x", "weight", "bias", "y"), kind)
    kinds |= dict.fromkeys(("rows", "features", "inputs", "x_stride"), "i32")
    sizes = {"ROWS": 16, "FEATURES": 64, "INPUTS": 128, "IS_EVEN": True, "HAS_BIAS": has_bias, "LINES": 4}
    sizes |= {"STAGES": 6, "EARLY": True}
    source = ASTSource(
        fn=dense._product_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in sizes.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in kinds if name != "rows"},
    )
    options = {"num_warps": 4, "num_stages": 6, "launch_pdl": True}
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        listed = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "matrix": listed.count("HGMMA"),
        "waits": listed.count("WARPGROUP.DEPBAR"),
        "order": re.findall(r"griddepcontrol\.\w+|wgmma\.mma_async", code.asm["ptx"]),
    }

print(json.dumps([orders(*kind) for kind in ((False, "*bf16"), (True, "*bf16"), (True, "*fp16"))]))
"""


def test_matrix_instructions_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """With a bias, too: once a step, and behind the last. The next kernel begins in the loop, behind the wait."""
    found = json.loads(last_line(COMPILE, tmp_path))
    for one in found:
        assert one["matrix"] == 8 and one["waits"] == 2, one
        assert one["order"][0] == "griddepcontrol.wait"
        assert one["order"].count("griddepcontrol.launch_dependents") == 1
