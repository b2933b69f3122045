"""The kernel for prompts on GPUs of compute capability 9.0 has the bits of the general one, in whatever company."""

from __future__ import annotations

import logging

import pytest
import torch
from gpus import needs_hopper

pytest.importorskip("triton", reason="needs triton: pip install triton")


class Prompts:
    """Rows of some prompts of one length over a store in which nothing is a number but what their tokens have written.

    Args:
        context: tokens of each prompt.
        prompts: how many.
        first: position of the first query.
        heads, kv_heads, head_dim, block_size, dtype: of the store and the queries.
        width: queries of a row; None takes as many as fill a tile.
    """

    def __init__(
        self,
        context: int,
        prompts: int = 1,
        first: int = 0,
        heads: int = 8,
        kv_heads: int = 2,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        width: int | None = None,
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(context)
        width = width or 128 // (heads // kv_heads)
        rows, blocks = -(-(context - first) // width), -(-context // block_size)
        store = torch.randn(
            2, prompts * blocks + 1, kv_heads, block_size, head_dim, generator=generator, device="cuda"
        ).to(dtype)
        tables = torch.randperm(prompts * blocks, generator=generator, device="cuda") + 1
        tables = tables.view(prompts, blocks)
        if context % block_size:
            store[:, tables[:, -1], :, context % block_size :] = torch.nan
        store[:, 0] = torch.nan
        positions = torch.arange(first, first + rows * width, device="cuda")
        positions[positions >= context] = -1
        self.positions = positions.view(rows, width).repeat(prompts, 1)
        # Tables are wider than a row needs, as those of a graph are.
        wide = torch.cat((tables, tables.new_zeros(prompts, 3)), dim=1)
        self.tables, self.store = wide.repeat_interleave(rows, 0), store
        shape = (self.positions.numel(), heads, head_dim)
        self.query = torch.randn(shape, generator=generator, device="cuda").to(dtype)

    def check(self, window: int = 1 << 30, sinks: torch.Tensor | None = None) -> None:
        """Both kernels, and that both are numbers."""
        from trtrun.kernels.triton.attention.paged_attention import _attend_rows
        from trtrun.kernels.triton.attention.prompt_attention import attend

        found, expected = (torch.full_like(self.query, 7.0) for _ in range(2))
        for kernel, output in ((attend, found), (_attend_rows, expected)):
            kernel(self.query, self.store, self.tables, self.positions, 0.09, window, output, sinks=sinks)
        real = self.positions.flatten() >= 0
        assert expected[real].isfinite().all()
        assert torch.equal(found[real], expected[real])


@needs_hopper
@pytest.mark.parametrize("context", [1, 31, 128, 129, 256, 257, 1000, 2500])
def test_a_prompt(context: int) -> None:
    Prompts(context).check()


@needs_hopper
def test_more_tiles_than_programs() -> None:
    """Programs take tiles again and again, and those of several prompts are of many lengths."""
    Prompts(1500, prompts=5, heads=32, kv_heads=8).check()


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
def test_stores(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    Prompts(701, prompts=2, head_dim=head_dim, block_size=block_size, dtype=dtype).check()


@needs_hopper
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (14, 2), (64, 4)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    """Tiles whose last places are of no query, too."""
    Prompts(333, prompts=2, heads=heads, kv_heads=kv_heads).check()


@needs_hopper
@pytest.mark.parametrize("width", [17, 40, 100])
def test_rows_that_do_not_fill_tiles(width: int) -> None:
    Prompts(450, prompts=2, width=width).check()


@needs_hopper
@pytest.mark.parametrize("window", [1, 100, 700])
def test_windows(window: int) -> None:
    Prompts(1300).check(window)


@needs_hopper
@pytest.mark.parametrize(("context", "window"), [(40, 1 << 30), (1300, 1 << 30), (1300, 128)])
def test_sinks(context: int, window: int) -> None:
    """In tiles whose last places are of no query, too, and sinks that outweigh all keys or count for nothing."""
    from trtrun.kernels.triton.attention.paged_attention import _attend_rows
    from trtrun.kernels.triton.attention.prompt_suitability import is_chosen

    prompts = Prompts(context, heads=64, kv_heads=8, head_dim=64)
    sinks = torch.randn(64, device="cuda") * 3
    sinks[0], sinks[1] = 200.0, -200.0
    assert is_chosen(prompts.store, True, _attend_rows)
    prompts.check(window, sinks)


@needs_hopper
def test_a_later_chunk_of_a_prompt() -> None:
    Prompts(3000, first=2222).check()


@needs_hopper
def test_it_is_chosen_there_and_replayed_in_graphs() -> None:
    from trtrun.kernels.triton.attention.paged_attention import _attend_rows
    from trtrun.kernels.triton.attention.prompt_attention import attend
    from trtrun.kernels.triton.attention.prompt_suitability import is_chosen

    prompts = Prompts(900, prompts=3, heads=32, kv_heads=8)
    assert is_chosen(prompts.store, False, _attend_rows)
    graph, output = torch.cuda.CUDAGraph(), torch.empty_like(prompts.query)
    arguments = (prompts.store, prompts.tables, prompts.positions, 0.09, 1 << 30, output)
    with torch.cuda.graph(graph):
        attend(prompts.query, *arguments)
    expected = torch.empty_like(output)
    for _ in range(3):
        prompts.query.normal_()
        graph.replay()
        attend(prompts.query, *arguments[:-1], expected)
        assert torch.equal(output, expected)


@needs_hopper
@pytest.mark.parametrize("fault", ["bits", "compiler"])
def test_where_it_does_not_do_the_other_kernel_attends(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trtrun.kernels.triton.attention import prompt_attention as attention
    from trtrun.kernels.triton.attention import prompt_suitability as suitability
    from trtrun.kernels.triton.attention.paged_attention import _attend_rows

    def broken(*arguments: object) -> None:
        if fault == "compiler":
            raise ValueError("no such instruction\nand more")

    monkeypatch.setattr(suitability, "_chosen", {})
    monkeypatch.setattr(attention, "attend", broken)
    store = torch.zeros(2, 3, 1, 16, 128, dtype=torch.bfloat16, device="cuda")
    with caplog.at_level(logging.WARNING):
        assert not suitability.is_chosen(store, False, _attend_rows)
        assert not suitability.is_chosen(store, False, _attend_rows)
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()


def test_it_is_not_for_the_cpu() -> None:
    from trtrun.kernels.triton.attention.prompt_suitability import is_chosen

    def never(*arguments: object) -> None:
        raise AssertionError("nothing is to be compared")

    assert not is_chosen(torch.zeros(2, 3, 1, 16, 128, dtype=torch.bfloat16), False, never)
