"""Every architecture's logits and greedy texts against transformers, in float32, over a scattered KV store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from paged import PagedModel

SLIDING: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 7},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3ForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def prompt_of(length: int, seed: int = 0, vocab_size: int = 199) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab_size] float32 logits of transformers, without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def reference_greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """`count` tokens of transformers' greedy generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


def check_logits(path: Path, tp_size: int = 1, length: int = 41, *, by_experts: bool = False) -> PagedModel:
    """Two prefill chunks and then single tokens give transformers' logits at every position."""
    tokens = prompt_of(length)
    expected = reference_logits(path, tokens)
    model = PagedModel(path, tp_size=tp_size, by_experts=by_experts)
    parts = [model.forward([[(0, 0, tokens[:17])]]), model.forward([[(0, 17, tokens[17:30])]])]
    parts += [model.forward([[(0, at, tokens[at : at + 1])]]) for at in range(30, length)]
    actual = torch.cat(parts)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    return model


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path: Path, architecture: str, tp_size: int) -> None:
    model = check_logits(make_checkpoint(tmp_path, architecture, num_shards=2, vocab_size=200), tp_size)
    assert [report.shard_bytes for report in model.reports] == [report.bytes_read for report in model.reports]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_equals_transformers(tmp_path: Path, architecture: str) -> None:
    path = make_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    prompt = prompt_of(13, seed=3)
    model = PagedModel(path)
    logits, text = model.forward([[(0, 0, prompt)]]), []
    for position in range(len(prompt), len(prompt) + 40):
        text.append(int(logits[-1].argmax()))
        logits = model.forward([[(0, position, text[-1:])]])
    assert text == reference_greedy(path, prompt, 40)
    assert len(set(text)) > 5


def test_rows_of_different_lengths_and_phases_share_a_forward(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    rows = {row: prompt_of(length, seed=row) for row, length in ((0, 9), (1, 23), (2, 40), (3, 31), (4, 12))}
    expected = {row: reference_logits(path, tokens) for row, tokens in rows.items()}
    model = PagedModel(path)
    for row in (0, 1, 2, 3):
        model.forward([[(row, 0, rows[row][: {0: 8, 1: 22, 2: 36, 3: 27}[row]])]])
    logits = model.forward(
        [
            [(0, 8, rows[0][8:9]), (1, 22, rows[1][22:23])],
            [(2, 36, rows[2][36:40]), (3, 27, rows[3][27:31])],
            [(4, 0, rows[4])],
        ]
    )
    wanted = torch.cat([expected[0][8:9], expected[1][22:23], expected[2][36:40], expected[3][27:31], expected[4]])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_padding_tokens_change_nothing(tmp_path: Path) -> None:
    from trtrun.kvcache.segments import AttentionBatch, AttentionSegment

    path = make_checkpoint(tmp_path)
    tokens = prompt_of(10)
    expected = PagedModel(path).forward([[(0, 0, tokens)]])
    model = PagedModel(path)
    tables = torch.tensor([model._table(0, 10), [0, 0, 0]])
    positions = torch.tensor([[*range(10), -1, -1], [-1] * 12])
    batch = AttentionBatch([AttentionSegment(0, 2, 12, tables, positions)], model.block_size)
    padded = torch.tensor([*tokens, *[0] * 14])
    hidden = model.models[0].forward(padded, positions.clamp(min=0).reshape(-1), batch, model.stores[0])
    logits = model.models[0].logits(hidden)
    torch.testing.assert_close(logits[:10], expected, atol=1e-5, rtol=1e-5)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("transformers_4", [False, True])
def test_rope_scaling_equals_transformers(tmp_path: Path, rope: str, transformers_4: bool) -> None:
    check_logits(make_checkpoint(tmp_path, "LlamaForCausalLM", rope=ROPES[rope], transformers_4=transformers_4))


@pytest.mark.parametrize("architecture", SLIDING)
def test_sliding_window_shorter_than_the_context(tmp_path: Path, architecture: str) -> None:
    windowed = make_checkpoint(tmp_path / "windowed", architecture, **SLIDING[architecture])
    model = check_logits(windowed)
    assert any(layer.attention.window is not None for layer in model.models[0]._layers)  # type: ignore[attr-defined]
    whole = make_checkpoint(tmp_path / "whole", architecture)
    tokens = prompt_of(41)
    difference = PagedModel(whole).forward([[(0, 0, tokens)]]) - reference_logits(windowed, tokens)
    assert float(difference.abs().max()) > 0.1  # the window matters in this test


@pytest.mark.parametrize(
    ("architecture", "tp_size", "overrides"),
    [
        ("LlamaForCausalLM", 2, {"vocab_size": 101, "tie_word_embeddings": True}),
        ("LlamaForCausalLM", 4, {"num_key_value_heads": 2}),
        ("LlamaForCausalLM", 2, {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", 1, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
        ("Qwen2ForCausalLM", 4, {"num_key_value_heads": 1}),
        ("Qwen3ForCausalLM", 2, {"num_key_value_heads": 1, "attention_bias": True}),
        ("MistralForCausalLM", 1, {"num_key_value_heads": 4, "head_dim": 32}),
    ],
)
def test_shapes_that_need_care(tmp_path: Path, architecture: str, tp_size: int, overrides: dict[str, Any]) -> None:
    vocab_size = overrides.get("vocab_size", 199)
    path = make_checkpoint(tmp_path, architecture, **overrides)
    tokens = prompt_of(20, vocab_size=vocab_size)
    logits = PagedModel(path, tp_size=tp_size).forward([[(0, 0, tokens)]])
    assert logits.shape == (20, vocab_size)
    torch.testing.assert_close(logits, reference_logits(path, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_checkpoint(tmp_path, "Qwen2ForCausalLM", dtype=dtype)
    tokens = prompt_of(30)
    expected = reference_logits(path, tokens)
    logits = PagedModel(path, dtype).forward([[(0, 0, tokens)]])
    error = float((logits - expected).norm() / expected.norm())
    assert error < (0.003 if dtype is torch.float16 else 0.03)
