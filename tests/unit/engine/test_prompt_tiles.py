"""Prompts as tiles of a forward: which queries they have, and that nothing depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_draft
from hypothesis import given
from hypothesis import strategies as st
from paged import PagedModel
from pipelines import Reference, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.api import llm_engine
from trtrun.attention.backend import HostAttention
from trtrun.core.nouns import PrefillChunk
from trtrun.engine import batch as prompt_tiles
from trtrun.engine.batch import (
    MOST_EVEN_PADDING,
    PromptTile,
    even_tiles,
    fitted_tiles,
    tile_width,
    tiles_by_width,
)
from trtrun.kernels.triton.attention.attention_tiles import LARGEST_TILE
from trtrun.kvcache.tile_widths import most_padding, padding

chunks_of_rows = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=6).map(
    lambda items: [
        PrefillChunk(row, start, length, is_last=True, has_draft_kv=True) for row, (start, length) in enumerate(items)
    ]
)


def positions_of(tile: PromptTile, width: int) -> list[int]:
    """Those of its tokens; padding is below the chunk's start."""
    return [position for position in range(tile.first, tile.first + width) if position >= tile.start]


@given(chunks_of_rows, st.sampled_from([1, 8, 16, 32, 42, 128]))
def test_tiles_cover_every_token_once_and_in_order(chunks: list[PrefillChunk], width: int) -> None:
    fitted = fitted_tiles(chunks, width)
    assert set(fitted) <= {1, 2, 4, 8, 16, 32, 64, width} and max(fitted) <= width
    added = dict.fromkeys(range(len(chunks)), 0)
    for kind in ({width: even_tiles(chunks, width)}, fitted):
        found: dict[int, list[int]] = {index: [] for index in range(len(chunks))}
        for size, tiles in sorted(kind.items()):
            for tile in tiles:
                assert (tile.row, tile.start) == (chunks[tile.chunk].row, chunks[tile.chunk].start)
                found[tile.chunk] += positions_of(tile, size)
                assert found[tile.chunk][-1] == tile.first + size - 1, "padding comes first"
                added[tile.chunk] += size - len(positions_of(tile, size)) if kind is fitted else 0
        assert found == {
            index: list(range(chunk.start, chunk.start + chunk.length)) for index, chunk in enumerate(chunks)
        }
    assert max(added.values()) <= most_padding(width)


@given(st.integers(1, 500), st.sampled_from([1, 8, 16, 32, 42, 128]))
def test_the_scheduler_counts_what_fills_up_the_tiles(length: int, width: int) -> None:
    chunk = PrefillChunk(0, 7, length, is_last=True, has_draft_kv=True)
    computed = sum(size * len(tiles) for size, tiles in fitted_tiles([chunk], width).items())
    assert length + padding(length, width) == computed


@pytest.mark.parametrize(("heads", "kv_heads", "tp_size"), [(4, 2, 1), (4, 2, 2), (8, 2, 4), (4, 4, 1), (8, 1, 2)])
def test_the_width_of_tiles_follows_from_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, tp_size: int
) -> None:
    """As models find it that run on a GPU."""
    monkeypatch.setattr(HostAttention, "tile", LARGEST_TILE)
    path = make_checkpoint(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads)
    model = PagedModel(path, tp_size=tp_size)
    config = model.models[0].config
    for device in ("cuda:0", "host-7/cuda:3"):
        assert {tile_width(config, tp_size, device)} == {rank.prompt_width for rank in model.models}
    assert tile_width(config, tp_size, "cuda-host/cpu:0") is None


def test_padding_is_less_than_half_of_a_tile() -> None:
    assert [most_padding(width) for width in (1, 2, 16, 32, 42, 128)] == [0, 0, 7, 15, 15, 63]


@pytest.mark.parametrize("tile", [8, 40])
@pytest.mark.parametrize("drafted", [False, True])
def test_prompts_in_tiles_give_transformers_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: int, drafted: bool
) -> None:
    """Without graphs: of any lengths, in chunks, beside rows that decode, with blocks that are reused; and rounds are
    planned with tiles, as where the target is on GPUs."""
    monkeypatch.setattr(HostAttention, "tile", tile)
    monkeypatch.setattr(prompt_tiles, "LARGEST_TILE", tile)
    monkeypatch.setattr(llm_engine, "tile_width", lambda model, tp_size, _: tile_width(model, tp_size, "cuda:0"))
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1) if drafted else None
    reference = Reference(target)
    prompts = [prompt_of(length, seed=length) for length in (5, 16, 17, 33, 64, 65, 100, 7, 1)]
    prompts.append(prompts[3] + prompt_of(4, seed=1))
    speculation = {"draft_len": 3} if drafted else {}
    with make_llm(target, draft, speculation=speculation, scheduler={"max_batch_size": 4, "max_num_tokens": 50}) as llm:
        found = [tokens for (tokens,) in tokens_of(llm.generate(prompts, SamplingParams(max_tokens=12)))]
        llm.check_idle()
        assert llm.engine.scheduler.limits.prompt_tile == tile // 2, "two heads a KV head"
    assert found == [reference.greedy(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("lengths", [[1], [5, 70], [33, 36, 40], [33] * 20, [17] * 30, [1, 2, 3], [40, 8]])
def test_tiles_have_one_width_where_that_costs_little_padding(lengths: list[int]) -> None:
    chunks = [PrefillChunk(row, 3, length, True, True) for row, length in enumerate(lengths)]
    fitted, found = fitted_tiles(chunks, 32), tiles_by_width(chunks, 32)
    tokens, most = (sum(width * len(tiles) for width, tiles in kind.items()) for kind in (found, fitted))
    assert tokens <= most + MOST_EVEN_PADDING
    if found != fitted:
        (width,) = found
        assert found[width] == even_tiles(chunks, width) and width == max(fitted)
    else:
        assert len(fitted) == 1 or max(fitted) * len(even_tiles(chunks, max(fitted))) > most + MOST_EVEN_PADDING
