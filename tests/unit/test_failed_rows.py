"""A row whose numbers overflow ends with an error, and leaves nothing behind that the rows after it could see."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_draft, save_weights
from pipelines import make_llm, prompt_of
from safetensors.torch import load_file

from trtrun import LLM, SamplingParams

POISON = 7
"""A token whose keys and values are infinite in the target's first layer."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hidden dimensions that only the poisonous token has, and projections that overflow on them."""
    path = make_checkpoint(tmp_path_factory.mktemp("failed") / "target", seed=1)
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, :2] = 0
    embedding[POISON, :2] = 1
    for name, weight in weights.items():
        if name.endswith(("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")):
            weight[:, :2] = 3e38
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2] = 0
    save_weights(path, weights)
    return path


def healthy(index: int) -> list[int]:
    return [token if token != POISON else POISON + 1 for token in prompt_of(5 + 3 * index, seed=index)]


def run(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...] | str]:
    """Tokens or the error of each prompt."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6))
    return [output.error or output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_rows_after_a_failed_one_are_as_before_it(
    target: Path, tmp_path: Path, dtype: str, reuse: bool, drafts: bool
) -> None:
    with make_llm(
        target,
        make_draft(tmp_path / "draft", target, 1) if drafts else None,
        dtype=dtype,
        kv_cache={"max_tokens": 192, "enable_block_reuse": reuse},
        scheduler={"max_batch_size": 3, "max_num_tokens": 64},
    ) as llm:
        prompts = [healthy(index) for index in range(3)]
        expected = run(llm, prompts)
        assert all(isinstance(tokens, tuple) for tokens in expected)
        poisoned = [*healthy(9)[:20], *[POISON] * 15]
        for _ in range(2):  # again over the blocks that it may share with itself
            error, beside = run(llm, [poisoned, prompts[1]])
            assert isinstance(error, str) and "not finite" in error
            assert beside == expected[1]
            assert all(isinstance(answer, str) for answer in run(llm, [[POISON] * 40] * 3)), "every block of the store"
            assert run(llm, prompts) == expected
