"""Layers with a sliding window in rings: the texts of layers that keep all, in bytes of the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of

from launch.placement.memory import JobMemory
from trtrun import SamplingParams
from trtrun.configuration.topology import make_topology
from trtrun.errors import ConfigError
from trtrun.kvcache.segments import ContextGroup
from trtrun.models.config import read_model_config
from trtrun.start.memory_requirements import kv_bytes_in_rings, kv_bytes_per_block
from trtrun.start.window_rings import describe_rings, most_chunk, ring_space

WINDOW = 48
ALL: dict[str, Any] = {"architecture": "MistralForCausalLM", "sliding_window": WINDOW, "num_hidden_layers": 5}
SOME: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM", "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
    "num_hidden_layers": 5,
}  # fmt: skip
NO_REUSE: dict[str, Any] = {"enable_block_reuse": False, "max_tokens": 10**6}
CHAIN, TREE = {"draft_len": 3}, {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3}


@pytest.mark.parametrize(("kind", "name"), [(ALL, "plain"), (SOME, "int8")], ids=["all layers", "some layers"])
def test_texts_are_those_of_layers_that_keep_all(tmp_path: Path, kind: dict[str, Any], name: str) -> None:
    """Of prompts several times as long as a ring, read in chunks; plain, with chains, with trees, after preemption."""
    more = {"dtype": torch.bfloat16, "max_position_embeddings": 1024, "num_hidden_layers": 2}
    target = make_checkpoint(tmp_path / "target", seed=1, **{**kind, **more})
    draft = noisy_copy(tmp_path / "draft", target, 0.02)
    prompts = [prompt_of(length, seed=length) for length in (3, 400, 130, 60, 500, 47)]
    sampling = [
        SamplingParams(max_tokens=60, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(6)
    ]
    texts, preempted, accepted = [], 0, 0
    for reuses, model, speculation in ((True, None, {}), (False, None, {}), (False, draft, CHAIN), (False, None, TREE)):
        settings: dict[str, Any] = {
            "scheduler": {"max_batch_size": 3, "max_num_tokens": 256},
            "kv_cache": {"max_tokens": 600, "block_size": 4, "enable_block_reuse": reuses, "dtype": name},
        }
        config = configuration(target, model, speculation=speculation, **settings)
        assert (ring_space(config, read_model_config(target)) is None) is reuses
        assert reuses or describe_rings(config, read_model_config(target)) is not None
        with make_llm(target, model, speculation=speculation, **settings) as llm:
            outputs = llm.generate(prompts, sampling)
            texts.append(tokens_of(outputs))
            preempted += sum(output.completions[0].statistics.num_preemptions for output in outputs)
            accepted += llm.statistics()["num_accepted_draft_tokens"]
            llm.check_idle()
    assert all(found == texts[0] for found in texts) and preempted and accepted > 100


def test_bytes_of_a_window_of_4096_in_a_context_of_32768(tmp_path: Path) -> None:
    """For each row at most 1.3 times the window's, chunks and drafts among them; nothing for each token beside."""
    target = make_checkpoint(tmp_path / "model", **{**ALL, "sliding_window": 4096}, max_position_embeddings=32768)
    model, rows = read_model_config(target), 4
    settings: dict[str, Any] = {
        "scheduler": {"max_batch_size": rows, "plans_ahead": 1},
        "kv_cache": {"enable_block_reuse": False, "max_tokens": 10**6},
        "speculation": {"method": "ngram", "draft_len": 8},
    }
    config = configuration(target, None, **settings)
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    in_rings = kv_bytes_in_rings(config, model, 1, torch.float32)
    assert rows * 4096 * token < in_rings < 1.3 * rows * 4096 * token
    assert kv_bytes_per_block(config, model, 1, torch.float32) == 0
    assert most_chunk(config, model, None) == 1024
    assert describe_rings(config, model) == (
        "5 of 5 layers have windows, and keep 5184 tokens of each row; prompts are read in chunks of 1024"
    )


def test_a_chunk_is_no_longer_than_a_round(tmp_path: Path) -> None:
    """Nor has a ring room for more."""
    target = make_checkpoint(tmp_path / "model", **{**ALL, "sliding_window": 4096}, max_position_embeddings=32768)
    model, lengths = read_model_config(target), []
    for most in (256, 2048):
        scheduler = {"max_batch_size": 4, "max_num_tokens": most}
        config = configuration(target, None, scheduler=scheduler, kv_cache=NO_REUSE)
        space, chunk = ring_space(config, model), most_chunk(config, model, None)
        assert space is not None and chunk == min(most, 1024)
        lengths.append(space.blocks_per_row * config.kv_cache.block_size)
    assert lengths[1] - lengths[0] == 1024 - 256


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
def test_rings_that_do_not_fit_are_named(tmp_path: Path, device: str) -> None:
    """On GPUs, too, where the rest of a round is measured at start."""
    target = make_checkpoint(tmp_path / "model", **{**ALL, "sliding_window": 4096}, max_position_embeddings=32768)
    config = configuration(target, None, devices=((), (device,)), kv_cache=NO_REUSE)
    memory = JobMemory.read(config, make_topology(config))
    rings = memory.ring_bytes(0)
    assert memory.count_blocks(0, 2 * rings + memory.working_bytes(0), "rank 0") > 1
    with pytest.raises(ConfigError, match=r"for the windows of all rows.* or leave kv_cache\.enable_block_reuse on$"):
        memory.count_blocks(0, rings, "rank 0")


def test_where_there_are_no_rings(tmp_path: Path) -> None:
    """Where prefixes are reused, windows are as long as texts, or all rings would take more than the store."""
    target = make_checkpoint(tmp_path / "model", **{**ALL, "sliding_window": 64}, max_position_embeddings=2048)
    model = read_model_config(target)
    for is_there, cache, scheduler in (
        (True, {"enable_block_reuse": False}, {}),
        (False, {"enable_block_reuse": True}, {}),
        (False, {"enable_block_reuse": False}, {"max_seq_len": 100}),
        (False, {"enable_block_reuse": False, "max_tokens": 512}, {}),
    ):
        config = configuration(target, None, kv_cache=cache, scheduler={"max_batch_size": 8, **scheduler})
        assert (ring_space(config, model) is not None) is is_there
        assert (most_chunk(config, model, None) is not None) is is_there


def test_a_window_shows_a_query_its_own_token_and_those_right_before_it() -> None:
    """Padding sees the first token alone."""
    positions = torch.tensor([[0, 5, 7], [2, -1, -1]])
    group = ContextGroup(None, torch.tensor([[1, 2], [3, 4]]), positions, block_size=4)
    seen = group.mask(3)[:, 0, 0] == 0
    assert [[of_query.nonzero().flatten().tolist() for of_query in of_row] for of_row in seen] == [
        [[0], [3, 4, 5], [5, 6, 7]],
        [[0, 1, 2], [0], [0]],
    ]
