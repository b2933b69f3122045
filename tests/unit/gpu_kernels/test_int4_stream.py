"""The products with weights of 4 bits on GPUs have the bits of the dense weight's."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_hopper

from trtrun.kernels.torch.int4 import dequantize, pack

pytest.importorskip("triton", reason="needs triton: pip install triton")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("features", "inputs", "size"),
    [(64, 128, 128), (192, 640, 32), (64, 4224, 64), (3072, 2048, 128), (20032, 1024, 64), (8192, 14336, 128)],
)


def never(*arguments: object) -> torch.Tensor:
    raise AssertionError("nothing is to be compared")


def make_weight(features: int, inputs: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    codes = torch.randint(0, 16, (features, inputs), device="cuda")
    scale = (torch.rand(features, inputs // size, device="cuda") / inputs**0.5).to(dtype)
    return pack(codes, scale, torch.randint(0, 16, scale.shape, device="cuda"))


@needs_hopper
@DTYPES
@SHAPES
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_products(features: int, inputs: int, size: int, has_bias: bool, dtype: torch.dtype) -> None:
    """One tile and many more than there are programs; steps that the weight does not fill; groups of all sizes."""
    from trtrun.kernels.triton.int4_matmul import TritonInt4Matmul, widen
    from trtrun.kernels.triton.int4_stream.product import StreamedProduct
    from trtrun.kernels.triton.matmul import TritonMatmul

    torch.manual_seed(features)
    held = make_weight(features, inputs, size, dtype)
    weight = widen(**held, inputs=inputs, dtype=dtype)
    assert torch.equal(weight, dequantize(**held, inputs=inputs, dtype=dtype))
    bias = torch.randn(features, device="cuda").to(dtype) if has_bias else None
    dense, streamed = TritonMatmul(weight, bias), StreamedProduct(**held, bias=bias)
    product = TritonInt4Matmul(**held, bias=bias)
    for rows in (1, 8, 9, 16, 17, 32, 48, 64, 65, 128, 129, 300):
        x = torch.randn(rows, inputs, device="cuda").to(dtype)
        expected = dense(x)
        assert expected.isfinite().all() and expected.abs().max() > 0
        for multiply in (product, *[streamed] * (3 if rows <= 128 else 0)):
            assert torch.equal(multiply(x), expected), f"{rows} rows"


@needs_hopper
def test_a_graph_of_many_takes_it_and_has_the_bits_of_single_calls() -> None:
    """Kernels begin before those before them have ended: rows must be there, and shared memory."""
    from trtrun.kernels.triton.int4_matmul import TritonInt4Matmul

    torch.manual_seed(1)
    shapes = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
    layers = [TritonInt4Matmul(**make_weight(*shape, 128, torch.bfloat16), bias=None) for shape in shapes]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            queries, hidden = layers[0](x), layers[1](x)
            hidden = layers[3](layers[2](hidden).tanh()) + queries[:, :2048]
            x = hidden / hidden.norm(dim=1, keepdim=True)
        return x

    x = torch.randn(5, 2048, device="cuda").bfloat16()
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x)
    for _ in range(3):
        x.normal_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
        assert sum("_stream_kernel" in event.name for event in profiler.events()) == 40
        assert torch.equal(found, run(x))


@pytest.mark.parametrize("has_same_bits", [True, False])
def test_few_rows_are_for_the_kernel_that_streams(has_same_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before a capture compares; a graph alone cannot, and goes the other way."""
    from trtrun.kernels.triton.int4_stream import suitability

    compared: list[int] = []
    capturing = [True]
    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(suitability, "is_hopper", lambda device: True)
    monkeypatch.setattr(suitability, "_compare", lambda *kind: compared.append(kind[2:4]) or has_same_bits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    held = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 1).bfloat16(), 8)
    streamed = suitability.Streamed(held["words"], held["scales"], None, never)

    def takes(rows: int, width: int = 128) -> bool:
        return streamed.takes(torch.zeros(rows, width).bfloat16()[:, :128])

    assert not takes(1) and not compared
    capturing[0] = False
    assert not takes(0) and not takes(129) and not takes(1, 129) and not compared
    assert [takes(rows) for rows in (1, 8, 16, 128)] == [has_same_bits] * 4 and compared == [(8, 1), (16, 1), (128, 1)]
    finer = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 4).bfloat16(), 8)
    other = suitability.Streamed(finer["words"], finer["scales"], None, never)
    assert other.takes(torch.zeros(1, 128).bfloat16()) == has_same_bits and compared[-1] == (8, 4)
    monkeypatch.setattr(suitability, "is_collecting", lambda: True)
    assert takes(40) and compared[-1] == (64, 1), "its kernels are asked for, whatever skipped ones say"
    monkeypatch.setattr(suitability, "is_collecting", lambda: False)
    assert takes(40) == has_same_bits
    capturing[0] = True
    assert [takes(rows) for rows in (0, 1, 17, 128, 129)] == [False, has_same_bits, False, has_same_bits, False]


def test_it_is_not_for_the_cpu() -> None:
    from trtrun.kernels.triton.int4_stream.suitability import Streamed

    held = pack(torch.zeros(64, 128, dtype=torch.int32), torch.ones(64, 1).bfloat16(), 8)
    assert not Streamed(held["words"], held["scales"], None, never).takes(torch.zeros(1, 128).bfloat16())
