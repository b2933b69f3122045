"""Checkpoints that others have quantized: read as they are, in every format, on any number of ranks.

tests/helpers/quantized_checkpoints.py writes them, and the plain ones of the same numbers that they are held to.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedModel
from pipelines import configuration, make_llm
from quantized_checkpoints import FORMATS, MIXED, edit_quantization, make_pair
from safetensors.torch import load_file

from launch.jobs.plan.start_ranks import inspect_files
from trtrun import tensors
from trtrun.kernels.torch import fp8
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import TensorSlice
from trtrun.linear.stored import byte_layouts, layout
from trtrun.linear.stored.layout import StoredLinear
from trtrun.loading.loading import shard_bytes
from trtrun.loading.stored_report import describe_stored
from trtrun.models.config import read_model_config
from trtrun.start.kernels_ahead import kinds_of_kernels
from trtrun.weights.model_files import hash_model_files
from trtrun.weights.weight import HeldWeight, Share

DENSE = QUANTIZATIONS.get("none")
BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]


def check_logits(stored: Path, dense: Path, tp_size: int) -> tuple[PagedModel, PagedModel]:
    """Both models, whose logits are equal to the bit."""
    model, reference = PagedModel(stored, tp_size=tp_size), PagedModel(dense, tp_size=tp_size)
    assert torch.equal(model.forward(BATCH), reference.forward(BATCH))
    return model, reference


@pytest.mark.parametrize("name", FORMATS)
def test_each_rank_reads_the_numbers_of_its_slices(tmp_path: Path, name: str) -> None:
    """What `dequantize` says is what the format's formula says, to the bit, of whole matrices and of cut ones."""
    stored, dense = make_pair(tmp_path, name)
    tensors, numbers = load_file(stored / "model.safetensors"), load_file(dense / "model.safetensors")
    config, count = read_model_config(stored), 0
    for size, weight in ((size, weight) for size in (1, 2, 4) for weight in config.weights):
        held = config.quantization_of(weight, DENSE)
        if not isinstance(held, StoredLinear):
            continue
        for rank in range(size):
            for part in weight.cut(Share(rank, size)).parts:
                found = {}
                for end, it in held.layout.slices(part).items():
                    if it.name in tensors:
                        wanted = tensors[it.name].reshape(it.shape)
                        found[end] = wanted[tuple(slice(item.start, item.stop) for item in it.ranges)]
                rows, columns = (slice(item.start, item.stop) for item in part.ranges)
                expected = numbers[part.name][rows, columns]
                form = held.layout.form(part, found)
                assert torch.equal(form.dequantize(), expected)
                assert torch.equal(form.dequantize(slice(3, 40)), expected[3:40])
                count += 1
    plain = sum(any(part in key for part in FORMATS[name].plain) for key in numbers)
    assert count == (1 + 2 + 4) * (15 - plain)  # 7 matrices a layer, and the head


@pytest.mark.parametrize(("name", "tp_size"), [(name, (2, 1, 4)[place % 3]) for place, name in enumerate(FORMATS)])
def test_logits_are_those_of_the_dense_checkpoint(tmp_path: Path, name: str, tp_size: int) -> None:
    """In float32 on the CPU, to the bit; and the bytes that plans count are those that are held."""
    stored, dense = make_pair(tmp_path, name)
    model, reference = check_logits(stored, dense, tp_size)
    for rank, report in enumerate(model.reports):
        size = shard_bytes(read_model_config(stored), rank, tp_size, torch.float32)
        assert report.shard_bytes == size == reference.reports[rank].shard_bytes
        assert report.bytes_read < 0.75 * reference.reports[rank].bytes_read


@pytest.mark.parametrize("tp_size", [1, 2])
def test_modules_may_have_algorithms_of_their_own(tmp_path: Path, tp_size: int) -> None:
    """Attention in FP8, which GPUs hold as it is, and the rest in NVFP4, named by the module that it lies in."""
    stored, dense = make_pair(tmp_path, MIXED)
    check_logits(stored, dense, tp_size)
    config = read_model_config(stored)
    held = {weight.parts[0].name: config.quantization_of(weight, DENSE) for weight in config.weights}
    names = {name.split(".")[-2]: one.layout.name for name, one in held.items() if isinstance(one, StoredLinear)}
    assert names == {
        **dict.fromkeys(("q_proj", "o_proj"), "modelopt FP8"),
        **dict.fromkeys(("gate_proj", "down_proj"), "modelopt NVFP4"),
    }


