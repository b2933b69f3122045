"""Dummy weights: a model from its config.json alone, the same on every rank and for every way to share it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import configuration, make_llm, prompt_of, tokens_of, useless_draft

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import CheckpointError, ConfigError
from trtrun.loading import dummy_weights
from trtrun.models.config import read_model_config


def config_alone(path: Path, *architecture: str, **overrides: Any) -> Path:
    """A model directory with a config.json and nothing else."""
    make_checkpoint(path, *architecture, **overrides)
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"dtype": "float32"}))
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_share_one_model(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slices they read, also where blocks are smaller than a slice."""
    path = config_alone(tmp_path, architecture)
    logits = []
    for numbers, tp_size in ((1 << 24, 1), (1 << 24, 2), (640, 2), (640, 1)):
        monkeypatch.setattr(dummy_weights, "_BLOCK_NUMBERS", numbers)
        model = PagedModel(path, tp_size=tp_size, load_format="dummy")
        logits.append(model.forward([[(0, 0, prompt_of(20))]]))
    assert torch.allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert torch.allclose(logits[2], logits[3], rtol=1e-4, atol=1e-5)
    assert logits[0].std() > 1e-3 and not torch.equal(logits[0], logits[2])


def test_what_the_first_rank_alone_adds_is_made_there_alone(tmp_path: Path) -> None:
    """gpt-oss has a bias behind sums over the ranks."""
    write_family(tmp_path, "gpt_oss")
    (tmp_path / "model.safetensors").unlink()
    logits = PagedModel(tmp_path, tp_size=2, load_format="dummy").forward([[(0, 0, prompt_of(20))]])
    assert logits.isfinite().all() and logits.std() > 1e-3


def test_no_block_of_a_matrix_repeats_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_weights, "_BLOCK_NUMBERS", 64)
    config = read_model_config(config_alone(tmp_path))
    weights = dummy_weights.DummyWeights(tmp_path, torch.float32, torch.device("cpu"), config)
    weights.check("model.layers.0.mlp.up_proj.weight", (20, 16))
    pieces = list(weights.pieces("model.layers.0.mlp.up_proj.weight", (range(20), range(16))))
    made = torch.cat([piece for _, piece in pieces])
    assert [start for start, _ in pieces] == [0, 4, 8, 12, 16]
    assert len(made.unique(dim=0)) == 20


def test_a_model_without_weights_runs_and_is_exact(tmp_path: Path) -> None:
    target = config_alone(tmp_path / "target", num_hidden_layers=3)
    draft = config_alone(tmp_path / "draft", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="has no weights"):
        LLM(config=configuration(target, draft))
    values = configuration(target, draft).model_dump(mode="json", exclude={"heads"})
    for role in ("target", "draft"):
        values[role]["load_format"] = "dummy"
    prompts = [prompt_of(length, length) for length in (3, 20, 40)]
    with LLM(config=RuntimeConfig.model_validate(values)) as llm:
        speculative = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=30)))
        assert llm.statistics()["num_accepted_draft_tokens"] > 5, "the draft has the target's first layers"
        llm.set_speculation(False)
        assert tokens_of(llm.generate(prompts, SamplingParams(max_tokens=30))) == speculative


@pytest.mark.parametrize("acceptance", [1, 2.5, 5])
def test_acceptance_can_be_forced(tmp_path: Path, acceptance: float) -> None:
    """Whatever the draft is worth, and said in the statistics."""
    target, draft = make_checkpoint(tmp_path / "target"), useless_draft(tmp_path / "draft")
    speculation = {"draft_len": 4, "forced_acceptance": acceptance}
    with make_llm(target, draft, speculation=speculation) as llm:
        outputs = llm.generate([prompt_of(5, row) for row in range(6)], SamplingParams(max_tokens=120, ignore_eos=True))
        totals = llm.statistics()
    assert [len(output.completions[0].token_ids) for output in outputs] == [120] * 6
    assert totals["forced_acceptance"] == acceptance
    assert totals["mean_acceptance_length"] == pytest.approx(acceptance, rel=0.1)


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"forced_acceptance": 6, "draft_len": 4}, "gains 5 tokens at most"),
        ({"forced_acceptance": 2, "use_logits": True}, "does not go with use_logits"),
        ({"forced_acceptance": 0.5}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_forced_is_refused(tmp_path: Path, speculation: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configuration(tmp_path, tmp_path, speculation=speculation)
