"""Latents of 8 bits by kernels: on a GPU where there is one, else in Triton's interpreter, which has no bfloat16.
Against torch's operations over what the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from compiling import last_line
from family_checkpoints import write_family
from norms import difference
from paged import PagedModel
from pipelines import prompt_of
from torch.nn import functional

from trtrun.attention import latents
from trtrun.attention.latents import GatherLatents, LatentBackend, latent_backend
from trtrun.kernels.arguments import LatentCall
from trtrun.kvcache.formats import ByteKV, KVFormat
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import PagedLatent
from trtrun.kvcache.store import KVStore

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
FP8, INT8 = ByteKV("fp8"), ByteKV("int8")


class Case(NamedTuple):
    """Queries of a row behind `first` others, and sizes."""

    queries: int
    first: int
    heads: int
    rank: int
    turned: int
    block_size: int = 16
    interleaved: bool = True


CASES = (
    [
        (Case(queries, first, heads, 512, 64), dtype, kind)
        for queries, first in ((300, 0), (40, 5000), (6, 100), (1, 1000))
        for heads in (16, 5, 128)
        for dtype in (torch.bfloat16, torch.float16)
        for kind in (FP8, INT8)
    ]
    if HAS_GPU
    else [
        (Case(1, 600, 3, 44, 12), torch.float16, INT8),
        (Case(5, 250, 3, 64, 16, interleaved=False), torch.float16, FP8),
        (Case(18, 245, 3, 44, 12), torch.float32, FP8),
        (Case(3, 7, 3, 42, 12, block_size=6), torch.float32, INT8),
    ]
)


def make_call(case: Case, dtype: torch.dtype, kv_format: KVFormat) -> tuple[LatentCall, torch.Tensor, torch.Tensor]:
    """Random tokens of one row over a store that is full of others; its block table and positions."""
    torch.manual_seed(case.first)
    blocks, width = -(-(case.first + case.queries) // case.block_size), case.rank + case.turned
    layer = KVStore([[PagedLatent(width)]], 2 * blocks + 1, case.block_size, dtype, DEVICE, kv_format).layer(0)
    numbers = torch.randn((2 * blocks + 1) * case.block_size, width, device=DEVICE).to(dtype) * 3
    kv_format.write(layer, torch.arange(len(numbers), device=DEVICE), numbers, None)
    tables = (torch.randperm(2 * blocks, device=DEVICE) + 1)[:blocks].view(1, -1)
    positions = (case.first + torch.arange(case.queries, device=DEVICE)).view(1, -1)
    query = torch.randn(case.queries, case.heads, width, device=DEVICE).to(dtype)
    own = torch.randn(case.queries, width, device=DEVICE).to(dtype)
    own[0] = 0
    own[-1, 1] = -1e-6  # next to nothing, which is still below nothing
    own[-1, -1] = 50.0  # the scale is of what is rotated, too
    turns = torch.randn(2, case.queries, 1, case.turned, device=DEVICE).to(dtype)
    turns[:, 0].abs_()  # nothing has one sign there, whoever turns it
    angles = turns.unbind()
    parts = query[..., : case.rank].contiguous(), query[..., case.rank :], own[:, : case.rank], own[:, case.rank :]
    scale = 0.5 * width**-0.5
    call = LatentCall(*parts, (angles[0], angles[1]), case.interleaved, layer, AttentionBatch([], 16), scale)
    return call, tables, positions


def attend(
    backend: LatentBackend, call: LatentCall, tables: torch.Tensor, positions: torch.Tensor, part: slice = slice(None)
) -> torch.Tensor:
    """What some of the tokens attend, in a forward of their own."""
    positions = positions[:, part]
    segment = AttentionSegment(0, 1, positions.shape[1], tables, positions)
    query, turned_query, latent, turned_key = (tensor[part] for tensor in call[:4])
    angles = call.angles[0][part], call.angles[1][part]
    batch = AttentionBatch([segment], call.store_layer.shape[3])
    own = LatentCall(
        query, turned_query, latent, turned_key, angles, call.interleaved, call.store_layer, batch, call.scale
    )
    return backend.forward(own)


@pytest.mark.parametrize(("case", "dtype", "kv_format"), CASES, ids=str)
@pytest.mark.usefixtures(*([] if HAS_GPU else ["sums_without_order"]))
def test_attention_over_codes_of_latents(
    case: Case, dtype: torch.dtype, kv_format: ByteKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written has the bits of torch's operations, what is attended is near theirs, and a query has the same
    bits alone, in a round, in a prompt, with a wider block table, and split or not."""
    from trtrun.kernels.triton.attention import latent_attention
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    call, tables, positions = make_call(case, dtype, kv_format)
    layer = call.store_layer.clone()
    expected = attend(GatherLatents(kv_format), call, tables, positions)
    written = call.store_layer.clone()
    call.store_layer.copy_(layer)
    found = attend(PagedLatents(kv_format), call, tables, positions)
    assert torch.equal(call.store_layer, written) and not torch.equal(written, layer)
    assert difference(found, expected) < (1e-2 if dtype is torch.bfloat16 else 2e-3)
    wider = functional.pad(tables, (0, 40))
    for start in {0, case.queries // 3, max(0, case.queries - 6), case.queries - 1}:
        for count in (1, 6, 17) if HAS_GPU else (1, 6):
            part = slice(start, min(start + count, case.queries))
            for table in (tables, wider) if HAS_GPU else (wider,):
                alone = attend(PagedLatents(kv_format), call, table, positions, part)
                assert torch.equal(alone, found[part]), (start, count)
    if HAS_GPU:
        return
    monkeypatch.setattr(latent_attention, "_PROGRAMS", 1)
    for units in (1, 2):  # nothing is split; a program has several shares
        monkeypatch.setattr(latent_attention, "multiprocessors", lambda device, units=units: units)
        assert torch.equal(attend(PagedLatents(kv_format), call, tables, positions), found)


def test_latents_of_padding_are_written_nowhere() -> None:
    """Of a row whose last places are no tokens."""
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    call, tables, positions = make_call(Case(6, 20, 2, 32, 16), torch.float16, FP8)
    layers, positions = [call.store_layer, call.store_layer.clone()], positions.clone()
    positions[0, 3:] = -1
    backends: list[LatentBackend] = [GatherLatents(FP8), PagedLatents(FP8)]
    results = [
        attend(backend, call._replace(store_layer=layer), tables, positions)[:3]
        for backend, layer in zip(backends, layers, strict=True)
    ]
    assert torch.equal(layers[0][:, 1:], layers[1][:, 1:])  # the null block may hold anything
    assert difference(results[1], results[0]) < 2e-3


def test_tokens_of_latents_are_copied_with_their_scales() -> None:
    from trtrun.kernels.torch.operations import TorchOperations
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    source, target, offset = torch.tensor([[1, 3, 5, 1], [2, 7, 5, 0], [0, 4, 4, 2]], device=DEVICE)
    for block_size, numbers in ((5, 24), (16, 576)):
        width = INT8.stored(numbers, torch.float16)[0]
        store = torch.randint(0, 255, (3, 1, 9, 1, block_size, width)).to(DEVICE, torch.uint8)
        expected, found = store.clone(), store.clone()
        for part in INT8.parts(expected):
            TorchOperations().copy_tokens(part, source, target, offset)
        PagedLatents(INT8).copy_tokens(found, source, target, offset)
        assert not expected.equal(store) and found.equal(expected)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
@pytest.mark.usefixtures("sums_without_order")
def test_a_model_over_codes_of_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is that of torch's operations, and a text has the same logits token by token, in chunks and in company."""
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents
    from trtrun.kernels.triton.operations import TritonOperations

    path, text = write_family(tmp_path, "deepseek_v3", num_hidden_layers=2), prompt_of(13, seed=1)
    expected = PagedModel(path, kv_format="fp8").forward([[(0, 0, text)]])
    monkeypatch.setattr(latents, "operations_of", lambda device_type: TritonOperations())
    monkeypatch.setattr(ByteKV, "kernels", frozenset({"cpu"}))
    model = PagedModel(path, kv_format="fp8", block_size=16)
    assert all(isinstance(layer.attention.backend, PagedLatents) for layer in model.models[0]._layers)
    singles = torch.cat([model.forward([[(0, at, text[at : at + 1])]]) for at in range(len(text))])
    assert difference(singles, expected) < 1e-4
    for row, chunk in ((1, 6), (2, len(text))):
        parts = [model.forward([[(row, at, text[at : at + chunk])]]) for at in range(0, len(text), chunk)]
        assert torch.equal(torch.cat(parts), singles), f"chunks of {chunk}"
    both = model.forward([[(3, 0, text)], [(4, 0, prompt_of(5, seed=2))]])
    assert torch.equal(both[: len(text)], singles), "beside another row"


def test_gpus_get_the_kernels_that_know_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents
    from trtrun.kernels.triton.operations import TritonOperations

    monkeypatch.setattr(latents, "operations_of", lambda device_type: TritonOperations())
    for kv_format in (FP8, INT8):
        found = latent_backend(torch.device("cuda"), torch.bfloat16, 576, kv_format)
        assert isinstance(found, PagedLatents) and found._format is kv_format
        assert isinstance(latent_backend(torch.device("cpu"), torch.bfloat16, 576, kv_format), GatherLatents)


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
from trtrun.kernels.arguments import LatentCall
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.attention import latent_attention
from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses
from trtrun.kernels.triton.compilation.launches import collecting
from trtrun.kvcache.formats import ByteKV
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment

early_launch._options = lambda device: {"EARLY": True, "launch_pdl": True}
latent_attention.multiprocessors = lambda device: 132
latent_attention.shared_bytes = lambda device: 232448

def attend(kind, dtype, queries):
    kv_format = ByteKV(kind)
    query, own, angles = (torch.zeros(shape, dtype=dtype) for shape in ((queries, 16, 576), (queries, 576),
                                                                        (queries, 1, 64)))
    segment = AttentionSegment(0, 1, queries, torch.zeros((1, 32), dtype=torch.int64),
                               torch.zeros((1, queries), dtype=torch.int64))
    layer = torch.zeros((1, 32, 1, 16, kv_format.stored(576, dtype)[0]), dtype=torch.uint8)
    latent_attention.PagedLatents(kv_format).forward(LatentCall(
        query[..., :512].contiguous(), query[..., 512:], own[:, :512], own[:, 512:], (angles, angles), True, layer,
        AttentionBatch([segment], 16), 0.1))

asked: list[Any] = []
with collecting(asked.append):
    attend("fp8", torch.bfloat16, 1)
    attend("int8", torch.float16, 6)
processes = CompileProcesses(1)
asked = [kernel for kernel in asked if kernel.name != "combine_kernel"]  # one that codes have no part in
for kernel in asked:
    processes.submit({**vars(kernel), "target": {"backend": "cuda", "arch": 90, "warp_size": 32}})
print(json.dumps([[kernel.name for kernel in asked], processes.wait()]))
processes.close()
"""


def test_kernels_for_codes_compile(tmp_path: Path) -> None:
    """For compute capability 9.0, which needs no GPU, and fit into the shared memory of an H100."""
    line = last_line(COMPILE, tmp_path)
    names, compiled = json.loads(line)
    assert (names, compiled) == (["write_kernel", "attend_latents_kernel"] * 2, 4)
    told = [json.loads(file.read_text("utf-8")) for file in tmp_path.rglob("attend_latents_kernel.json")]
    shared = [kernel["shared"] for kernel in told if "shared" in kernel]
    assert len(shared) == 2 and max(shared) <= 232448
