"""Texts of families with layers of their own are plain ones in bfloat16, whatever drafts for them: a draft model, what
the text repeats, or heads, in chains and trees; in company, preempted, prompts in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from family_drafts import METHODS, Method, models_of, write_drafter
from mixed_rows import PROMPTS, mixed_sampling, whole_texts
from pipelines import make_llm, noisy_copy, run_alone, tokens_of

SAMPLING = mixed_sampling(20)
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
    "kv_cache": {"max_tokens": 112, "block_size": 16},
}


def check(
    target: Path, draft: Path | None = None, *, least_accepted: int, expected: Any = None, **settings: Any
) -> None:
    """Texts that are drafted for are those of the same rows alone without drafts, which are computed unless given."""
    with make_llm(target, draft, **settings, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        assert llm.statistics()["num_accepted_draft_tokens"] > least_accepted
        assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
        llm.check_idle()
        if expected is None:
            llm.set_speculation(False)
            expected = run_alone(llm, PROMPTS, SAMPLING)
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("head_dim", [24, 32])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_draft_model(tmp_path: Path, family: str, head_dim: int) -> None:
    """Of the same architecture, the one of several models, too."""
    target = write_family(tmp_path / "target", family, seed=1, dtype=torch.bfloat16, head_dim=head_dim)
    check(target, noisy_copy(tmp_path / "draft", target, 0.02), speculation={"draft_len": 4}, least_accepted=60)


def test_a_smaller_draft_model_beside_one_of_several_models(tmp_path: Path) -> None:
    target = write_family(tmp_path / "target", "gemma3", seed=1, dtype=torch.bfloat16, head_dim=32)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 48, "layer_types": None}
    draft = write_family(tmp_path / "draft", "gemma3_text", seed=1, dtype=torch.bfloat16, **sizes)
    check(target, draft, speculation={"draft_len": 3}, least_accepted=0)


class Pair:
    """A target in bfloat16, its texts, and what drafts for it.

    Args:
        folder: of all of them.
        family: of the target.
    """

    def __init__(self, folder: Path, family: str) -> None:
        self._folder = folder
        sizes = {"num_hidden_layers": 5} if family == "deepseek_v3" else {"head_dim": 32}
        self.target = write_family(folder / "target", family, seed=1, dtype=torch.bfloat16, **sizes)
        with make_llm(self.target, **SETTINGS) as llm:
            self.texts = run_alone(llm, PROMPTS, SAMPLING)

    def drafting(self, method: Method) -> dict[str, Any]:
        """What `make_llm` takes to draft by a method."""
        if method.kind:
            write_drafter(self._folder / method.kind, method.kind, self.target, whole_texts(self.texts))
        return {**models_of(self._folder, method), "speculation": method.section}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """By family, made when it is first asked for."""
    return cache(lambda family: Pair(tmp_path_factory.mktemp(family), family))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in ("deepseek_v3", "gemma3_text", "mixtral", "qwen3_moe") for method in METHODS),
        *(("gemma4_small", method) for method in ("suffixes", "lookahead", "EAGLE-3, dynamic tree")),
        ("gemma4_text", "n-grams"),
    ],
)
def test_texts_are_plain_ones_whatever_drafts(pairs: Callable[[str], Pair], family: str, method: str) -> None:
    """Eight rows at once, and rows alone."""
    pair = pairs(family)
    with make_llm(pair.target, **pair.drafting(METHODS[method]), dtype="bfloat16") as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == pair.texts
        assert llm.statistics()["num_accepted_draft_tokens"] > METHODS[method].least
        assert run_alone(llm, PROMPTS[:2], SAMPLING[:2]) == pair.texts[:2]


@pytest.mark.parametrize("method", ["n-grams", "Medusa", "EAGLE-3", "EAGLE-3, dynamic tree"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "qwen3_moe"])
def test_rows_that_are_preempted(pairs: Callable[[str], Pair], family: str, method: str) -> None:
    pair = pairs(family)
    drafting, least = pair.drafting(METHODS[method]), METHODS[method].least
    check(pair.target, expected=pair.texts, least_accepted=least, **drafting)
