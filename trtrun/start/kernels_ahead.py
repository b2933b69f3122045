"""Kernels of a start, compiled side by side before they are needed: where this machine has not compiled them before.

Triton compiles a kernel when it is launched first, one after the other: a minute for a pair of models. So a start that
finds no mark of an earlier one like it begins processes that compile, plays its rounds without running a kernel to
learn which there will be, and waits. The mark lies in Triton's cache, with the kernels, and is gone with them. It says
what the start has measured, too, so that a later one need not measure that again. `kinds_of_kernels` tells starts that
need other kernels apart.

It does not know rounds or models (startup.py plays them).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_sections import ModelSection
from trtrun.heads.heads import HeadsPlan
from trtrun.kernels.library_speeds import WeightSpeeds
from trtrun.kernels.triton.support import triton_works
from trtrun.threads import count_cores
from trtrun.weights.quantization_config import configuration_bytes


def kinds_of_kernels(
    config: RuntimeConfig, parts: Iterable[tuple[str, ModelSection, int, int]], heads: HeadsPlan | None
) -> list[object]:
    """Values whose `repr` tells one start of a rank from all that need other kernels or other memory.

    Args:
        config: of the job.
        parts: the rank's engines: role, section, and rank and size of the tensor-parallel group.
        heads: that draft from what the target computes; None on ranks that have nothing to do with them.
    """
    told = [
        (role, section.dtype, section.quantization, rank, size, *configuration_bytes(section.model))
        for role, section, rank, size in parts
    ]
    # The number of blocks, which an engine that is started again is told, changes neither kernels nor memory, unless
    # it bounds how long rows may be: so a mark says how long they were.
    kept = config.kv_cache.model_copy(update={"max_tokens": None, "free_memory_fraction": None})
    sections = (config.speculation, kept, config.scheduler)
    held = heads.weights if heads is not None else ()
    of_heads: list[object] = [(part.name, part.shape) for weight in held for part in weight.parts]
    of_heads += [heads.stored, heads.taps] if heads is not None else []
    if heads is not None and config.heads_apart:  # a rank of theirs has no engine that would tell it
        of_heads += [config.target.dtype, *configuration_bytes(config.target.model)]
    named = [section.model_dump_json() for section in sections]
    if config.num_adapter_slots:
        most = f"{config.num_adapter_slots} slots of rank {config.adapter_slots.max_rank}"
        named.append(f"{most}, the draft's too" if config.draft_adapters else most)
    translated = [config.draft.vocabulary] if config.draft is not None and config.draft.is_translated else []
    return [*named, config.cuda_graphs, config.drafts_apart, of_heads, *translated, *told]


_MOST_PROCESSES = 16

_SOURCE = Path(__file__).resolve().parent.parent

_logger = logging.getLogger(__name__)


class _Mark(msgspec.Struct, frozen=True):
    """What a start has found out.

    Attributes:
        working_bytes: that rounds need.
        longest: tokens of a row, at most, with which they were measured.
        speeds: of products.
    """

    working_bytes: Annotated[int, msgspec.Meta(gt=0)]
    longest: Annotated[int, msgspec.Meta(gt=0)]
    speeds: list[WeightSpeeds]


def mark_file(like: Iterable[object], device: torch.device, folder: str | None = None) -> Path | None:
    """Where the mark of a start lies, if there is one; None where nothing is compiled: on a CPU, or without Triton.

    Args:
        like: what a start's kernels and memory follow from, beside trtrun's source, torch, Triton and the GPU.
        device: of the rank; a GPU is asked for its name.
        folder: Triton's cache; None for the one that this process has.
    """
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return None
    from triton import __version__, knobs

    name = _digest([*like, __version__, torch.__version__, torch.cuda.get_device_name(device)])
    return Path(folder or knobs.cache.dir, f"trtrun-{name}")


def has_mark(mark: Path, longest: int) -> bool:
    """Whether a start that ended well has left the mark, with rows of `longest` tokens or more."""
    return _read(mark, longest) is not None


def count_processes(num_ranks: int) -> int:
    """Processes that compile for a rank, where `num_ranks` ranks share this host's cores."""
    return max(1, min(_MOST_PROCESSES, count_cores() // num_ranks - 1))


class KernelsAhead:
    """Compiles the kernels of one rank.

    Attributes:
        working_bytes: what an earlier start like this one has measured that rounds need; None where none has ended
            well on this machine.
    """

    def __init__(self, like: Iterable[object], device: torch.device, num_ranks: int, longest: int) -> None:
        """Look for the mark, and begin processes where there is none.

        Args:
            like: see `mark_file`.
            device: of the rank.
            num_ranks: that share the host's cores.
            longest: tokens of a row, at most: a mark of shorter ones says too little.
        """
        self._processes, self._longest = None, longest
        self._mark = mark_file(like, device)
        self._target: dict[str, object] = {}
        self.working_bytes: int | None = None
        if self._mark is None:
            return
        found = _read(self._mark, longest)
        if found is not None:
            from trtrun.kernels.triton.matmul.dense import remember_speeds

            self.working_bytes = found.working_bytes
            remember_speeds(found.speeds)
        else:
            from trtrun.kernels.triton.compilation.compile_processes import CompileProcesses

            major, minor = torch.cuda.get_device_capability(device)
            self._target = {"backend": "cuda", "arch": 10 * major + minor, "warp_size": 32}
            try:
                self._processes = CompileProcesses(count_processes(num_ranks))
            except OSError as error:  # the start compiles by itself
                _logger.warning("no process can be started to compile kernels: %s", error)

    def compile(self, play: Callable[[], None]) -> None:
        """Compile what `play` would launch. It is played whether this rank compiles or not: it may be collective."""
        if not triton_works("cuda"):
            play()
            return
        from trtrun.kernels.triton.compilation.launches import KernelRequest, collecting

        started, num_asked = time.monotonic(), 0

        def ask(request: KernelRequest) -> None:
            nonlocal num_asked
            num_asked += 1
            if self._processes is not None:
                self._processes.submit({**asdict(request), "target": self._target})

        with collecting(ask):
            play()
        if self._processes is not None:
            num_compiled = self._processes.wait()
            _logger.info("compiled %d of %d kernels in %.1f s", num_compiled, num_asked, time.monotonic() - started)
        self.close()

    def finish(self, working_bytes: int) -> None:
        """The start has ended well, and rounds need so many bytes: leave the mark."""
        if self._mark is not None and self.working_bytes is None:
            with suppress(OSError):  # then the next start is like this one
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                unfinished = self._mark.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
                unfinished.write_bytes(msgspec.json.encode(_Mark(working_bytes, self._longest, _known_speeds())))
                unfinished.replace(self._mark)  # others may read, and write the same, meanwhile

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


def _known_speeds() -> list[WeightSpeeds]:
    if not triton_works("cuda"):
        return []
    from trtrun.kernels.triton.matmul.dense import known_speeds

    return known_speeds()


def _read(mark: Path, longest: int) -> _Mark | None:
    """What a mark says; None where there is none, or it says nothing of rows of `longest` tokens."""
    try:
        found = msgspec.json.decode(mark.read_bytes(), type=_Mark)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.longest >= longest else None


def _digest(like: Iterable[object]) -> str:
    digest = hashlib.sha256(repr(list(like)).encode())
    for path in sorted(_SOURCE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
