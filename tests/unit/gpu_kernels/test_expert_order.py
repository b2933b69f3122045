"""In which order experts' kernels add inputs on Hopper, as it is compiled, which needs no GPU: one by one, whatever the
tile. Triton deals operands out to some instructions by the width that they were loaded with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import experts

def compiled(tile, is_coded):
    constants = {
        "ROWS": tile.rows, "FEATURES": tile.features, "INPUTS": tile.inputs,
        "IS_EVEN": False, "IS_CODED": is_coded, "HAS_BIAS": False, "EARLY": False,
    }
    kinds = {
        "x": "*bf16", "weight": "*u8" if is_coded else "*bf16", "scales": "*u8", "bias": "*bf16", "output": "*bf16",
        "pairs": "*i64", "experts": "*i64", "features": "i32", "inputs": "i32",
    }
    names = list(experts._down_kernel.arg_names)
    source = ASTSource(
        fn=experts._down_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    products = [line for line in code["ttgir"].splitlines() if "tt.dot " in line]
    return {"from shared memory": "wgmma.mma_async" in code["ptx"], "products": products}

plain = [compiled(tile, False) for tile in (experts._NARROW, experts._WIDE, experts._LARGE)]
few = experts._Tile(16, 32, 128, 4, 3)
print(json.dumps({"plain": plain, "coded": compiled(experts._CODED, True), "few rows": compiled(few, True)}))
"""


def is_in_order(code: dict[str, Any]) -> bool:
    """Both operands come from shared memory, or lie as those of 16 bits do."""
    products = code["products"]
    return code["from shared memory"] != bool(products) and all(
        "kWidth = 2" in product and "kWidth = 4" not in product for product in products
    )


def test_inputs_are_added_in_their_order(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [is_in_order(code) for code in found["plain"]] == [True] * 3
    assert is_in_order(found["coded"])
    assert not is_in_order(found["few rows"]), "codes need no tile of their own any more"