@pytest.mark.parametrize("name", ["fp8 block", "fp8 block ue8m0"])
def test_transformers_reads_the_same_numbers_of_blocks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the writer takes for granted: another reader's weights are the dense ones, to the bit."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # It places weights on devices, of which there is one here.
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    stored, dense = make_pair(tmp_path, name)
    dequantized = FineGrainedFP8Config(dequantize=True)
    other = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32, quantization_config=dequantized)
    expected = load_file(dense / "model.safetensors")
    found = other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], weight) for key, weight in expected.items())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_head_that_is_quantized_is_padded_like_any(tmp_path: Path, tp_size: int) -> None:
    """The vocabulary is not a multiple of the ranks; a tied head is the embedding, which is plain."""
    channel = FORMATS["compressed-tensors FP8 dynamic"]
    everything = replace(channel, config={**channel.config, "ignore": []}, plain=())
    stored, dense = make_pair(tmp_path, everything, vocab_size=199)
    config = read_model_config(stored)
    assert isinstance(config.quantization_of(config.head, DENSE), StoredLinear)
    assert torch.equal(
        PagedModel(stored, tp_size=tp_size).forward(BATCH), PagedModel(dense, tp_size=tp_size).forward(BATCH)
    )
    stored, dense = make_pair(tmp_path / "tied", everything, tie_word_embeddings=True)
    assert torch.equal(
        PagedModel(stored, tp_size=tp_size).forward(BATCH), PagedModel(dense, tp_size=tp_size).forward(BATCH)
    )


@pytest.mark.parametrize(("name", "tp_size"), [("awq", 1), ("fp8 block", 2), ("gptq with act-order", 2)])
def test_biases_and_norms_of_heads_are_plain_beside(tmp_path: Path, name: str, tp_size: int) -> None:
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        pair = make_pair(tmp_path / architecture, name, architecture=architecture, head_dim=64)
        check_logits(*pair, tp_size)


@pytest.mark.parametrize(
    ("name", "tp_size"), [("awq", 1), ("fp8 block", 2), ("modelopt W4A16_AWQ", 2), ("compressed-tensors W8A8", 1)]
)
def test_large_weights_become_dense_piece_by_piece(
    tmp_path: Path, name: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "numbers_at_a_time", lambda device: 5000)
    check_logits(*make_pair(tmp_path, name), tp_size)


FP8 = {
    "compressed-tensors FP8",
    "compressed-tensors FP8 dynamic",
    "fp8",
    "fp8 of whole matrices",
    "modelopt FP8",
    "modelopt FP8 per channel",
}
BLOCKS = {"compressed-tensors FP8 block", "fp8 block", "fp8 block ue8m0"}
INT4 = {
    "compressed-tensors W4A16": 64,
    "compressed-tensors W4A16 with zero points": 32,
    "awq": 64,
    "awq of whole rows": 128,
    "gptq": 64,
    "gptq without g_idx": 128,
    "gptq v2": 64,
    "gptq that is v2 and says v1": 64,
    "gptq that is v1 and says v2": 64,
    "gptq with zero points": 64,
}
"""And how many numbers share a scale where they are held."""
KEPT = FP8 | BLOCKS | INT4.keys()


