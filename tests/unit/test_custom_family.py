"""A model family of one's own is one file (tests/helpers/custom_family.py): it is right wherever families are asked for
something, and no file of the product knows of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from custom_family import FourNormsPlan, PlainReference, custom_family, make_custom_checkpoint
from paged import CPU, PagedModel
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of
from safetensors.torch import load_file, save_file

from launch.cli import cli
from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.loading.loading import shard_bytes
from trtrun.memory.working_memory import EngineForm, RoundShape, working_bytes
from trtrun.models.config import read_model_config
from trtrun.weights.weight import Share


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with custom_family():
        yield


def numbers_of(tp_size: int) -> int:
    """What a rank holds of a model of three layers: the ends, then norms, attention and feed-forward."""
    heads, features = 4 * 24 // tp_size, 96 // tp_size
    layer = 4 * 64 + (heads + 2 * heads // 2) * 64 + 64 * heads + 2 * features * 64 + features
    return 2 * (200 // tp_size if tp_size > 1 else 199) * 64 + 64 + 3 * layer


@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_those_of_plain_torch(tmp_path: Path, tp_size: int) -> None:
    """In chunks, and token by token, beyond the window of the layers that slide."""
    path, tokens = make_custom_checkpoint(tmp_path / "own"), prompt_of(41)
    model = PagedModel(path, tp_size=tp_size)
    parts = [model.forward([[(0, 0, tokens[:17])]]), model.forward([[(0, 17, tokens[17:30])]])]
    parts += [model.forward([[(0, at, tokens[at : at + 1])]]) for at in range(30, 41)]
    torch.testing.assert_close(torch.cat(parts), PlainReference(path).logits(tokens), atol=1e-4, rtol=1e-4)
    whole = PagedModel(make_custom_checkpoint(tmp_path / "whole", sliding_window=None)).forward([[(0, 0, tokens)]])
    assert float((torch.cat(parts) - whole).abs().max()) > 0.1, "the window matters"


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "fp8")], ids=str
)
def test_speculative_texts_are_plain_ones(tmp_path: Path, dtype: torch.dtype, quantization: str) -> None:
    target = make_custom_checkpoint(tmp_path / "target", dtype=dtype)
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
    kinds = [SamplingParams(max_tokens=24, seed=row, temperature=0.8 * (row % 2)) for row in range(4)]
    sections = {"scheduler": {"max_batch_size": 3, "max_num_tokens": 40}, "speculation": {"draft_len": 3}}
    with make_llm(target, draft, target_quantization=quantization, **sections) as llm:
        found = tokens_of(llm.generate(prompts, kinds))
        assert llm.statistics()["num_accepted_draft_tokens"] > 10
        llm.set_speculation(False)
        assert found == tokens_of(llm.generate(prompts, kinds))
    if dtype is torch.float32:
        reference = PlainReference(target)
        assert [found[row][0] for row in (0, 2)] == [reference.greedy(prompts[row], 24) for row in (0, 2)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bytes_are_told_before_and_taken_after(tmp_path: Path, tp_size: int) -> None:
    path = make_custom_checkpoint(tmp_path / "own")
    config = read_model_config(path)
    sizes = [shard_bytes(config, rank, tp_size, torch.float32) for rank in range(tp_size)]
    assert sizes == [4 * numbers_of(tp_size)] * tp_size
    reports = PagedModel(path, tp_size=tp_size).reports
    assert [report.shard_bytes for report in reports] == sizes
    stored = sum(value.nbytes for value in load_file(path / "model.safetensors").values())
    norms = (tp_size - 1) * 4 * (3 * 4 * 64 + 64)  # both ranks read them
    assert sum(report.bytes_read for report in reports) == stored + norms


def test_plan_tells_its_bytes(tmp_path: Path) -> None:
    path = make_custom_checkpoint(tmp_path / "own")
    config = configuration(path, None, devices=((), ("cpu:0", "cpu:1")))
    file = tmp_path / "job.json"  # YAML, too
    file.write_text(config.model_dump_json(exclude_defaults=True), encoding="utf-8")
    done = CliRunner().invoke(cli, ["plan", "--config", str(file), "--json"], catch_exceptions=False)
    plan = json.loads(done.stdout)
    assert [rank["target_shard_bytes"] for rank in plan["ranks"]] == [0, 4 * numbers_of(2), 4 * numbers_of(2)]


def test_rounds_are_given_what_a_layer_says_that_a_token_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_model_config(make_custom_checkpoint(tmp_path / "own"))
    shape = RoundShape(max_rows=4, max_tokens=40, draft_len=3, max_seq_len=64, block_size=8, use_logits=False)

    def needed() -> int:
        return working_bytes(shape, EngineForm(config, Share(0, 1), torch.float32, "cpu", verifies=True))

    before, told = needed(), FourNormsPlan.token_bytes
    monkeypatch.setattr(FourNormsPlan, "token_bytes", lambda *arguments: told(*arguments) + 1000)
    assert needed() - before == 1000 * (40 + 4 * 4)


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    path = make_custom_checkpoint(tmp_path / "own")
    weights = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.fc_in.bias"
    save_file({**weights, name: torch.zeros(95)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' has shape \[95\], but config.json calls for \[96\]"):
        PagedModel(path)
    del weights["model.layers.2.post_feedforward_layernorm.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.2.post_feedforward_layernorm.weight'"):
        make_llm(path)
    with pytest.raises(CheckpointError, match="hidden_act 'silu' is not supported; known: gelu_pytorch_tanh"):
        read_model_config(make_custom_checkpoint(tmp_path / "other", hidden_act="silu"))
    with pytest.raises(CheckpointError, match="tensor parallelism over 2 devices: 97 output features cannot be"):
        PagedModel(make_custom_checkpoint(tmp_path / "odd", intermediate_size=97), tp_size=2)


def test_made_up_weights_are_one_model_on_every_rank(tmp_path: Path) -> None:
    path = make_custom_checkpoint(tmp_path / "own")
    (path / "model.safetensors").unlink()
    batch = [[(0, 0, prompt_of(20))]]
    one, two = (PagedModel(path, tp_size=size, load_format="dummy") for size in (1, 2))
    torch.testing.assert_close(one.forward(batch), two.forward(batch), rtol=1e-4, atol=1e-5)
    made = DummyWeights(path, torch.float32, CPU, read_model_config(path))

    def make(name: str, *shape: int) -> torch.Tensor:
        made.check(name, shape)
        return torch.cat([piece for _, piece in made.pieces(name, tuple(range(size) for size in shape))])

    assert not make("model.layers.0.pre_feedforward_layernorm.weight", 64).any(), "1 is added to it"
    assert not make("model.layers.0.mlp.fc_in.bias", 96).any()
    deviations = [float(make(f"model.layers.{index}.mlp.fc_out.weight", 64, 96).std()) for index in range(3)]
    assert deviations == pytest.approx([0.08, 0.04, 0.02], rel=0.1), "later layers add less"
    assert float(make("model.layers.2.mlp.fc_in.weight", 96, 64).std()) == pytest.approx(0.02, rel=0.1)
