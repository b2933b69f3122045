"""Texts of families with layers of their own are plain ones in bfloat16, whatever drafts for them: a draft model, what
the text repeats, or heads, in chains and trees; in company, preempted, prompts in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import eagle3, fitted, make_head, write_head
from family_checkpoints import write_family
from medusa_heads import fitted as fitted_heads
from medusa_heads import make_heads, medusa, write_heads
from mixed_rows import PROMPTS, mixed_sampling, plain_tokens, whole_texts
from pipelines import make_llm, noisy_copy, run_alone, tokens_of

SAMPLING = mixed_sampling(30)
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
    "kv_cache": {"max_tokens": 112, "block_size": 16},
}


def check(target: Path, draft: Path | None = None, *, least_accepted: int, **settings: Any) -> None:
    """Texts that are drafted for are those of the same rows alone without drafts."""
    with make_llm(target, draft, **settings, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING)
        assert llm.statistics()["num_accepted_draft_tokens"] > least_accepted
        assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0
        llm.check_idle()
        llm.set_speculation(False)
        assert run_alone(llm, PROMPTS, SAMPLING) == tokens_of(outputs)


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


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_what_texts_repeat(tmp_path: Path, family: str) -> None:
    target = write_family(tmp_path / "target", family, seed=1, dtype=torch.bfloat16, head_dim=32)
    speculation = {"method": "ngram", "draft_len": 4, "max_paths": 2}
    check(target, speculation=speculation, least_accepted=0)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_heads(tmp_path: Path, family: str) -> None:
    target = write_family(tmp_path / "target", family, seed=1, dtype=torch.bfloat16, head_dim=32)
    texts = whole_texts(plain_tokens(target, SAMPLING))
    head = fitted(make_head(target, boundaries=(1, 2, 3), num_tokens=150), target, texts)
    folder = write_head(tmp_path / "eagle3", head, "specforge", target)
    trees = eagle3(eagle_topk=2, max_total_draft_tokens=6, draft_len=3)
    for speculation in (eagle3(draft_len=3), trees):
        check(target, heads=folder, speculation=speculation, least_accepted=30)
    folder = write_heads(tmp_path / "medusa", fitted_heads(make_heads(target), target, texts), "vllm", target)
    check(target, heads=folder, speculation=medusa(draft_len=3), least_accepted=30)
