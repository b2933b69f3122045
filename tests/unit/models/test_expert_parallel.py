"""Experts that lie whole on the ranks of a group: logits are transformers', and what experts make has the bits of one
rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build_engine
from family_checkpoints import FAMILIES, write_family
from native import PATHS
from paged import PagedModel
from pipelines import configuration
from quantized_checkpoints import FORMATS, edit_tensors, store_in_format
from test_model_invariance import choose_kernels
from test_model_logits import check_logits

from launch.jobs.check.preflight import check_models
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError, ConfigError
from trtrun.heads.heads import read_heads
from trtrun.kernels.cpu.operations import CpuOperations
from trtrun.kvcache.sizing import format_bytes
from trtrun.loading.loading import shard_bytes
from trtrun.loading.weight_check import check_model_weights
from trtrun.memory.expert_cuts import HeldModel, describe_expert_cuts
from trtrun.models.config import read_model_config
from trtrun.models.experts_plan import find_experts
from trtrun.start.job_spec import JobSpec
from trtrun.weights.weight import Share

MIXTURES = [name for name, values in FAMILIES.items() if "num_experts_per_tok" in values]


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    """Of 5 to 7 experts, which four ranks have in unequal numbers."""
    model = check_logits(write_family(tmp_path, family, vocab_size=204), 4, by_experts=True)
    assert [report.shard_bytes for report in model.reports] == [report.bytes_read for report in model.reports]


def experts_of(model: PagedModel, rank: int) -> Any:
    """The last layer's experts, without the one of all tokens, which is cut by features."""
    layer: Any = model.models[rank]._layers[-1]
    layer.mlp._shared = None
    return layer.mlp


