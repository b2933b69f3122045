"""Where weights lie: bytes of each rank's slices, the file system, and what the page cache holds."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import configuration

from launch.jobs.plan.start_ranks import Disk, cached_bytes, find_disk, inspect_files
from parallel.transports.solo import SoloCommunicator
from trtrun.loading.loading import load_model
from trtrun.models.config import read_model_config

MOUNTS = r"""21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 21 0:40 / /models rw shared:5 - nfs4 store:/models rw
31 30 8:2 / /models/own\040disk rw - xfs /dev/sdb1 rw
32 21 0:41 / /mnt rw - ext4 /dev/sdc1 rw
33 32 0:42 / /mnt rw - fuse.sshfs elsewhere: rw
not a mount
"""


@pytest.mark.parametrize(
    ("path", "disk", "is_network"),
    [
        ("/home/model.safetensors", Disk("ext4", "/"), False),
        ("/models/8b/model.safetensors", Disk("nfs4", "/models"), True),
        ("/models/own disk/model.safetensors", Disk("xfs", "/models/own disk"), False),
        ("/modelsx/a", Disk("ext4", "/"), False),
        ("/mnt/a", Disk("fuse.sshfs", "/mnt"), True),
    ],
)
def test_a_file_lies_on_the_file_system_that_is_mounted_nearest(
    tmp_path: Path, path: str, disk: Disk, is_network: bool
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS, encoding="utf-8")
    found = find_disk(Path(path), str(mounts))
    assert found == disk and found.is_network == is_network
    assert find_disk(Path(path), str(tmp_path / "none")) is None


def test_what_was_just_written_is_in_the_page_cache_and_what_never_was_is_not(tmp_path: Path) -> None:
    """A file of holes, and one whose first page cannot have gone, as it may not be on the disk yet."""
    file, size = tmp_path / "file", 64 * mmap.PAGESIZE - 5
    with file.open("wb") as opened:
        opened.truncate(size)
    assert cached_bytes(file) == 0
    with file.open("r+b") as opened:
        opened.write(b"x")
        opened.flush()
        found = cached_bytes(file)
    assert found is not None and mmap.PAGESIZE <= found < size
    file.write_bytes(b"")
    assert cached_bytes(file) == 0
    assert cached_bytes(tmp_path / "none") is None


@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_reads_the_bytes_that_are_told(tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    model = read_model_config(path)
    alone = configuration(path, None).target
    found = inspect_files(alone, model, for_target=True)
    report = load_model(path, read_model_config(path), SoloCommunicator(), torch.device("cpu"), torch.float32)[1]
    assert found.read_bytes == (report.bytes_read,)
    assert found.are_here and found.file_bytes == (path / "model.safetensors").stat().st_size
    assert found.disk is not None
    pair = inspect_files(alone.model_copy(update={"devices": ("cpu:0", "cpu:1")}), model, for_target=True)
    assert len(pair.read_bytes) == 2 and sum(pair.read_bytes) >= report.bytes_read > max(pair.read_bytes)


def test_weights_that_are_elsewhere_are_told_by_the_configuration(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    section, model = configuration(path, None).target, read_model_config(path)
    there = inspect_files(section, model, for_target=True)
    made_up = inspect_files(section.model_copy(update={"load_format": "dummy"}), model, for_target=True)
    (path / "model.safetensors").unlink()
    gone = inspect_files(section, model, for_target=True)
    assert gone.read_bytes == made_up.read_bytes == there.read_bytes
    assert (gone.are_here, gone.is_made_up, gone.cached_bytes, gone.disk) == (False, False, None, None)
    assert made_up.is_made_up
