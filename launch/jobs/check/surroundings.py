"""What a rank's messages go through, for `trtrun check`: the MPI library and its file, who started the rank, libfabric
and its providers, the container around it; and what is lost with these.

The loaded libraries say it, and the environment. Nothing is sent. It does not know what ranks do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PROBE_SECONDS = 20.0

_MPI_FILE = re.compile(r"libmpi(ch|_\w+)?\.so")
_FAMILIES = {"MPICH": r"MPICH|Intel\(R\) MPI|MVAPICH", "Open MPI": "Open MPI"}
_ABIS = {
    "MPICH": "MPICH's ABI, as Cray MPICH, Intel MPI and MVAPICH have it",
    "Open MPI": "Open MPI's ABI",
}
"""Libraries of one ABI take each other's place: all of the first are libmpi.so.12."""

_SLINGSHOT = (("/sys/class/cxi", "cxi*"), ("/sys/class/net", "hsn*"))
"""Where the kernel shows its network cards."""

_FABRIC_PROBE = """
import ctypes, sys
class Fabric(ctypes.Structure):
    _fields_ = [("fabric", ctypes.c_void_p), ("name", ctypes.c_char_p), ("provider", ctypes.c_char_p)]
class Info(ctypes.Structure):
    pass
Info._fields_ = [
    ("next", ctypes.POINTER(Info)), ("caps", ctypes.c_uint64), ("mode", ctypes.c_uint64),
    ("format", ctypes.c_uint32), ("lengths", ctypes.c_size_t * 2), ("pointers", ctypes.c_void_p * 7),
    ("fabric", ctypes.POINTER(Fabric)),
]
library, found = ctypes.CDLL(sys.argv[1]), ctypes.POINTER(Info)()
library.fi_getinfo(library.fi_version(), None, None, ctypes.c_uint64(0), None, ctypes.byref(found))
while found:
    print(found.contents.fabric.contents.provider.decode())
    found = found.contents.next
"""
"""Asks libfabric what it can use here. In a process of its own: drivers may hang, or end it."""


