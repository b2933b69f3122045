"""Variables that importing trtrun sets in its process, because libraries read them once, when they load or begin.

It knows what torch, oneDNN and libgomp read, and when. It does not know models or ranks. Child processes inherit what
is set here; `OURS` names it for them, so that programs that are not trtrun can be started without.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

OURS = "TRTRUN_SETTINGS"
"""Variable with the names of those that trtrun set, and not the user."""

SPINS = "GOMP_SPINCOUNT"

CPU_LIMIT = "TRTRUN_MAX_CPU_ISA"
"""Variable with the widest instructions that may be used on the CPU, one of `CPU_LIMITS`; unset: all that there are.

So a processor computes as one that has less: for tests, and for the same bits on processors of several kinds.
"""

PACING_FOLDER = "TRTRUN_PACING_FOLDER"
"""Variable with the folder, an absolute path, of what runs have found out for pacing; empty: nothing is kept. Unset: it
lies beside compiled kernels."""

CPU_LIMITS = ("avx2", "avx512")
"""AVX2 alone; and AVX-512 without what multiplies bfloat16."""


@dataclass(frozen=True)
class Setting:
    """A variable, and what it is set to where the user has decided nothing.

    Attributes:
        name: of the variable.
        value: trtrun's.
        others: variables by which the user decides the same thing.
        limited: values in the place of `value`, by what `CPU_LIMIT` says.
    """

    name: str
    value: str | None
    others: tuple[str, ...] = ()
    limited: Mapping[str, str] = field(default_factory=dict)


SETTINGS = (
    # Weights on the CPU are read from end to end for every token: huge pages spare address translation (4 % of a round
    # was measured).
    Setting("THP_MEM_ALLOC_ENABLE", "1"),
    # With AMX, oneDNN's bfloat16 results depend on the number of rows, so that verification would not be exact.
    Setting("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", limited={"avx2": "AVX2", "avx512": "AVX512_CORE_VNNI"}),
    # For torch's own operations and for MKL there is nothing to say without a limit.
    Setting("ATEN_CPU_CAPABILITY", None, limited={"avx2": "avx2", "avx512": "avx512"}),
    Setting("MKL_ENABLE_INSTRUCTIONS", None, limited={"avx2": "AVX2", "avx512": "AVX512"}),
    # So do those of cuBLAS on GPUs, and cuBLASLt can be asked not to (trtrun.kernels.torch.cuda).
    Setting("TORCH_BLAS_PREFER_CUBLASLT", "1"),
    # Triton 3.9 warns where nobody says whether a product and a sum may be one operation, as they always could.
    Setting("TRITON_DEFAULT_FP_FUSION", "1", others=("TRITON_FORCE_DISABLE_FP_FUSION",)),
    # By default a thread that waits for the others of its team spins for longer than the system lets it run at a time.
    # Beside other programs it so uses up the turn of the very thread that it waits for, once in every parallel region:
    # a hundred times slower. This is 30 to 100 microseconds, enough for the next region of a forward.
    Setting(SPINS, "2000", others=("OMP_WAIT_POLICY",)),
)


def set_environment() -> None:
    """Set in this process what the user has not, and warn where that comes too late to help."""
    is_new = SPINS not in os.environ
    settle(os.environ)
    if is_new and SPINS in os.environ and _openmp_has_begun():
        warnings.warn(
            f"trtrun was imported after torch, whose threads on the CPU have read {SPINS} by then: beside other "
            f"programs they may be a hundred times slower. Import trtrun before torch, or set "
            f"{SPINS}={os.environ[SPINS]}",
            RuntimeWarning,
            stacklevel=3,
        )


def settle(environment: MutableMapping[str, str]) -> None:
    """Set what the user has not, and take back what trtrun has set where the user has decided since.

    Args:
        environment: of this process, before torch is loaded; it is changed.
    """
    earlier = environment.get(OURS, "").split(",")
    ours = []
    for setting in SETTINGS:
        value = setting.limited.get(environment.get(CPU_LIMIT, ""), setting.value)
        known = (setting.value, *setting.limited.values())
        is_ours = setting.name in earlier and environment.get(setting.name) in known
        if value is None or any(name in environment for name in setting.others):
            if is_ours:
                environment.pop(setting.name, None)
        elif is_ours or setting.name not in environment:
            environment[setting.name] = value
            ours.append(setting.name)
    environment[OURS] = ",".join(ours)


def _openmp_has_begun() -> bool:
    """Whether torch's OpenMP has read its variables, and several of its threads may have a model to compute.

    Where there is a GPU the models are most likely there, and nothing is said.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        on_cpu = torch.backends.openmp.is_available() and torch.get_num_threads() > 1
        return bool(on_cpu and not torch.cuda.device_count())
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:  # that torch's is going to be, by its name; wheels of other libraries call theirs otherwise
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return os.environ.get("OMP_NUM_THREADS", "").split(",")[0] != "1"
