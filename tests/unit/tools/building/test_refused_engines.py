"""Engines that are damaged, foreign, or not for a job are refused in one line, before a weight is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from engines import build_engine
from paged import PagedModel

from launch.commands.write_models import BuildOptions, run_build
from launch.jobs.check.preflight import check_job
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.engine_directory import Limits, read_engine
from trtrun.errors import ConfigError, TrtrunError
from trtrun.models.config import read_model_config
from trtrun.start.job_spec import JobSpec
from trtrun.tools.building.settings import BuildSettings
from trtrun.weights.model_files import hash_model_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", tokenizer=True)


@pytest.fixture
def engine(source: Path, tmp_path: Path) -> Path:
    return build_engine(source, tmp_path / "engine", 2)


def configure(engine: Path, devices: int = 2, **sections: Any) -> RuntimeConfig:
    target = {"model": str(engine), "devices": [f"cpu:{index}" for index in range(devices)]}
    speculation = {"method": "ngram"}
    return make_config({"speculation": speculation, **sections, "target": {**target, **sections.get("target", {})}})


def truncate(engine: Path) -> None:
    file = engine / "rank1.safetensors"
    os.truncate(file, file.stat().st_size - 8)


def change_header(engine: Path) -> None:
    file = engine / "rank1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"gate_proj", b"gate_porj", 1))


def lengthen(engine: Path) -> None:
    with (engine / "rank0.safetensors").open("ab") as file:
        file.write(b"more")


def swap(engine: Path) -> None:
    """Both have the same sizes and tensors."""
    first, second, other = (engine / name for name in ("rank0.safetensors", "rank1.safetensors", "other"))
    for file, place in ((first, other), (second, first), (other, second)):
        file.rename(place)


def take_from_another(engine: Path) -> None:
    """Built with the same options of a checkpoint of the same shapes."""
    other = build_engine(make_checkpoint(engine.parent / "tuned", seed=7, tokenizer=True), engine.parent / "other", 2)
    shutil.copy(other / "rank1.safetensors", engine)


def change_config(engine: Path) -> None:
    """All tensors would be there, with other texts."""
    file = engine / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-3}))


def name_first_twice(engine: Path) -> None:
    first, _ = json.loads((engine / "engine.json").read_text())["shards"]
    edit(engine, shards=[first, first])


def named(file: str) -> list[dict[str, Any]]:
    return [{"file": file, "bytes": 1, "header_sha256": "", "checksums": {}}]


def edit(engine: Path, **changes: Any) -> None:
    file = engine / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"rank1\.safetensors is truncated \(\d+ bytes of \d+\): copy the engine again"),
        (change_header, r"rank1\.safetensors is not the file that was built: copy the engine again, or build it again"),
        (swap, r"rank0\.safetensors is not the file that was built"),
        (name_first_twice, r"engine\.json is not the file that was built"),
        (take_from_another, r"rank1\.safetensors is not the file that was built"),
        (lengthen, r"rank0\.safetensors is not the file that was built"),
        (lambda engine: (engine / "rank1.safetensors").write_bytes(b""), r"rank1\.safetensors is truncated \(0 bytes"),
        (lambda engine: (engine / "rank1.safetensors").unlink(), r"engine lacks rank1\.safetensors: copy"),
        (lambda engine: (engine / "engine.json").unlink(), r"has rank0\.safetensors, but no engine\.json: copy"),
        (lambda engine: (engine / "engine.json").write_text("{"), r"engine\.json is damaged .*: build the engine"),
        (lambda engine: (engine / "engine.json").write_bytes(b"\xff"), r"engine\.json is damaged"),
        (lambda engine: edit(engine, shards=[]), r"engine\.json is damaged \(its shards are not named\)"),
        (lambda engine: edit(engine, shards=named("../x")), "are not named"),
        (lambda engine: edit(engine, limits={"max_batch_size": 0}), r"engine\.json is damaged"),
        (lambda engine: edit(engine, limits={"max_batchsize": 2}), r"is damaged \(.*unknown field `max_batchsize`"),
        (lambda engine: edit(engine, built_for="cpu\n\x1b[31m"), r"engine\.json is damaged \(.*`\$\.built_for`"),
        (lambda engine: edit(engine, format=2, trtrun="9\n"), r"engine\.json is damaged \(.*`\$\.trtrun`"),
        (lambda engine: edit(engine, shards=named("a\nb")), r"shards.*file`"),
        (lambda engine: edit(engine, format=3, trtrun="9.0", shards="elsewhere"),
         r"engine of format 3, built by trtrun 9\.0, and this version reads 2: build it again"),
        (lambda engine: edit(engine, format=1), r"engine of format 1, built by trtrun .*, and this version reads 2"),
        (lambda engine: edit(engine, limits={"max_batch_size": 9}), r"engine\.json is not the file that was built"),
        (lambda engine: edit(engine, kv_scales={"a": [[1.0], [1.0]]}), r"engine\.json is not the file that was built"),
        (lambda engine: edit(engine, sha256=""), r"engine\.json is not the file that was built"),
        (change_config, r"config\.json is not the file that was built: copy the engine again, or build it again"),
        (lambda engine: (engine / "config.json").unlink(),
         r"engine has engine\.json, but no config\.json: copy the engine again"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused_before_ranks_start(
    engine: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(engine)
    with pytest.raises(TrtrunError, match=message) as raised:
        config = configure(engine)
        check_job(JobSpec(config))
    assert "\n" not in str(raised.value)


def test_names_of_checkpoints_are_one_line(source: Path, tmp_path: Path) -> None:
    engine = build_engine(source.rename(tmp_path / "a\nb"), tmp_path / "engine")
    found = read_engine(engine)
    assert found is not None and found.describe().startswith("an engine of 'a\\nb' for any device")


def test_engines_of_tensorrt_are_refused_by_name(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps({"version": "0.18.0", "pretrained_config": {}, "build_config": {}}))
    (engine / "rank0.engine").write_bytes(b"ftrt")
    message = r"is an engine of TensorRT \(rank0\.engine\).*: build one of the checkpoint with `trtrun build`"
    with pytest.raises(TrtrunError, match=message):
        configure(engine, 1)
    with pytest.raises(TrtrunError, match=message):
        read_model_config(engine)
    with pytest.raises(TrtrunError, match=message):
        build_engine(engine, tmp_path / "another")


@pytest.mark.parametrize(
    ("sections", "devices", "message"),
    [
        ({}, 1, r"target\.devices: the engine was built for 2 devices, not for 1: name as many, or .* --tp 1"),
        ({"target": {"quantization": "fp8"}}, 2,
         r"target\.quantization: is fp8, but the engine was built with none: leave it out, or build another engine"),
        ({"target": {"dtype": "bfloat16"}}, 2, r"target\.dtype: is bfloat16, but the engine was built with float32"),
        ({"scheduler": {"max_batch_size": 9}}, 2, r"scheduler\.max_batch_size: 9 is more than .* \(4\): .*-size 9"),
        ({"scheduler": {"max_num_tokens": 600}}, 2, r"scheduler\.max_num_tokens: 600 is more than .* \(512\)"),
        ({"scheduler": {"max_seq_len": 129}}, 2, r"scheduler\.max_seq_len: 129 is more than .* \(128\)"),
        ({"speculation": {"method": "ngram", "draft_len": 4}}, 2,
         r"speculation\.draft_len: drafts of 4 tokens are more than the target's engine was built for \(3\)"),
    ],
)  # fmt: skip
def test_what_goes_beyond_an_engine_is_refused_with_both_numbers(
    source: Path, tmp_path: Path, sections: dict[str, Any], devices: int, message: str
) -> None:
    limits = {"max_batch_size": 4, "max_num_tokens": 512, "max_seq_len": 128, "max_draft_len": 3}
    engine = build_engine(source, tmp_path / "engine", 2, **limits)
    config = configure(engine, scheduler={"max_seq_len": None})
    assert config.scheduler.max_seq_len == 128
    check_job(JobSpec(config))
    with pytest.raises(ConfigError, match=message):
        configure(engine, devices, **sections)


def test_drafts_have_limits_of_their_own_engine(source: Path, tmp_path: Path) -> None:
    draft = build_engine(source, tmp_path / "draft", max_batch_size=2)
    values: dict[str, Any] = {
        "target": {"model": str(source), "devices": ["cpu:0"]},
        "draft": {"model": str(draft), "devices": ["cpu:0"]},
    }
    assert make_config(values).scheduler.max_batch_size == 2
    with pytest.raises(ConfigError, match=r"max_batch_size: 3 is more than the draft's engine was built for \(2\)"):
        make_config({**values, "scheduler": {"max_batch_size": 3}})
    # An engine that no method asks for is not looked at.
    config = make_config({**values, "scheduler": {"max_batch_size": 3}, "speculation": {"method": "none"}})
    assert config.scheduler.max_batch_size == 3


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_heads_are_not_looked_for_in_engines(engine: Path, method: str) -> None:
    config = configure(engine, draft={"model": str(engine)}, speculation={"method": method})
    with pytest.raises(TrtrunError, match="engine is an engine, which has no heads: name their own directory"):
        check_job(JobSpec(config))


@pytest.mark.parametrize("count", [1, 4])
def test_other_numbers_of_ranks_cannot_be_written_into_an_engine(engine: Path, count: int) -> None:
    shards = json.loads((engine / "engine.json").read_text())["shards"]
    edit(engine, shards=(shards * 2)[:count])
    with pytest.raises(TrtrunError, match=r"engine\.json is not the file that was built"):
        configure(engine, count)


def test_devices_of_another_type_are_refused(tmp_path: Path) -> None:
    from quantized_checkpoints import make_pair

    stored, _ = make_pair(tmp_path, "compressed-tensors FP8")
    for device, said, devices in (("cuda", "cuda sm_90", ["cpu:0"]), ("cpu", "cpu", [0])):
        engine = build_engine(stored, tmp_path / device, dtype="bfloat16", device=device)
        with pytest.raises(
            ConfigError, match=rf"target\.devices: the engine was built for {said}, not for c.*:0: build"
        ):
            make_config({"target": {"model": str(engine), "devices": devices}, "speculation": {"method": "none"}})


def test_ranks_refuse_what_the_parent_did_not_see(engine: Path) -> None:
    """The shards that load are looked at again, by sizes, headers and what they hold."""
    with pytest.raises(TrtrunError, match="is an engine for 2 ranks, and not for 1: build it again with --tp 1"):
        PagedModel(engine)
    with pytest.raises(TrtrunError, match=r"does not hold 'lm_head\.weight' as weights are held here \(bfloat16"):
        PagedModel(engine, torch.bfloat16, 2)
    truncate(engine)
    with pytest.raises(TrtrunError, match="is truncated"):
        PagedModel(engine, tp_size=2)


def test_what_an_engine_says_and_holds_counts_as_the_models_files(engine: Path) -> None:
    first = hash_model_files(engine)
    edit(engine, limits={"max_batch_size": 3})
    second = hash_model_files(engine)
    lengthen(engine)
    assert len({first, second, hash_model_files(engine)}) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 0}, "--tp is 0: it must be 1 or more"),
        ({"tp_size": 3}, "tensor parallelism over 3 devices"),
        ({"dtype": "bf16"}, r"--dtype: unknown value 'bf16' \(did you mean 'bfloat16'\?\)"),
        ({"device": "gpu"}, "--device: unknown value 'gpu'"),
        ({"quantization": "fp9"}, r"unknown quantization 'fp9' \(did you mean 'fp8'\?\)"),
        ({"quantization": "fp8"}, "quantization fp8 computes in bfloat16, not in float32"),
        ({"limits": Limits(max_batch_size=0)}, "--max-batch-size is 0: it must be 1 or more"),
        ({"limits": Limits(max_batch_size=5000)}, "--max-batch-size is 5000: it must be 4096 or less"),
        ({"limits": Limits(max_draft_len=2**31)}, "--max-draft-len is 2147483648: it must be 2147483647 or less"),
        ({"limits": Limits(max_seq_len=300)}, "--max-seq-len is 300, but the model's context is 256 tokens"),
        ({"limits": Limits(8, 20, None, 4)}, "--max-num-tokens is 20, too small to verify 5 tokens of each of 8 rows"),
    ],
)
def test_what_cannot_be_built_is_one_line(source: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        run_build(BuildOptions(source, tmp_path / "engine", BuildSettings(**{"device": "cpu", **settings})))
    assert "\n" not in str(raised.value) and not (tmp_path / "engine").exists()
