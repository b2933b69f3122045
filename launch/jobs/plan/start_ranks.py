"""What each rank of a job does at a start, as far as it is known before: bytes of weights that it reads, CUDA graphs
that it captures, and whether Triton's cache has its kernels.

Bytes, graphs and marks come from the functions that starts use. It does not know what of it takes how long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from launch.jobs.placement.memory import JobMemory, ModelShards
from parallel.topology import Slot
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_directory import read_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.engine.batch import tile_width
from trtrun.errors import CheckpointError
from trtrun.loading.dummy_weights import DummyWeights
from trtrun.loading.engine_shards import bytes_of_ranks, shard_path
from trtrun.loading.loading import heads_bytes
from trtrun.loading.weight_check import check_weights, choose_default
from trtrun.memory.memory_requirements import reads_in_place, round_shape
from trtrun.models.config import ModelConfig
from trtrun.sampling.distributions import NUM_KINDS
from trtrun.start.engine_caches import VARIABLE, kernels_folder
from trtrun.start.engine_maker import count_graphs
from trtrun.start.kernels_ahead import has_mark, kinds_of_kernels, mark_file
from trtrun.start.policies import device_kind
from trtrun.start.startup import device_of
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


Kernels = Literal["found", "missing", "unknown", "none"]
"""Of Triton: an earlier start like this one has left them, or none has; the GPU is not here to tell; there are none."""


@dataclass(frozen=True)
class RankStart:
    """One rank with a device.

    Attributes:
        rank: in the world.
        read_bytes: of weights that it reads from files, or that are made up.
        graphs: CUDA graphs that it captures, of both engines.
        kernels: whether its mark is in Triton's cache.
    """

    rank: int
    read_bytes: int
    graphs: int
    kernels: Kernels


class RankStarts:
    """Looks at the ranks of one job."""

    def __init__(
        self,
        memory: JobMemory,
        files: dict[str, ModelFiles],
        here: Collection[str],
        absent: Collection[str],
        nccl: bool,
    ) -> None:
        """Look from this host.

        Args:
            memory: the job, and its models.
            files: of the engines' weights, by role.
            here: hosts of the job that are this one.
            absent: GPUs that the job wants of this host, and that it does not have.
            nccl: whether GPUs talk by NCCL, which graphs can hold.
        """
        self._memory = memory
        self._files = files
        self._here = here
        self._absent = absent
        self._nccl = nccl

    def look(self) -> tuple[RankStart, ...]:
        """All ranks with a device, in order."""
        return tuple(self._look(slot) for slot in self._memory.topology.slots)

    def count_graphs(self, config: RuntimeConfig | None = None, context: int | None = None) -> int:
        """The most graphs that a rank captures, by the job's configuration or another of the same placement."""
        other = self if config is None else self._with(config, context)
        slots = self._memory.topology.slots
        return max(sum(other._graphs(slot, role) for role, *_ in other._parts(slot)) for slot in slots)

    def is_visible(self, slot: Slot) -> bool:
        """Whether the slot's device is on this host."""
        return slot.host in self._here and slot.device not in self._absent

    def device_kinds(self) -> set[str] | None:
        """The kinds of all devices, as ranks name them; None where one is not on this host."""
        slots = self._memory.topology.slots
        devices = {device_of(slot) for slot in slots}
        if not all(self.is_visible(slot) for slot in slots):
            return None
        if any(device.type == "cuda" for device in devices) and not torch.cuda.is_available():
            return None
        return {device_kind(device) for device in devices}

    def _with(self, config: RuntimeConfig, context: int | None) -> RankStarts:
        models = replace(self._memory.models, context=context or self._memory.context)
        memory = replace(self._memory, config=config, models=models)
        return RankStarts(memory, self._files, self._here, self._absent, self._nccl)

    def _look(self, slot: Slot) -> RankStart:
        parts = self._parts(slot)
        read = sum(self._files[role].read_bytes[index] for role, _, index in parts)
        heads, graphs = self._memory.heads_on_target, sum(self._graphs(slot, role) for role, *_ in parts)
        if heads is not None and slot.target_index is not None:
            target = self._memory.target
            kind = device_of(slot).type
            read += heads_bytes(heads, slot.target_index, target.tp_size, target.dtype, kind)
        if (apart := self._memory.heads_apart(slot)) is not None:
            read, graphs = apart.shard_bytes, self._graphs(slot, "draft")
        return RankStart(slot.rank, read, graphs, self._kernels(slot))

    def _parts(self, slot: Slot) -> list[tuple[str, ModelSection, int]]:
        """The slot's engines: role, section and place in the group; the draft first, as a start has them."""
        config, parts = self._memory.config, list[tuple[str, ModelSection, int]]()
        if slot.draft_index is not None and config.draft is not None:
            parts.append(("draft", config.draft, slot.draft_index))
        if slot.target_index is not None:
            parts.append(("target", config.target, slot.target_index))
        return parts

    def _graphs(self, slot: Slot, role: str) -> int:
        config = self._memory.config
        if role == "draft" and config.heads_apart:
            has_graphs = slot.device.startswith("cuda") and config.cuda_graphs
            kinds = NUM_KINDS if self._has_triton(slot) else 0
            return count_graphs(config, self._memory.models, role, None, kinds) if has_graphs else 0
        shards = self._shards(role)
        if not (slot.device.startswith("cuda") and config.cuda_graphs and (shards.tp_size == 1 or self._nccl)):
            return 0
        has_triton = self._has_triton(slot)
        tiled = has_triton and reads_in_place(config, shards.model, "cuda")
        width = tile_width(shards.model, shards.tp_size, slot.device) if tiled else None
        kinds = NUM_KINDS if has_triton else 0
        return count_graphs(config, self._memory.models, role, width, kinds)

    def _shards(self, role: str) -> ModelShards:
        shards = self._memory.draft if role == "draft" else self._memory.target
        assert shards is not None
        return shards

    def _has_triton(self, slot: Slot) -> bool:
        """Taken for granted on other hosts, and of GPUs that are not here."""
        return not self.is_visible(slot) or (find_spec("triton") is not None and torch.version.hip is None)

    def _kernels(self, slot: Slot) -> Kernels:
        if not slot.device.startswith("cuda"):
            return "none"
        if not self.is_visible(slot):
            return "unknown"
        parts = [(role, section, index, len(section.devices)) for role, section, index in self._parts(slot)]
        config = self._memory.config
        folder = config.launch.environment.get(VARIABLE) if self._memory.topology.world_size > 1 else None
        folder = folder or kernels_folder(section for _, section, _ in reversed(self._parts(slot)))
        is_told = any(role == "target" for role, *_ in parts) or config.heads_apart
        heads = self._memory.heads if is_told else None
        mark = mark_file(kinds_of_kernels(config, parts, heads), device_of(slot), folder)
        if mark is None:
            return "none"
        longest = round_shape(config, self._memory.models).max_seq_len
        return "found" if has_mark(mark, longest) else "missing"


def of_all(ranks: Collection[RankStart]) -> Kernels:
    """What becomes of the kernels of all ranks: those that share a group compile where one of them has to."""
    states = {rank.kernels for rank in ranks}
    order: tuple[Kernels, ...] = ("missing", "unknown", "found", "none")
    return next(state for state in order if state in states)
