"""Where an engine's compiled kernels lie: in the folder `cache` of the directory, which starts on GPUs fill and later
ones find, on other hosts and for other users, too.

What is compiled holds for one kind of GPU and one version of Triton and torch; what there is for others stays beside.
It knows folders. It does not know kernels (kernels_ahead.py).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trtrun.configuration.engine_directory import is_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.weights.written_files import write_whole

CACHE = "cache"
VARIABLE = "TRITON_CACHE_DIR"
_TRITON = "triton"
_MADE_FOR = "made_for.json"
"""In the cache: for which GPUs and versions a start has ended well."""

_logger = logging.getLogger(__name__)

_ours: set[str] = set()
"""What this process has set the variable to; anything else is the user's."""


def find_cache(sections: Iterable[ModelSection | None]) -> Path | None:
    """The cache of the first engine among models; None where none is one."""
    paths = (section.model for section in sections if section is not None)
    return next((path / CACHE for path in paths if is_engine(path)), None)


def kernels_folder(sections: Iterable[ModelSection | None]) -> str | None:
    """Where a start with these models will have Triton's cache; None where nothing is said of it."""
    cache = find_cache(sections)
    if cache is None or _is_named() or not _may_write(cache):
        return None
    return str(cache / _TRITON)


class EngineCache:
    """The caches beside the engines of one rank.

    Args:
        sections: its models, that whose engine goes before first.
        device: of the rank.
    """

    def __init__(self, sections: Iterable[ModelSection | None], device: torch.device) -> None:
        self._cache = find_cache(sections) if device.type == "cuda" else None
        self._made_for = describe_device(device) if self._cache is not None else ""

    def begin(self) -> None:
        """Have Triton find kernels there: use the engine's cache as its own, or where that is read-only, copy what the
        user's lacks. A folder that the user has named goes before."""
        if _is_named():
            self._cache = None
            return
        os.environ.pop(VARIABLE, None)  # of an engine before
        if self._cache is None:
            return
        if _may_write(self._cache):
            os.environ[VARIABLE] = str(self._cache / _TRITON)  # of compiling processes, too
            _ours.add(os.environ[VARIABLE])
        elif (self._cache / _TRITON).is_dir():
            with suppress(OSError):
                copy_missing(self._cache / _TRITON, _own_folder())

    def say_what_lacks(self) -> None:
        """Nothing of a start like this was found: say so, where there is something for other GPUs or versions."""
        known = self._read()
        if known and self._made_for not in known and self._cache is not None:
            _logger.warning(
                "%s: its kernels are compiled for %s, and will be for %s now",
                self._cache.parent,
                known[-1],
                self._made_for,
            )

    def finish(self) -> None:
        """The start has ended well."""
        known = self._read()
        if self._cache is not None and self._made_for not in known and _may_write(self._cache):
            with suppress(OSError):  # then the next start says less
                self._cache.mkdir(exist_ok=True)
                write_whole(self._cache / _MADE_FOR, json.dumps([*known, self._made_for], indent=2) + "\n")

    def _read(self) -> list[str]:
        try:
            found = json.loads((self._cache / _MADE_FOR).read_bytes()) if self._cache is not None else []
        except (OSError, ValueError, RecursionError):
            return []
        return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def describe_device(device: torch.device) -> str:
    """What compiled kernels hold for: "NVIDIA H200, Triton 3.6.0, torch 2.11.0"."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{torch.cuda.get_device_name(device)}, Triton {triton}, torch {torch.__version__}"


def copy_missing(source: Path, target: Path) -> None:
    """Copy folders and files that are not in `target`; a folder comes as a whole, as others may read meanwhile."""
    target.mkdir(parents=True, exist_ok=True)
    for one in source.iterdir():
        place = target / one.name
        if place.exists():
            continue
        unfinished = target / f".{one.name}.{os.getpid()}"
        try:
            (shutil.copytree if one.is_dir() else shutil.copyfile)(one, unfinished)
            with suppress(OSError):  # another process was faster
                os.replace(unfinished, place)
        finally:
            if unfinished.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
            else:
                unfinished.unlink(missing_ok=True)


def _is_named() -> bool:
    """Whether the user has named a folder."""
    return VARIABLE in os.environ and os.environ[VARIABLE] not in _ours


def _own_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _may_write(cache: Path) -> bool:
    """Whether kernels can be left there: the engine, its cache and what is in that may be different users'."""
    for folder in (cache / _TRITON, cache):
        if folder.exists() or folder.is_symlink():
            return folder.is_dir() and os.access(folder, os.W_OK)
    return os.access(cache.parent, os.W_OK)
