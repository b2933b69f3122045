"""In which order experts' kernels add inputs on Hopper, as it is compiled, which needs no GPU: one by one, whatever the
tile. Triton deals operands out to some instructions by the width that they were loaded with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compiling import last_line

pytest.importorskip("triton")

COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import experts
from trtrun.kernels.triton.coded_experts import four_bits

def compiled(kernel, constants, kinds, num_warps, num_stages):
    kinds |= {"bias": "*bf16", "pairs": "*i64", "experts": "*i64"}
    kinds |= dict.fromkeys(("features", "inputs", "num_experts", "tiles", "groups"), "i32")
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in (constants | {"CHOSEN": 1, "EARLY": False}).items()},
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages})
    products = [line for line in code.asm["ttgir"].splitlines() if "tt.dot " in line]
    return {"by four warps": "wgmma.mma_async" in code.asm["ptx"], "products": products}

def plain(rows, tile):
    sizes = {"ROWS": rows, "FEATURES": tile.features, "INPUTS": tile.inputs, "IS_EVEN": False, "HAS_BIAS": False}
    sizes |= {"LINES": 0, "STAGES": tile.num_stages}
    kinds = {"x": "*bf16", "weight": "*bf16", "output": "*bf16"}
    return compiled(experts._product_kernel, sizes, kinds, tile.num_warps, tile.num_stages)

def coded(rows, size, shift):
    sizes = {"ROWS": rows, "SIZE": size, "SHIFT": shift, "OFFSET": 0, "UNIT": 2.0**-6, "ADDS": False}
    scales = "*u8" if shift else "*i32"
    kinds = {"x": "*bf16", "words": "*i32", "scales": scales, "factor": "*fp32", "y": "*bf16"}
    return compiled(four_bits._product_kernel, sizes, kinds, 4, 3)

tiles = [plain(rows, product) for rows, (_, product) in experts.TILES.items()]
print(json.dumps([*tiles, *(coded(*kind) for kind in ((16, 128, 0), (16, 32, 7), (64, 32, 7), (16, 16, 4)))]))
"""


def is_in_order(code: dict[str, Any]) -> bool:
    """Four warps multiply together, or operands lie as those of 16 bits do."""
    products = code["products"]
    return code["by four warps"] != bool(products) and all(
        "kWidth = 2" in product and "kWidth = 4" not in product for product in products
    )


def test_inputs_are_added_in_their_order(tmp_path: Path) -> None:
    line = last_line(COMPILE, tmp_path)
    assert [is_in_order(code) for code in json.loads(line)] == [True] * 7
