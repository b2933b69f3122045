"""Experts that checkpoints have quantized: the numbers that they stand for on CPUs, and the codes that GPUs hold."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from paged import PagedModel
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of
from quantized_checkpoints import edit_quantization, edit_tensors, make_mixture_pair
from safetensors.torch import load_file

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.kernels.torch.fp4 import TorchExpertMatmul
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.stored.layout import StoredLinear
from trtrun.loading.loading import shard_bytes
from trtrun.loading.stored_report import describe_stored
from trtrun.loading.weight_check import check_split, check_weights
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share
from trtrun.weights.weight_loader import CheckpointLoader

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
DENSE = QUANTIZATIONS.get("none")


@pytest.mark.parametrize(
    ("family", "form", "tp_size"),
    [
        ("qwen3_moe", "compressed-tensors FP8 block", 4),
        ("qwen3_moe", "compressed-tensors NVFP4", 2),
        ("qwen3_moe", "compressed-tensors W4A16 with zero points", 1),
        ("mixtral", "gptq", 4),
        ("mixtral", "modelopt FP8", 2),
        ("mixtral", "compressed-tensors MXFP4", 1),
    ],
)
def test_logits_are_those_of_the_numbers(tmp_path: Path, family: str, form: str, tp_size: int) -> None:
    stored, dense = make_mixture_pair(tmp_path, family, form)
    found, expected = (PagedModel(path, tp_size=tp_size).forward(BATCH) for path in (stored, dense))
    assert torch.equal(found, expected)


def test_experts_that_cannot_be_cut_may_lie_whole_on_ranks(tmp_path: Path) -> None:
    """Half of 384 features is a block and a half. Other matrices are cut in any case: of these it is not said."""
    stored = make_mixture_pair(tmp_path / "experts", "qwen3_moe", "fp8 block", moe_intermediate_size=384)[0]
    dense_layer = make_mixture_pair(tmp_path / "dense", "qwen3_moe", "fp8 block", intermediate_size=384)[0]
    config, others = read_model_config(stored), read_model_config(dense_layer)
    told = r"192 of 384 output features of .*gate_proj\.weight would lie .* of 128 share a scale: use fewer devices"
    for check in (partial(check_weights, open_checkpoint(stored), config, Share(0, 2), DENSE), partial(split, config)):
        with pytest.raises(CheckpointError, match=f"{told}, or set expert_parallel: true$"):
            check()
    split(config.cut_by_experts())
    with pytest.raises(CheckpointError, match=f"{told}$"):
        split(others)


def split(config: ModelConfig) -> None:
    """Look whether two ranks can share a model."""
    check_split(config, Share(0, 2), "bfloat16", "cpu", DENSE)


HELD = {
    "fp8 block": {"codes", "block_scale"},
    "compressed-tensors FP8 dynamic": {"codes", "scale"},
    "compressed-tensors NVFP4": {"words", "blocks", "factor"},
    "compressed-tensors MXFP4": {"words", "blocks", "factor"},
    "awq": {"words", "scales"},
    "compressed-tensors W4A16 with act-order": {"weight"},
}


def dense_of(tensors: dict[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers that one expert's tensors stand for, float32."""
    if "weight" in tensors:
        return tensors["weight"].float()
    if "words" in tensors:
        return TorchExpertMatmul(tensors, shape[0], shape[1], None).weight(torch.bfloat16).float()
    scale = tensors.get("scale", torch.empty(0)).view(-1, 1)
    if "block_scale" in tensors:
        scale = tensors["block_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return tensors["codes"].float() * scale


@pytest.mark.parametrize(
    ("form", "tp_size", "by_experts"),
    [*((form, 1 + place % 2, False) for place, form in enumerate(HELD)), ("fp8 block", 4, True), ("awq", 2, True)],
)
def test_gpus_hold_codes_of_experts(tmp_path: Path, form: str, tp_size: int, by_experts: bool) -> None:
    """What they would hold, made on the CPU: these numbers, but for what bfloat16 rounds, in the bytes of the plan."""
    stored, dense = make_mixture_pair(tmp_path, "qwen3_moe", form)
    config, plain = (
        read_model_config(path).cut_by_experts() if by_experts else read_model_config(path) for path in (stored, dense)
    )
    share, numbers = Share(tp_size - 1, tp_size), load_file(dense / "model.safetensors")
    gpu, kinds, saved = torch.device("cuda", 0), set(), 0
    loader = CheckpointLoader(
        open_checkpoint(stored), share, torch.device("cpu"), torch.bfloat16,
        lambda weight: config.quantization_of(weight, DENSE), 1, None, "cuda",
    )  # fmt: skip
    for weight in config.weights:
        if not isinstance(loader.held(weight), StoredLinear) or not weight.cut(share).num_elements:
            continue
        cut, tensors = weight.cut(share), dict(loader.load(weight))
        saved += 2 * cut.num_elements - sum(it.numel() * it.itemsize for it in tensors.values())
        if weight.use == "expert":
            kinds.add(frozenset(tensors))
            parts = (numbers[it.name][tuple(slice(at.start, at.stop) for at in it.ranges)] for it in cut.parts)
            expected = torch.cat(list(parts)).float()
            assert (dense_of(tensors, cut.shape) - expected).norm() < 0.004 * expected.norm()
    assert kinds == {frozenset(HELD[form])}
    whole = shard_bytes(plain, share.rank, tp_size, torch.bfloat16, gpu)
    assert shard_bytes(config, share.rank, tp_size, torch.bfloat16, gpu) == whole - saved
    said = str(describe_stored(config, share, torch.bfloat16, "cuda"))
    assert ("stay as they are" in said) == (HELD[form] != {"weight"})


def test_scales_that_stand_for_no_number_are_refused(tmp_path: Path) -> None:
    stored, _ = make_mixture_pair(tmp_path, "mixtral", "compressed-tensors MXFP4")
    name = next(name for name in load_file(stored / "model.safetensors") if "experts.1" in name and "_scale" in name)
    scales = load_file(stored / "model.safetensors")[name]
    scales[3, 1] = 255
    edit_tensors(stored, {name: scales})
    config = read_model_config(stored)
    loader = CheckpointLoader(
        open_checkpoint(stored), Share(0, 1), torch.device("cpu"), torch.bfloat16,
        lambda weight: config.quantization_of(weight, DENSE), 1, None, "cuda",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"experts\.1\.w.\.weight' has scales that stand for no number"):
        for weight in config.weights:
            loader.load(weight)


def test_experts_of_a_layer_are_held_alike_on_gpus(tmp_path: Path) -> None:
    stored, _ = make_mixture_pair(tmp_path, "qwen3_moe", "fp8 block")
    assert check_split(read_model_config(stored), Share(0, 1), "bfloat16", "cuda", DENSE)
    edit_quantization(stored, modules_to_not_convert=["lm_head", "model.layers.0.mlp.experts.3.down_proj"])
    config = read_model_config(stored)
    assert check_split(config, Share(0, 1), "bfloat16", "cpu", DENSE)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.3\.down_proj.weight is not stored as other"):
        check_split(config, Share(0, 1), "bfloat16", "cuda", DENSE)


@pytest.mark.parametrize("how", ["fp8", "fp8_block", "fp8 block"])
def test_drafted_texts_are_plain_ones(tmp_path: Path, how: str) -> None:
    """Of mixtures that are rounded as they are read, and of one that is stored so."""
    stored, dense = make_mixture_pair(tmp_path, "qwen3_moe", "fp8 block")
    path, section = (stored, {}) if how == "fp8 block" else (dense, {"target_quantization": how})
    draft = noisy_copy(tmp_path / "draft", dense, 0.05)
    prompts = [prompt_of(length, seed=length) for length in (4, 19, 40)]
    sampling = [SamplingParams(max_tokens=20, ignore_eos=True)] * 3
    with make_llm(path, speculation={"method": "none"}, dtype="bfloat16", **section) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
        assert tokens_of(llm.generate(prompts[:1], sampling[:1])) == expected[:1]
    with make_llm(path, draft, dtype="bfloat16", **section) as llm:
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        assert llm.statistics()["num_accepted_draft_tokens"] > 10
