"""Triton's kernels for latents in its interpreter, where there is no GPU: right results, and the same bits in any
company. What the hardware's rounding does is seen on a GPU alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norms import difference
from torch.nn import functional

from trtrun.attention.latents import GatherLatents, LatentBackend, attend_over_latents
from trtrun.kernels.arguments import LatentCall
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, Forks

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
    pytest.mark.usefixtures("sums_without_order"),
]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}
RANK, TURNED, HEADS = 44, 12, 3


def call_of(
    tokens: int, angles: tuple[torch.Tensor, ...], store: torch.Tensor, batch: AttentionBatch, interleaved: bool
) -> LatentCall:
    """Random tokens, the same for as many of them."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, HEADS, RANK + TURNED, generator=generator).to(store.dtype)
    own = torch.randn(tokens, RANK + TURNED, generator=generator).to(store.dtype)
    parts = query[..., :RANK].contiguous(), query[..., RANK:], own[:, :RANK], own[:, RANK:]
    return LatentCall(*parts, (angles[0], angles[1]), interleaved, store, batch, 0.15)


@pytest.mark.parametrize(
    ("queries", "first", "dtype", "interleaved"),
    [(1, 600, torch.float16, True), (5, 250, torch.float32, False), (18, 245, torch.float32, True)],
)
def test_attention_is_right_and_the_same_alone(
    queries: int, first: int, dtype: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one share of keys and several, in a round and in a prompt, with a wider block table, and split or not."""
    from trtrun.kernels.triton.attention import latent_attention
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    torch.manual_seed(first)
    blocks = -(-(first + queries) // 16)
    store = torch.randn(1, blocks + 1, 1, 16, RANK + TURNED).to(dtype)
    tables = (torch.randperm(blocks) + 1).view(1, -1)
    positions = first + torch.arange(queries).view(1, -1)
    angles = torch.randn(2, queries, 1, TURNED).to(dtype).unbind()
    whole = call_of(queries, angles, store, AttentionBatch([], 16), interleaved)

    def attend(backend: LatentBackend, start: int, stop: int, tables: torch.Tensor) -> torch.Tensor:
        batch = AttentionBatch([AttentionSegment(0, 1, stop - start, tables, positions[:, start:stop])], 16)
        query, turned_query, latent, turned_key = (part[start:stop] for part in whole[:4])
        turns = whole.angles[0][start:stop], whole.angles[1][start:stop]
        call = LatentCall(query, turned_query, latent, turned_key, turns, interleaved, store, batch, whole.scale)
        return backend.forward(call)

    expected = attend(GatherLatents(), 0, queries, tables)
    kept = store.clone()
    found = attend(PagedLatents(), 0, queries, tables)
    assert torch.equal(store, kept) and difference(found, expected) < BOUNDS[dtype]
    for start, stop in ((0, 1), (queries // 2, queries // 2 + 1), (max(0, queries - 6), queries)):
        alone = attend(PagedLatents(), start, stop, functional.pad(tables, (0, 40)))
        assert torch.equal(alone, found[start:stop]), (start, stop)
    monkeypatch.setattr(latent_attention, "_PROGRAMS", 1)
    for units in (1, 2):  # nothing is split; a program has several shares
        monkeypatch.setattr(latent_attention, "multiprocessors", lambda device, units=units: units)
        assert torch.equal(attend(PagedLatents(), 0, queries, tables), found)


def test_nodes_of_trees_are_computed_as_at_their_places() -> None:
    """Two rows of two paths, one of which ends early; latents of all are written, and those of padding nowhere."""
    from trtrun.kernels.triton.attention.latent_attention import PagedLatents

    nodes = torch.tensor([0, 1, 2, 0, 3, 3, 4, 5, 6, 4, 7, 0])
    places = torch.tensor([0, 1, 2, 4, 6, 7, 8, 10])
    tables = torch.tensor([[1], [2], [3], [4]])
    positions = torch.tensor([[5, 6, 7], [5, 6, -1], [9, 10, 11], [9, 10, -1]])
    angles = torch.randn(2, 12, 1, TURNED, generator=torch.Generator().manual_seed(0)).unbind()
    segment = AttentionSegment(0, 4, 3, tables, positions)
    batch = AttentionBatch([segment], 16, Forks(nodes, places))
    stores = [torch.zeros(1, 5, 1, 16, RANK + TURNED) for _ in range(2)]
    backends: list[Any] = [GatherLatents(), PagedLatents()]
    expected, found = (
        attend_over_latents(backend, call_of(8, angles, store, batch, True))
        for backend, store in zip(backends, stores, strict=True)
    )
    assert difference(found, expected) < BOUNDS[torch.float32]
    assert torch.equal(stores[1][:, 1:], stores[0][:, 1:]) and stores[1][:, 1:].any(dim=-1).sum() == 10


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 44, 20), (70, 300, 64), (17, 20, 300)])
def test_products_of_heads(rows: int, outputs: int, inputs: int) -> None:
    """Of heads that are parts of a row, and alone."""
    from trtrun.kernels.triton.matmul.heads import multiply_heads

    torch.manual_seed(rows)
    weight, whole = torch.randn(3, outputs, inputs).half(), torch.randn(rows, 3, inputs + 8).half()
    x = whole[..., :inputs]
    expected = torch.einsum("rhi,hoi->rho", x.double(), weight.double())
    for dtype, bound in ((torch.float16, BOUNDS[torch.float16]), (torch.float32, 1e-5)):
        found = multiply_heads(x, weight, dtype)
        assert difference(found, expected) < bound and found.dtype is dtype
        assert torch.equal(multiply_heads(x[rows // 2 : rows // 2 + 1], weight, dtype)[0], found[rows // 2])


def test_norms_of_parts_of_rows() -> None:
    from trtrun.kernels.triton.fused import add_and_normalise

    rows, weight = torch.randn(9, 80).half(), torch.randn(44).half()
    part = rows[:, 20:64]
    found, expected = (add_and_normalise(x, None, weight, 1e-6) for x in (part, part.contiguous()))
    assert found.is_contiguous() and torch.equal(found, expected)
