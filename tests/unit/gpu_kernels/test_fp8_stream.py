"""The product of few rounded rows on GPUs of compute capability 9.0 has the bits of the general kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from gpus import needs_hopper

from trtrun.kernels.arguments import RoundedRows
from trtrun.kernels.torch.fp8 import quantize, quantize_blocks

pytest.importorskip("triton", reason="needs triton: pip install triton")


def never(*arguments: object) -> torch.Tensor:
    raise AssertionError("nothing is to be compared")


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("features", "inputs"),
    [(1, 16), (70, 48), (64, 512), (200, 528), (3000, 2560), (2048, 8192), (20000, 2048), (8192, 28672)],
)
def test_products(features: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    """One tile and many more than there are programs; steps and tiles that the weight does not fill."""
    from trtrun.kernels.triton.fp8_stream.product import StreamedProduct
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_matmul import chain_product

    torch.manual_seed(features)
    held = quantize((torch.randn(features, inputs, device="cuda") / inputs**0.5).to(dtype))
    bias = torch.randn(features, device="cuda").to(dtype) if has_bias else None
    product = StreamedProduct(held["codes"], held["scale"], bias)
    for rows in (1, 2, 7, 16):
        x = round_activations(torch.randn(rows, inputs, device="cuda").to(dtype))
        expected = chain_product(x, held["codes"], held["scale"], bias)
        for _ in range(3):
            assert torch.equal(product(x), expected), f"{rows} rows"
    assert expected.isfinite().all()


@needs_hopper
def test_a_graph_of_many_takes_it_and_has_the_bits_of_single_calls() -> None:
    """Kernels begin before those before them have ended: rows must be there, and shared memory."""
    from trtrun.kernels.triton.matmul.fp8_matmul import TritonFp8Matmul

    torch.manual_seed(1)
    shapes = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
    layers = [
        TritonFp8Matmul(**quantize(torch.randn(shape, device="cuda").bfloat16()), bias=None, rounds_activations=True)
        for shape in shapes
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            queries, hidden = layers[0](x), layers[1](x)
            hidden = layers[3](layers[2](hidden).tanh()) + queries[:, :2048]
            x = hidden / hidden.norm(dim=1, keepdim=True)
        return x

    x = torch.randn(5, 2048, device="cuda").bfloat16()
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with torch.cuda.graph(graph):
            found = run(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(found, run(x))
    assert sum("_stream_kernel" in event.name for event in profiler.events()) == 3 * 40


@needs_hopper
@pytest.mark.parametrize("fault", ["bits", "compiler"])
def test_where_it_does_not_do_the_other_kernel_multiplies(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trtrun.kernels.triton.fp8_stream import product, suitability
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_matmul import chain_product

    def broken(self: object, x: RoundedRows) -> torch.Tensor:
        if fault == "compiler":
            raise ValueError("no such instruction\nand more")
        return torch.zeros(len(x.codes), 200, dtype=x.dtype, device="cuda")

    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(product.StreamedProduct, "__call__", broken)
    held = quantize(torch.randn(64, 64, device="cuda"))
    streamed = suitability.Streamed(held["codes"], held["scale"], None, chain_product)
    x = round_activations(torch.randn(3, 64, device="cuda").bfloat16())
    with caplog.at_level(logging.WARNING):
        assert not streamed.takes(x)
        assert not streamed.takes(x)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not streamed.takes(x)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("has_same_bits", [True, False])
def test_few_rows_in_graphs_are_for_it(has_same_bits: bool, in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before the capture compares; a graph alone cannot, and goes the general way."""
    from trtrun.kernels.triton.fp8_stream import suitability

    compared: list[bool] = []
    capturing = [True]
    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(suitability, "is_hopper", lambda device: True)
    monkeypatch.setattr(suitability, "_compare", lambda *kind: compared.append(True) or has_same_bits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    codes, scale = (quantize_blocks if in_blocks else quantize)(torch.randn(64, 64)).values()
    streamed = suitability.Streamed(codes, scale, None, never)

    def takes(rows: int, inputs: int = 64) -> bool:
        codes = torch.zeros(rows, inputs, dtype=torch.float8_e4m3fn)
        return streamed.takes(RoundedRows(codes, torch.ones(rows), torch.bfloat16))

    assert not takes(1) and not compared
    capturing[0] = False
    assert not takes(0) and not takes(17) and not compared
    assert not takes(1) and not takes(16) and compared == [True]
    capturing[0] = True
    assert [takes(rows) for rows in (0, 1, 16, 17)] == [False, has_same_bits, has_same_bits, False]
    # Of the other kind of weights nothing is known by that.
    other, of_other = (quantize if in_blocks else quantize_blocks)(torch.randn(64, 64)).values()
    streamed = suitability.Streamed(other, of_other, None, never)
    assert not takes(1)
    odd, scale = quantize(torch.randn(64, 72)).values()
    streamed = suitability.Streamed(odd, scale, None, never)
    assert not takes(1, 72)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("wrong_from", [None, 0, 2 * 64])
def test_the_second_tile_of_a_program_is_compared_too(
    wrong_from: int | None, has_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtrun.kernels.triton.fp8_stream import suitability

    def expected(x: RoundedRows, codes: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(x.codes), len(codes))

    def make(codes: torch.Tensor, *_: object) -> Callable[[RoundedRows], torch.Tensor]:
        made = (torch.arange(len(codes)) >= (len(codes) if wrong_from is None else wrong_from)).float()
        return lambda x: made.expand(len(x.codes), -1) * (len(codes) > 200 or wrong_from == 0)

    monkeypatch.setattr(suitability, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(suitability, "_make", make)
    agrees = suitability._compare(torch.device("cpu"), torch.float16, False, has_blocks, expected)
    assert agrees == (wrong_from is None)


def test_it_is_not_for_the_cpu() -> None:
    from trtrun.kernels.triton.fp8_stream.suitability import Streamed

    held = quantize(torch.randn(64, 64))
    x = RoundedRows(held["codes"][:2], held["scale"][:2], torch.bfloat16)
    assert not Streamed(held["codes"], held["scale"], None, never).takes(x)
