"""The kernels that are written in Gluon compile for compute capability 9.0 with the Triton that is installed, which
needs no GPU. Gluon changes from one version to the next, and what does not compile is left to slower kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiling import last_line

pytest.importorskip("triton")

COMPILE = """
import json
from typing import Any
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from trtrun.kernels.torch import integers
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.compilation.launches import collecting
from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses
from trtrun.kernels.triton.fused import empty_rows
from trtrun.kernels.triton.fp8_stream import block_product, product
from trtrun.kernels.triton.int4_stream import product as int4_product
from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.triton.attention import prompt_attention
from trtrun.kernels.triton.coded_experts import four_bits_stream
from trtrun.kernels.triton.coded_experts.four_bits import Gate
from trtrun.kernels.triton.expert_tiles import ExpertTiles

early_launch._options = lambda device: {"EARLY": True, "launch_pdl": True}
for module in (block_product, product, int4_product, prompt_attention, four_bits_stream):
    module.multiprocessors = lambda device: 132

def fp8():
    codes, x = torch.zeros((256, 1024), dtype=torch.float8_e4m3fn), torch.zeros((3, 1024), dtype=torch.bfloat16)
    product.StreamedProduct(codes, torch.ones(256), None)(empty_rows(3, 1024, x))
    block_product.StreamedBlockProduct(codes, torch.ones(2, 8), None)(empty_rows(3, 1024, x, "group"))

def four_bits():
    weight = integers.quantize_int4(torch.zeros((128, 1024), dtype=torch.bfloat16), 128)
    multiply = int4_product.StreamedProduct(weight["words"], weight["scales"], None)
    for height in (8, 64):
        multiply(torch.zeros((height, 1024), dtype=torch.bfloat16), height)

def experts():
    words, scales = torch.zeros((2, 1, 2, 32, 32), dtype=torch.int32), torch.zeros((2, 1, 2, 2, 32), dtype=torch.int32)
    blocks, factor = torch.zeros((2, 1, 2, 64, 4), dtype=torch.uint8), torch.ones((2, 64))
    numbers = {"blocks": blocks, "factor": factor}
    whole, gate = {"scales": scales}, Gate("clamped_swiglu", 7.0)
    for rows, more, gates in (
        (8, numbers, (None, gate)), (128, numbers, (gate,)), (64, whole, (None,)), (128, whole, (None,))
    ):
        weight = ExpertCodes({"words": words, **more}, 64, 256)
        tiles = ExpertTiles(torch.zeros(rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        x = torch.zeros((3, 256), dtype=torch.bfloat16)
        for one in gates:
            four_bits_stream.streamed_product(x, weight, None, tiles, 3, 1, one, asks_ahead=one is None)

def prompts():
    query = torch.zeros((64, 8, 64), dtype=torch.bfloat16)
    store = torch.zeros((2, 8, 2, 16, 64), dtype=torch.bfloat16)
    whole = torch.zeros((1, 8), dtype=torch.int64), torch.zeros((1, 64), dtype=torch.int64)
    prompt_attention.attend(query, store, *whole, 0.1, 1 << 30, torch.empty_like(query), sinks=torch.zeros(8))

asked: list[Any] = []
with collecting(asked.append):
    fp8()
    four_bits()
    experts()
    prompts()
processes = CompileProcesses(1)
for kernel in asked:
    processes.submit({**vars(kernel), "target": {"backend": "cuda", "arch": 90, "warp_size": 32}})
print(json.dumps([[kernel.name for kernel in asked], processes.wait()]))
processes.close()
"""
OF_EXPERTS = ["_product_kernel"] * 2 + ["_many_rows_kernel", "_product_kernel", "_many_rows_kernel"]
KERNELS = [
    "_stream_kernel",
    "_stream_blocks_kernel",
    "_stream_kernel",
    "_stream_kernel",
    *OF_EXPERTS,
    "_prompt_kernel",
]
"""Products of E4M3, by row and in blocks, two of 4 bits, those of experts, with gates and without; attention of
prompts with sinks."""


def test_all_kernels_compile(tmp_path: Path) -> None:
    line = last_line(COMPILE, tmp_path)
    assert json.loads(line) == [KERNELS, len(KERNELS)]


def test_why_a_kernel_does_not_compile_is_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong in the function behind the last call, not where the first one is."""
    from trtrun.kernels.triton.gluon_works import has_same_bits

    def compare() -> bool:
        try:
            raise AttributeError("'SliceLayout' has no attribute")
        except AttributeError as error:
            wrong = ValueError("at 3:14:\n    nothing = zeros()\n    ^\nAttributeError()")
            wrong.__cause__ = error
            raise ValueError("at 37:4:\n    start()\n    ^") from wrong

    assert not has_same_bits("attention", compare)
    (said,) = caplog.messages
    assert said == "The faster attention is not used here (AttributeError: 'SliceLayout' has no attribute)"
