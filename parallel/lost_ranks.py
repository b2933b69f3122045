"""Whether MPI goes on when one of its ranks is gone, and how it says so: ULFM, User Level Failure Mitigation.

With it a call that needs a lost rank fails with an error of its own, and all other calls go on. It knows what MPI's
errors mean; it does not know which ranks a job can do without, nor who is at fault: a lost rank is named by the
heartbeat (`parallel.watchdog`), and whoever only meets the error waits for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

FAULT_TOLERANCE_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Set by Open MPI's mpirun for the ranks of a job that was started with `--with-ft ulfm`."""

_CLASSES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def outlives_ranks(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this job's MPI, and what started it, go on when a rank dies. MPI is not touched.

    Args:
        environment: of a rank; default os.environ.
    """
    values = os.environ if environment is None else environment
    return values.get(FAULT_TOLERANCE_VARIABLE, "").lower() in ("1", "true", "yes", "on")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception is MPI's error that a rank which a call needed is gone."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not isinstance(error, module.Exception):
        return False
    return error.Get_error_class() in {getattr(module, name) for name in _CLASSES}
