"""Reading slices of safetensors: what is read, what stays resident, and one clear line for each damage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, save_weights
from paged import CPU, LockStepCommunicator, LockStepGroup
from safetensors.torch import load_file, save_file

from parallel.transports.solo import SoloCommunicator
from trtrun.errors import CheckpointError
from trtrun.kvcache.specs import PagedKeysAndValues
from trtrun.loading.loading import load_model, shard_bytes
from trtrun.models.config import read_model_config
from trtrun.weights.rank_files import open_checkpoint


def load(path: Path, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1, **options: Any) -> Any:
    communicator = LockStepCommunicator(LockStepGroup(size), rank) if size > 1 else SoloCommunicator()
    return load_model(path, read_model_config(path), communicator, CPU, dtype, **options)


def change_weights(path: Path, name: str, value: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors")
    weights.pop(name)
    if value is not None:
        weights[name] = value
    save_weights(path, weights)


def test_ranks_read_their_slices_only(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_shards=3, vocab_size=200, dtype=torch.bfloat16)
    whole = load(path, torch.bfloat16)[1].bytes_read
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0.9 * weights < whole < weights
    halves = [load(path, torch.bfloat16, rank, 2)[1] for rank in range(2)]
    norms = 5 * 64 * 2  # read by both ranks
    assert sum(half.bytes_read for half in halves) == whole + norms
    config = read_model_config(path)
    for rank, half in enumerate(halves):
        assert half.shard_bytes == half.bytes_read == shard_bytes(config, rank, 2, torch.bfloat16)


def test_converted_dtype_counts_file_bytes_and_resident_bytes(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    report = load(path, torch.float32)[1]
    assert report.shard_bytes == 2 * report.bytes_read


def test_replicated_kv_heads_and_padded_vocabulary_in_bytes(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path, num_key_value_heads=1, vocab_size=5))
    assert shard_bytes(config, 0, 4, torch.float32) == shard_bytes(config, 3, 4, torch.float32)
    one, four = shard_bytes(config, 0, 1, torch.float32), shard_bytes(config, 0, 4, torch.float32)
    per_layer = (2 * 64 * 64 + 3 * 112 * 64) // 4 + 2 * 16 * 64 + 2 * 64
    assert four == 4 * (2 * per_layer + 64 + 2 * 2 * 64) and one > four


def test_tied_embeddings_are_counted_as_they_are_held(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=True))
    numbers = 199 * 64
    packed = shard_bytes(config, 0, 1, torch.float32)  # on any processor
    assert packed - shard_bytes(config, 0, 1, torch.float32, torch.device("cuda", 0)) == numbers * 4
    assert packed // 2 - shard_bytes(config, 0, 1, torch.float16) == numbers * 2


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_weights_are_counted_as_they_are_held(tmp_path: Path, tied: bool) -> None:
    """A byte a weight and four an output feature, in linear layers alone; a quantized head is not the embedding."""
    config = read_model_config(make_checkpoint(tmp_path, tie_word_embeddings=tied))
    features = [199, *[2 * 64, 64, 2 * 112, 64] * config.num_layers]
    inputs = [64, *[64, 64, 64, 112] * config.num_layers]
    weights = sum(one * other for one, other in zip(features, inputs, strict=True))
    plain = (199 * 64 + (2 * config.num_layers + 1) * 64) * 2
    for device in (CPU, torch.device("cuda", 0)):
        size = shard_bytes(config, 0, 1, torch.bfloat16, device, "int8")
        assert size == plain + weights + 4 * sum(features)
    model, report = load(tmp_path, torch.bfloat16, quantization="int8")
    assert report.shard_bytes == plain + weights + 4 * sum(features)
    assert report.bytes_read > report.shard_bytes
    assert model.keeps == [(PagedKeysAndValues(config.num_kv_heads, config.head_dim),)] * config.num_layers


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = load(make_checkpoint(tmp_path), progress=lambda done, total: seen.append((done, total)))[1]
    assert seen[-1] == (report.bytes_read, report.bytes_read) and len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and len(seen) > 10


def test_config_of_a_single_file_without_an_index_and_extra_tensors(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.int64)  # as old Llamas have
    save_weights(path, weights)
    load(path)


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_missing_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    refused(path, r"lacks shard model-00002-of-00003\.safetensors \(3 in its index\)")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """One is a leftover, and nobody knows which: an index that names the first is no reason to take the last."""
    path = make_checkpoint(tmp_path, num_shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    first, second = sorted(set(index.values()))
    name = next(name for name, file in index.items() if file == first)
    held = load_file(path / second)
    save_file(held | {name: load_file(path / first)[name] + 1}, path / second)
    told = f"tensor '{name}' is in {first} and in {second}, and may be in one file alone: copy or save the model again"
    refused(path, re.escape(told))
    with pytest.raises(CheckpointError, match=re.escape(told)):
        open_checkpoint(path)  # as plan, check, convert, quantize and build do, before anything is read


@pytest.mark.parametrize("kept", [0, 5, 200, -100])
def test_truncated_shard(tmp_path: Path, kept: int) -> None:
    path = make_checkpoint(tmp_path, num_shards=2)
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(path, r"model-00002-of-00002\.safetensors is truncated \(.*bytes.*\); copy it again")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a Git LFS pointer in place of the file"),
        (b"PK\x03\x04" + bytes(100), "is no safetensors file: it is a zip archive, as PyTorch writes pickles"),
        (b"GGUF" + bytes(100), "is no safetensors file: it is a GGUF file"),
        (bytes(100), "is no safetensors file"),
    ],
)
def test_a_whole_file_of_another_format_is_not_called_truncated(tmp_path: Path, data: bytes, said: str) -> None:
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(data)
    refused(path, said)


def test_a_header_that_is_wrong_in_a_whole_file_is_not_called_truncated(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    file = path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"dtype":"F32"', b'"dtype":"Q32"', 1))
    refused(path, r"has a header that is wrong \(.*Q32.*\): copy it again, or save the model anew")
    file.write_bytes(raw + b"more")
    refused(path, "has a header that is wrong")


def test_missing_tensor(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    change_weights(path, "model.layers.1.mlp.up_proj.weight", None)
    refused(path, r"has no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'")


def test_wrong_shape(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    change_weights(path, "model.norm.weight", torch.ones(63))
    refused(path, r"tensor 'model\.norm\.weight' has shape \[63\], but config\.json calls for \[64\]")


def test_unsupported_dtype(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    change_weights(path, "model.norm.weight", torch.ones(64, dtype=torch.float64))
    refused(path, r"tensor 'model\.norm\.weight' has dtype F64, which is not supported; known: F32, F16, BF16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    path = make_checkpoint(tmp_path)
    weight = load_file(path / "model.safetensors")[name]
    weight[3, 5] = value
    change_weights(path, name, weight)
    refused(path, f"tensor '{name}' holds NaN or infinite values")


def test_values_that_overflow_the_dtype(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    change_weights(path, "model.norm.weight", torch.full((64,), 60000.0))
    load(path, torch.float16)  # the sum overflows float16, the values do not
    change_weights(path, "model.norm.weight", torch.full((64,), 70000.0))
    refused(path, "holds NaN or infinite values in float16", dtype=torch.float16)


def test_pickle_files_are_never_opened(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / "model.safetensors").unlink()
    refused(path, r"has no weights: neither model\.safetensors nor model\.safetensors\.index\.json")
    (path / "pytorch_model.bin").write_bytes(b"\x80")
    (path / "optimizer.pt").write_bytes(b"\x80")
    refused(
        path,
        r"only as pickle \(pytorch_model\.bin\), which may run code .*torch\.load\('pytorch_model\.bin', weights_",
    )
    for shard in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"):
        (path / shard).write_bytes(b"\x80")
    (path / "pytorch_model.bin").unlink()
    refused(path, r"pickle \(pytorch_model-00001-of-00002\.bin\), .*; save the model as safetensors$")


def test_damaged_index(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, num_shards=2)
    index = path / "model.safetensors.index.json"
    index.write_text("{}x")
    refused(path, "is not valid JSON")
    index.write_text(json.dumps({"weight_map": []}))
    refused(path, "has no 'weight_map'")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other/model.safetensors"}}))
    refused(path, "outside the model directory")
    for name in ("x" * 300, "\ud800", "a\0b"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        refused(path, r"index\.json names '.*, which is no name of a file")
    index.write_text("[" * 100_000)
    refused(path, r"index\.json: what stands in it is nested too deeply")


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({}, 3, "tensor parallelism over 3 devices: 4 attention heads cannot be divided over 3 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}, 2, "3 KV heads cannot be shared out"),
        ({"intermediate_size": 111}, 2, "111 output features cannot be divided over 2 ranks"),
    ],
)
def test_models_that_cannot_be_shared_out(tmp_path: Path, overrides: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(make_checkpoint(tmp_path, **overrides), size=size)


_MEASURE = """
import sys, torch
from pathlib import Path
from parallel.transports.solo import SoloCommunicator
from trtrun.loading.loading import load_model
from trtrun.models.config import read_model_config
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
def load(path):
    return load_model(path, read_model_config(path), SoloCommunicator(), torch.device("cpu"), torch.bfloat16)
load(Path(sys.argv[1]))
before = peak()
_, report = load(Path(sys.argv[2]))
print((peak() - before) / report.shard_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_peak_memory_of_loading_stays_near_the_shard(tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path / "small", dtype=torch.bfloat16)
    options: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    large = make_checkpoint(
        tmp_path / "large", dtype=torch.bfloat16, vocab_size=8000, num_shards=2, num_attention_heads=16, **options
    )
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 0.9 < float(done.stdout) < 1.2
