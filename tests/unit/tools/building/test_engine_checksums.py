"""A byte that changes within a shard is found by every start, and by `trtrun check`, which name shard and tensor."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import build_engine
from paged import PagedModel

from launch.jobs.check.inventory import find_misfits, take_inventory
from trtrun.configuration.config import make_config
from trtrun.configuration.engine_directory import EngineDescription, read_engine
from trtrun.configuration.topology import make_topology
from trtrun.errors import CheckpointError
from trtrun.loading.engine_checksums import checksum_text, compare_shard, sum_words
from trtrun.loading.engine_loader import EngineLoader
from trtrun.loading.engine_shards import Place, read_places
from trtrun.start.job_spec import JobSpec


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return build_engine(make_checkpoint(tmp_path / "source", tokenizer=True), tmp_path / "engine", 2)


def describe(engine: Path) -> EngineDescription:
    found = read_engine(engine)
    assert found is not None
    return found


def flip(file: Path, offset: int, bits: int = 1) -> None:
    """Change bits of a byte; a second time, back."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ bits]))


def owner(places: dict[str, Place], offset: int) -> str:
    (name,) = (name for name, place in places.items() if 0 <= offset - place.start < place.num_bytes)
    return name


def test_every_byte_counts(engine: Path) -> None:
    """Of headers, too."""
    said, file, generator = describe(engine), engine / "rank1.safetensors", random.Random(5)
    places, size = read_places(engine, said, 1), file.stat().st_size
    first = min(place.start for place in places.values())
    assert compare_shard(engine, said, 1) == size - first
    ends = [at for place in places.values() for at in (place.start, place.start + place.num_bytes - 1)]
    for offset in (0, first - 1, *ends, *(generator.randrange(size) for _ in range(50))):
        bits = generator.randrange(1, 256)
        flip(file, offset, bits)
        wrong = "is not the file that was built"
        if offset >= first:
            wrong = f"is damaged: '{owner(places, offset)}' holds other bytes than were built"
        with pytest.raises(CheckpointError) as raised:
            compare_shard(engine, said, 1)
        assert str(raised.value) == f"{file} {wrong}: copy the engine again, or build it again"
        flip(file, offset, bits)
    compare_shard(engine, said, 1)


@pytest.mark.parametrize("streams", [False, True])
def test_a_start_finds_it(engine: Path, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """As CPUs read weights, and as GPUs do."""
    monkeypatch.setattr(EngineLoader, "_streams", streams)
    places = read_places(engine, describe(engine), 0)
    names = ("lm_head.weight", "model.layers.1.mlp.gate_proj+up_proj.weight", "model.norm.weight")
    for name in names:
        offset = places[name].start + places[name].num_bytes // 2
        flip(engine / "rank0.safetensors", offset)
        with pytest.raises(CheckpointError, match=rf"rank0\.safetensors is damaged: '{name}'".replace("+", "[+]")):
            PagedModel(engine, tp_size=2)
        flip(engine / "rank0.safetensors", offset)
    PagedModel(engine, tp_size=2)


def test_a_check_finds_it_on_the_ranks_that_hold_it(engine: Path, tmp_path: Path) -> None:
    draft = build_engine(make_checkpoint(tmp_path / "small", num_hidden_layers=1, tokenizer=True), tmp_path / "draft")
    config = make_config(
        {
            "target": {"model": str(engine), "devices": ["cpu:0", "cpu:1"]},
            "draft": {"model": str(draft), "devices": ["cpu:0"]},
        }
    )
    topology = make_topology(config)

    def look() -> list[tuple[int, tuple[str, ...]]]:
        found = [take_inventory(JobSpec(config), rank, is_thorough=True) for rank in range(topology.world_size)]
        assert [problem.partition(": ")[2] for problem in find_misfits(found, topology)] == [
            problem for rank in found for problem in rank.problems
        ]
        return [(rank.compared_bytes, rank.problems) for rank in found]

    (orchestrator, (both, none), (one, also_none)) = look()
    assert orchestrator == (0, ()) and both > one > 0 and not none and not also_none
    place = read_places(draft, describe(draft), 0)["model.norm.weight"]
    flip(draft / "rank0.safetensors", place.start)
    flip(engine / "rank1.safetensors", (engine / "rank1.safetensors").stat().st_size - 1)
    (_, (compared, (of_draft,)), (nothing, (of_target,))) = look()
    assert (compared, nothing) == (one, 0)
    assert of_draft.startswith("draft: ") and "draft/rank0.safetensors is damaged: 'model.norm.weight'" in of_draft
    assert of_target.startswith("target: ") and "engine/rank1.safetensors is damaged: 'model.embed" in of_target
    assert not take_inventory(JobSpec(config), 0).problems  # the short check reads headers alone


def test_sums_are_of_bytes_and_their_places() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, (3 * (1 << 20) + 4096 * 5 + 13,), dtype=torch.uint8, generator=generator)
    whole = int(sum_words(data))
    pieces = [int(sum_words(data[start : start + 8192], start // 4096)) for start in range(0, len(data), 8192)]
    assert (sum(pieces) - whole) % 2**64 == 0
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert int(sum_words(shifted)) == whole
    values = data[: 4 * 1000].view(torch.float32)
    assert int(sum_words(values.view(10, 100))) == int(sum_words(data[:4000]))
    by_hand = sum(
        int.from_bytes(bytes(data[at : at + 8].tolist()), "little") * (1 + (at // 8 * 2 + 1) * 0x3C6EF372FE94F82A)
        for at in range(0, 4000, 8)
    )
    assert checksum_text(int(sum_words(data[:4000]))) == f"{by_hand % 2**64:016x}"
    other = data.clone()
    for first, second in ((0, 8), (0, 4096), (4096 * 300, 4096 * 700), (1 << 20, 2 << 20)):
        other[first : first + 8], other[second : second + 8] = data[second : second + 8], data[first : first + 8]
        assert int(sum_words(other)) != whole
        other.copy_(data)
    assert int(sum_words(torch.empty(0))) == 0