@dataclass(frozen=True)
class Surroundings:
    """One rank's.

    Attributes:
        library: the MPI library's name and version; empty in a job without MPI.
        file: of the library.
        family: libraries that may stand in its place: "MPICH", "Open MPI", or empty.
        started_by: who started the rank.
        network: what MPICH was built to send with, the first it takes first; None where the library does not say.
        libfabric: its file, where one is loaded.
        providers: that libfabric can use on this host.
        container: what this process is in, with its image where that is known; empty outside.
        losses: what is lost with all this, and what to do about it, a sentence each.
    """

    library: str = ""
    file: str = ""
    family: str = ""
    started_by: str = ""
    network: tuple[str, ...] = ()
    libfabric: str = ""
    providers: tuple[str, ...] = ()
    container: str = ""
    losses: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Surroundings:
        """From what `dataclasses.asdict` gave, after a way through JSON."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**read)

    def describe(self) -> Iterator[str]:
        """Lines for people."""
        if self.container:
            yield f"in a container of {self.container}"
        if self.library:
            where = ", ".join(filter(None, (self.file or "its file is not known", _ABIS.get(self.family))))
            yield f"MPI: {self.library} ({where}), started by {self.started_by}"
        if self.network:
            yield f"MPI's network: {', else '.join(self.network)}"
        if self.libfabric:
            yield f"libfabric: {self.libfabric}, providers {', '.join(self.providers) or 'not known'}"
        yield from self.losses


def find_surroundings(with_mpi: bool, environment: Mapping[str, str] | None = None) -> Surroundings:
    """Look at this process's. MPI is started, or at least loaded.

    Args:
        with_mpi: whether the job has MPI.
        environment: default os.environ.
    """
    values = os.environ if environment is None else environment
    container = find_container(values)
    if not with_mpi:
        return Surroundings(container=container)
    from mpi4py import MPI

    text = MPI.Get_library_version().replace("\0", "")
    loaded = _loaded_files()
    libfabric = next((path for path in loaded if os.path.basename(path).startswith("libfabric.so")), "")
    family = next((name for name, pattern in _FAMILIES.items() if re.search(pattern, text)), "")
    found = Surroundings(
        library=short_version(text),
        file=next((path for path in loaded if _MPI_FILE.match(os.path.basename(path))), ""),
        family=family,
        started_by=find_starter(values),
        network=_find_network(text, values),
        libfabric=libfabric,
        providers=_ask_providers(libfabric) if libfabric else (),
        container=container,
    )
    has_slingshot = any(any(Path(folder).glob(name)) for folder, name in _SLINGSHOT)
    return replace(found, losses=tuple(find_losses(found, values, has_slingshot)))


def find_losses(found: Surroundings, environment: Mapping[str, str], has_slingshot: bool) -> Iterator[str]:
    """What is lost with an MPI library and its network, and what brings it back.

    Args:
        found: all else.
        environment: of the rank.
        has_slingshot: whether the host has such network cards.
    """
    if found.family == "MPICH" and found.started_by.startswith("mpirun"):
        yield "lost with MPICH's mpirun: which rank was killed is not told"
    if found.started_by.startswith(("srun", "mpiexec")):
        yield f"lost with {found.started_by}: trtrun does not close MPI's ports to others, as with its own mpirun"
    if not has_slingshot:
        return
    if "cxi" not in found.providers:
        file = found.libfabric or "none is loaded"
        yield (
            f"lost on Slingshot: libfabric ({file}) has no provider cxi, so messages go over TCP; in a container bind "
            "the host's libfabric over it"
        )
    elif found.network[:1] == ("ucx",):
        yield "lost on Slingshot: MPICH sends with UCX, over TCP: MPIR_CVAR_CH4_NETMOD=ofi takes libfabric"
    elif environment.get("FI_MR_CACHE_MONITOR") not in ("userfaultfd", "kdreg2", "disabled"):
        yield "on Slingshot jobs have hung without FI_MR_CACHE_MONITOR=userfaultfd (or disabled): set it"


def warn_before_mpi(environment: Mapping[str, str]) -> str | None:
    """A sentence on what ends ranks while MPI starts, so that nothing could tell it afterwards."""
    if environment.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
        return None
    return (
        "MPICH_GPU_SUPPORT_ENABLED=1: Cray MPICH ends ranks that lack its library for GPUs, as Python does; MPI gets "
        "host memory alone from trtrun: set it to 0"
    )


def find_starter(environment: Mapping[str, str]) -> str:
    """Who started this rank, by what it put into the environment; an mpirun inside a step of srun comes first."""
    if environment.get("PMIX_NAMESPACE", "").startswith("prte"):
        return "mpirun of Open MPI 5 (PRRTE)"
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return "mpirun of Open MPI 4 (ORTE)"
    if "HYDI_CONTROL_FD" in environment or "MPI_LOCALNRANKS" in environment:
        return "mpirun of MPICH (Hydra)"
    protocols = {"PMIX_RANK": "pmix", "PMI_RANK": "pmi2", "PALS_RANKID": "cray_shasta"}
    if environment.get("SLURM_STEP_ID", "").isdecimal():
        told = next((name for variable, name in protocols.items() if variable in environment), "none")
        return f"srun --mpi={environment.get('SLURM_MPI_TYPE') or told}"
    return "mpiexec of PALS" if "PALS_RANKID" in environment else "an mpirun that does not say whose it is"


def find_container(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """What this process is in, such as "Apptainer (/images/trtrun.sif)"; empty where nothing tells of a container.

    Args:
        environment: of the process.
        root: folder of its file system.
    """
    for name in ("APPTAINER", "SINGULARITY"):
        if f"{name}_CONTAINER" in environment:
            return f"{name.title()} ({environment[f'{name}_CONTAINER']})"
    if (root / ".singularity.d").is_dir():
        return "Apptainer"
    if any((root / name).exists() for name in (".enroot.lock", ".enroot")) or "ENROOT_ROOTFS" in environment:
        return "enroot"
    podman = root / "run" / ".containerenv"
    if podman.exists():
        image = re.search(r'^image="(.+)"', podman.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return f"Podman ({image[1]})" if image else "Podman"
    return "Docker" if (root / ".dockerenv").exists() else ""


def short_version(text: str) -> str:
    """ "Open MPI v5.0.11, package: …" → "Open MPI v5.0.11"; MPICH tells its build, line by line."""
    lines = [" ".join(line.replace("\0", "").split()) for line in text.splitlines()]
    first = next((line for line in lines if line), "unknown")
    return first.partition(", ")[0]


def _find_network(text: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """MPICH's, from its "MPICH Device: ch4:ucx ofi"; what the user chooses alone."""
    device = re.search(r"MPICH Device:\s*ch4:(.+)", text)
    chosen = environment.get("MPIR_CVAR_CH4_NETMOD")
    return (chosen,) if chosen else tuple(device[1].split()) if device else ()


def _loaded_files() -> list[str]:
    """Files that this process has mapped, in the order of their addresses."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(parts[5].strip() for line in lines if len(parts := line.split(maxsplit=5)) > 5))


def _ask_providers(libfabric: str) -> tuple[str, ...]:
    try:
        asked = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _FABRIC_PROBE, libfabric],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            close_fds=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(dict.fromkeys(line for line in asked.stdout.splitlines() if line))
