"""What of a model's weights each rank reads at a start, and where the files lie: by their headers, the system's table
of mounts, and what the page cache holds of them now.

It reads no weights. It does not know ranks' devices, or how long reading takes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.model_sections import ModelSection
from trtrun.errors import CheckpointError
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.loading.engine_shards import bytes_of_ranks, shard_path
from trtrun.loading.weight_check import check_weights, choose_default
from trtrun.models.config import ModelConfig
from trtrun.tensors import DTYPES
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share, WeightFiles

_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "9p", "virtiofs")
"""Types of file systems whose files lie on another host, or that may: as the kernel calls them."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Disk:
    """A mounted file system: its `type`, by the kernel's name, and where it is mounted."""

    type: str
    mounted_at: str

    @property
    def is_network(self) -> bool:
        """Whether other hosts' disks are behind it; of FUSE nobody knows, and it is taken to be so."""
        return self.type in _NETWORKS or self.type.startswith("fuse.")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one engine's weights.

    Attributes:
        read_bytes: of each rank's slices, in tensor-parallel order, in the files' dtype; without files in that which
            config.json says.
        is_made_up: whether no file is read (load_format: dummy).
        are_here: whether the files could be looked at.
        file_bytes: of all files; 0 where they are not here.
        cached_bytes: of these, in this host's page cache; None where that is not known.
        disk: where the first file lies; None where that is not known.
    """

    read_bytes: tuple[int, ...]
    is_made_up: bool = False
    are_here: bool = True
    file_bytes: int = 0
    cached_bytes: int | None = None
    disk: Disk | None = None


def inspect_files(section: ModelSection, model: ModelConfig, *, for_target: bool) -> ModelFiles:
    """Look at the weights of an engine, whose config.json is `model`.

    Raises:
        ConfigError: the quantization is unknown.
    """
    default = choose_default(model, section.quantization, for_target=for_target)
    size = len(section.devices)

    def of_ranks(files: WeightFiles) -> tuple[int, ...]:
        return tuple(check_weights(files, model, Share(index, size), default) for index in range(size))

    is_made_up = section.load_format == "dummy"
    if not is_made_up:
        try:
            engine = read_engine(section.model)
            if engine is None:
                files = open_checkpoint(section.model)
                read_bytes, paths = of_ranks(files), files.list_files()
            else:
                read_bytes = bytes_of_ranks(section.model, engine)
                paths = [shard_path(section.model, engine, rank) for rank in range(size)]
            cached = [cached_bytes(path) for path in paths]
            known = [size for size in cached if size is not None]
            return ModelFiles(
                read_bytes,
                file_bytes=sum(path.stat().st_size for path in paths),
                cached_bytes=sum(known) if len(known) == len(cached) else None,
                disk=find_disk(paths[0]) if paths else None,
            )
        except (CheckpointError, OSError):
            pass  # not here, or wrong, which the plan says in a note
    dtype, device = DTYPES[model.checkpoint_dtype], torch.device("cpu")
    stand_in = DummyWeights(section.model, dtype, device, model, is_dummy=is_made_up)
    return ModelFiles(of_ranks(stand_in), is_made_up, are_here=False)


def find_disk(path: Path, mounts: str = "/proc/self/mountinfo") -> Disk | None:
    """The file system that a file lies on, as proc_pid_mountinfo(5) has it; None where there is no such table."""
    try:
        lines, real = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines(), path.resolve()
    except OSError:
        return None
    found: Disk | None = None
    for disk in _read_mounts(lines):
        # Of several at one place the last one hides the others.
        if real.is_relative_to(disk.mounted_at) and (found is None or len(disk.mounted_at) >= len(found.mounted_at)):
            found = disk
    return found


def _read_mounts(lines: Sequence[str]) -> Iterator[Disk]:
    for line in lines:
        own, _, behind = line.partition(" - ")
        fields, types = own.split(" "), behind.split(" ")
        if len(fields) > 4 and types[0]:
            yield Disk(types[0], _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file that the page cache of this host holds now, by mincore(2); None where the system does not say.

    It tells the truth to those alone who own the file or may write it; to others all pages look present.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if os.geteuid() not in (0, status.st_uid) and not os.access(path, os.W_OK):
                return None
            if not status.st_size:
                return 0
            # A private mapping, which may be written without the file's being so: ctypes tells its address alone.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                return _count_resident(mapped, status.st_size)
    except (OSError, ValueError, AttributeError):
        return None


def _count_resident(mapped: mmap.mmap, size: int) -> int | None:
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(mapped)
    address = ctypes.c_void_p(ctypes.addressof(first))
    try:
        failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), resident)
    finally:
        del first  # or the mapping cannot be closed
    if failed:
        return None
    return min(size, mmap.PAGESIZE * sum(page & 1 for page in resident))