def held_bytes(name: str, features: int, inputs: int) -> int:
    """A byte a number and a scale a feature or a block; or half a byte and a scale a group, for whole 512 inputs."""
    if name in FP8:
        return features * (inputs + 4)
    if name in BLOCKS:
        return features * inputs + 4 * (features // 128) * (inputs // 128)
    return features * -(-inputs // 512) * (256 + 512 // INT4[name] * 4)


def keep_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs that multiply them."""
    monkeypatch.setattr(StoredLinear, "can_keep", lambda self, dtype, device_type: True)
    monkeypatch.setattr(layout, "has_int4_products", lambda device_type: True)
    monkeypatch.setattr(layout, "has_fp8_products", lambda device_type: True)


def keep_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, though the checkpoint was made for rounded ones."""
    plain = fp8.num_groups
    monkeypatch.setattr(fp8, "round_in_groups", lambda x: (x.float(), torch.ones(len(x), plain(x.shape[1]))))
    rounds = property(lambda self: self.strategy == "block")
    monkeypatch.setattr(byte_layouts.Fp8Layout, "rounds_activations", rounds)


@pytest.mark.parametrize("name", FORMATS)
def test_gpus_hold_what_their_kernels_take(tmp_path: Path, name: str) -> None:
    """E4M3 codes with a scale for each output feature or block, and 4 bits in groups; the rest, and activations in
    float32, are dense."""
    stored, dense = make_pair(tmp_path, name)
    config, plain, gpu = read_model_config(stored), read_model_config(dense), torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        expected = shard_bytes(plain, 0, 1, dtype, gpu)
        if name in KEPT and dtype.itemsize == 2:
            weights = [it.cut(Share(0, 1)) for it in config.weights if config.quantization_of(it, DENSE) is not DENSE]
            expected -= sum(2 * it.num_elements - held_bytes(name, *it.shape) for it in weights)
        assert shard_bytes(config, 0, 1, dtype, gpu) == expected
    said = describe_stored(config, Share(0, 1), torch.bfloat16, "cuda")
    assert said is not None and ("stay as they are" if name in KEPT else "become bfloat16 as they are read") in said
    assert "become" in str(describe_stored(config, Share(0, 1), torch.bfloat16, "cpu"))
    assert describe_stored(plain, Share(0, 1), torch.bfloat16, "cpu") is None


@pytest.mark.parametrize(("name", "tp_size"), [(name, 2 - place % 2) for place, name in enumerate(sorted(KEPT))])
def test_codes_that_are_kept_are_multiplied_as_they_are(
    tmp_path: Path, name: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, with the CPU's product: each part of what is multiplied as one has its own scales."""
    keep_codes(monkeypatch)
    keep_activations(monkeypatch)
    stored, dense = make_pair(tmp_path, name)
    model = PagedModel(stored, torch.bfloat16, tp_size=tp_size)
    found, expected = (it.forward(BATCH).float() for it in (model, PagedModel(dense, torch.float32, tp_size=tp_size)))
    # What bfloat16 rounds in activations; a scale of another part would change the logits by more than all of them.
    assert (found - expected).norm() < 0.03 * expected.norm()
    for rank, report in enumerate(model.reports):
        assert report.shard_bytes == shard_bytes(read_model_config(stored), rank, tp_size, torch.bfloat16)


@pytest.mark.parametrize("name", sorted(FP8 | BLOCKS))
def test_activations_are_rounded_where_the_checkpoint_was_made_for_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these were; without, they are as they are."""
    keep_codes(monkeypatch)
    stored, dense = make_pair(tmp_path, name)
    expected = PagedModel(dense, torch.float32).forward(BATCH).float()
    rounded = PagedModel(stored, torch.bfloat16).forward(BATCH).float()
    how = "by 128 numbers of a token" if name in BLOCKS else "by token"
    assert f"activations are rounded to E4M3 {how}, where" in str(
        describe_stored(read_model_config(stored), Share(0, 1), torch.bfloat16, "cuda")
    )
    keep_activations(monkeypatch)
    exact = PagedModel(stored, torch.bfloat16).forward(BATCH).float()
    if name in FP8:
        assert "activations are not rounded" in str(
            describe_stored(read_model_config(stored), Share(0, 1), torch.bfloat16, "cuda")
        )
    assert 2 * (exact - expected).norm() < (rounded - expected).norm() < 0.15 * expected.norm()


def test_blocks_that_a_rank_does_not_have_whole_become_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values of 64 features each, which are multiplied with as one; the others are kept, and those
    that have a piece of each block of inputs. It is said."""
    keep_codes(monkeypatch)
    keep_activations(monkeypatch)
    stored, dense = make_pair(tmp_path, "fp8 block")
    config = read_model_config(stored)
    said = str(describe_stored(config, Share(3, 4), torch.bfloat16, "cuda"))
    assert said.startswith("fp8 weights stay as they are: ")
    assert "; fp8 weights become bfloat16 as they are read, as 64 output features beside others are not whole" in said
    assert "beside" not in str(describe_stored(config, Share(1, 2), torch.bfloat16, "cuda"))
    model = PagedModel(stored, torch.bfloat16, tp_size=4)
    found, expected = (it.forward(BATCH).float() for it in (model, PagedModel(dense, torch.float32, tp_size=4)))
    assert (found - expected).norm() < 0.03 * expected.norm()
    for rank, report in enumerate(model.reports):
        assert report.shard_bytes == shard_bytes(config, rank, 4, torch.bfloat16)


def test_blocks_are_kept_where_a_gpu_has_their_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 128 by 128, with activations that are rounded 128 at a time, where matrix units take E4M3."""
    part = TensorSlice("a.weight", (256, 256), (range(256), range(256)))
    kept = byte_layouts.Fp8Layout("fp8", "group", "block")
    weight, bfloat16 = HeldWeight((256, 256), (part,)), torch.bfloat16
    assert StoredLinear(kept).codes(weight, bfloat16, "cuda") == "fp8_block"
    for other in (replace(kept, activations="none"), replace(kept, activations="token"), replace(kept, block=(64, 64))):
        assert StoredLinear(other).codes(weight, bfloat16, "cuda") is None
    assert StoredLinear(kept).codes(weight, bfloat16, "cpu") is None
    assert StoredLinear(kept).codes(weight, torch.float32, "cuda") is None
    monkeypatch.setattr(layout, "has_fp8_products", lambda device_type: False)
    assert StoredLinear(kept).codes(weight, bfloat16, "cuda") is None
    path = make_pair(tmp_path, "compressed-tensors FP8 block")[0]
    groups = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    given = groups["group_0"]["input_activations"]
    others = ({"group_size": 64}, {"strategy": "tensor", "group_size": None}, {"strategy": None, "group_size": None})
    for changes in ({}, {"strategy": None}, *others):  # without a strategy it is that of the size, as its package reads
        groups["group_0"]["input_activations"] = given | changes
        edit_quantization(path, config_groups=groups)
        held = read_model_config(path).quantization_of(read_model_config(path).layers[0].weights()[2], DENSE)
        rounds = "none" if changes in others else "group"
        assert isinstance(held, StoredLinear)
        assert held.layout == replace(kept, name=held.layout.name, activations=rounds)


def test_a_head_of_codes_that_are_kept_has_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_codes(monkeypatch)
    monkeypatch.setattr(byte_layouts.Fp8Layout, "rounds_activations", False)
    channel = FORMATS["compressed-tensors FP8 dynamic"]
    everything = replace(channel, config={**channel.config, "ignore": []}, plain=())
    stored, dense = make_pair(tmp_path, everything, vocab_size=199)
    model, reference = (PagedModel(path, torch.bfloat16, tp_size=2) for path in (stored, dense))
    found, expected = model.forward(BATCH).float(), reference.forward(BATCH).float()
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", list(FORMATS)[::4])
def test_made_up_weights_are_dense(tmp_path: Path, name: str) -> None:
    stored, dense = make_pair(tmp_path, name)
    model, reference = (PagedModel(path, load_format="dummy") for path in (stored, dense))
    assert torch.equal(model.forward(BATCH), reference.forward(BATCH))
    assert model.reports == reference.reports


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_counts_the_bytes_that_are_read(tmp_path: Path, name: str) -> None:
    """By the headers; and about as many where the files are on other hosts."""
    stored = make_pair(tmp_path, name)[0]
    section, model = configuration(stored, None).target, read_model_config(stored)
    there = inspect_files(section, model, for_target=True)
    assert there.are_here and there.read_bytes == (PagedModel(stored).reports[0].bytes_read,)
    (stored / "model.safetensors").unlink()
    elsewhere = inspect_files(section, model, for_target=True)
    assert not elsewhere.are_here and not elsewhere.is_made_up
    assert elsewhere.read_bytes[0] == pytest.approx(there.read_bytes[0], rel=0.1)


def test_modelopts_own_file_counts_like_config_json(tmp_path: Path) -> None:
    """For an engine that goes on where another one ended, and for kernels that an earlier start left."""
    stored = make_pair(tmp_path, "modelopt FP8")[0]
    config = configuration(stored, None)

    def tell() -> tuple[str, str]:
        parts = [("target", config.target, 0, 1)]
        return hash_model_files(stored), repr(kinds_of_kernels(config, parts, None))

    before = tell()
    assert tell() == before
    file = stored / "hf_quant_config.json"
    file.write_text(file.read_text().replace("layers.0.mlp", "layers.1.mlp"))
    assert all(one != other for one, other in zip(tell(), before, strict=True))


def test_an_engine_that_is_told_its_room_finds_the_kernels_of_the_one_before(tmp_path: Path) -> None:
    stored = make_pair(tmp_path, "modelopt FP8")[0]

    def tell(**cache: Any) -> str:
        config = configuration(stored, None, kv_cache=cache)
        return repr(kinds_of_kernels(config, [("target", config.target, 0, 1)], None))

    assert tell(free_memory_fraction=0.8) == tell(max_tokens=4096) != tell(block_size=32)


def test_a_start_says_what_becomes_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, dense = make_pair(tmp_path, "fp8 block")
    with caplog.at_level(logging.INFO), make_llm(stored, dense):
        pass
    said = [record.getMessage() for record in caplog.records if "weights" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("target: fp8 weights become float32 as they are read: ")
    assert said[0].endswith(" on a rank; activations are not rounded")