def on_ranks(model: PagedModel, x: torch.Tensor) -> torch.Tensor:
    """What all ranks make of x."""
    found = model._group.run(lambda rank: experts_of(model, rank)(x))
    assert all(torch.equal(found[0], other) for other in found)
    return torch.as_tensor(found[0])


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=needed) for kind, needed in PATHS.items()), "torch"])
@pytest.mark.parametrize(("family", "tp_size"), [("gpt_oss", 3), ("qwen2_moe", 2)])
def test_experts_have_the_bits_of_one_rank(
    tmp_path: Path, family: str, tp_size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden state of 64 is no multiple of 3 ranks. Experts that are cut by features have other bits."""
    choose_kernels(kind, monkeypatch)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6} if family == "gpt_oss" else {}
    path = write_family(tmp_path, family, dtype=torch.bfloat16, num_hidden_layers=2, intermediate_size=96, **heads)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = experts_of(PagedModel(path, torch.bfloat16), 0)
    split, by_features = (PagedModel(path, torch.bfloat16, tp_size, by_experts=cut) for cut in (True, False))
    for packs in (True, False):  # as on CPUs, and as on GPUs, where all pairs travel
        for rank in range(tp_size):
            experts_of(split, rank)._experts._packs = packs
        for rows in (x, x[:1], x[7:9], x[:0]):
            assert torch.equal(on_ranks(split, rows), whole(rows))
    assert not torch.equal(on_ranks(by_features, x), whole(x))


def test_stored_experts_lie_whole_on_ranks(tmp_path: Path) -> None:
    """In 4 bits, with one scale a row; over 4 ranks, of which each lacks most experts."""
    sizes = {"hidden_size": 256, "head_dim": 128, "num_key_value_heads": 4, "moe_intermediate_size": 128}
    paths = [tmp_path / name for name in ("dense", "stored")]
    for path in paths:
        write_family(path, "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], **sizes)
    store_in_format(*paths, FORMATS["awq of whole rows"])
    dense, stored = (PagedModel(path, tp_size=4, by_experts=True).forward([[(0, 0, [1, 2, 3])]]) for path in paths)
    torch.testing.assert_close(dense, stored, atol=1e-4, rtol=1e-4)


def test_the_layer_that_drafts_is_cut_as_the_others(tmp_path: Path) -> None:
    """Stored blocks of its experts might not be cut by features either."""
    config = read_model_config(write_family(tmp_path, "glm4_moe", num_nextn_predict_layers=1))
    section = SpeculationSection(method="mtp")
    for model, by_experts in ((config.cut_by_experts(), True), (config, False)):
        head: Any = read_heads(tmp_path, model, section, 2)
        assert [plan.by_experts for plan in find_experts(head.first)] == [by_experts]


def test_what_cannot_be_cut_by_experts_is_refused(tmp_path: Path) -> None:
    spec = JobSpec(configuration(write_family(tmp_path / "glm4", "glm4"), None, expert_parallel=True))
    with pytest.raises(ConfigError, match=r"target\.expert_parallel: Glm4ForCausalLM has no experts: leave expert_par"):
        _ = spec.target
    with pytest.raises(CheckpointError, match=r"^target\.expert_parallel: Glm4"):  # its section is named once
        check_models(spec)
    mixtral = write_family(tmp_path / "mixtral", "mixtral")
    config = JobSpec(configuration(mixtral, None, expert_parallel=True)).target
    with pytest.raises(CheckpointError, match="5 experts cannot be shared out over 8 ranks: use 5 devices at most"):
        [weight.cut(Share(0, 8)) for weight in config.layers[0].mlp.weights()]  # type: ignore[attr-defined]
    edit_tensors(mixtral, {(missing := "model.layers.0.block_sparse_moe.experts.4.w1.weight"): None})
    with pytest.raises(CheckpointError, match=missing):  # which the first rank does not hold
        check_model_weights(mixtral, config, 2)
    mixtral = write_family(tmp_path / "mixtral", "mixtral")
    engine = build_engine(mixtral, tmp_path / "engine", 1)
    with pytest.raises(ConfigError, match=r"target\.expert_parallel: .* is an engine, which is cut by features: name "):
        _ = JobSpec(configuration(engine, None, expert_parallel=True)).target


def test_ranks_that_compute_with_different_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They might choose different experts for a token, and wait for each other's messages for ever."""
    model = PagedModel(write_family(tmp_path, "mixtral", num_hidden_layers=1), tp_size=2, by_experts=True)
    names = iter(("avx2", "avx512"))
    monkeypatch.setattr(CpuOperations, "name", lambda self, dtype: next(names))
    with pytest.raises(ConfigError, match="expert_parallel: ranks compute with different kernels"):
        model.forward([[(0, 0, [1, 2, 3])]])


def test_the_plan_compares_both_cuts(tmp_path: Path) -> None:
    """Mixtral's, with 5 experts of 3 * 64 * 112 numbers in each of 5 layers, of which a token chooses 2."""
    config = read_model_config(write_family(tmp_path, "mixtral"))
    held = HeldModel(config, 2, torch.float32, torch.device("cpu"), "none")
    told = str(describe_expert_cuts(held)).split("; by experts (expert_parallel true): ")
    expert, hidden = 3 * 64 * 112 * 4, 64 * 4
    models = config, config.cut_by_experts()
    sizes = [max(shard_bytes(model, rank, 2, torch.float32) for rank in (0, 1)) for model in models]
    assert sizes[1] - sizes[0] == 5 * expert // 2  # 3 experts in place of two and a half
    reads = format_bytes(5 * expert), f"{format_bytes(5 * expert)}, up to {format_bytes(10 * expert)}"
    for said, size, read in zip(told, sizes, reads, strict=True):
        assert f"{format_bytes(size)} of weights on a rank; of experts a token reads {read}, for which" in said
        assert f"{format_bytes(5 * hidden)} are sent" in said
    assert describe_expert_cuts(held._replace(tp_size=1)) is None
    assert "(expert_parallel true): not possible (tensor" in str(describe_expert_cuts(held._replace(tp_size=8)))
