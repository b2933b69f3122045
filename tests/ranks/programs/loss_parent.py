"""The parent of a job of `loss_case.py` with LOSS_DRAFTS draft ranks: flags and filter are those of `trtrun run`."""

from __future__ import annotations

import os
import sys

from launch.jobs.mpi.library import choose_flavour
from launch.jobs.mpi.mpirun import Launch, build_command, build_environment
from launch.jobs.mpi.output_filter import OutputFilter, RankEnds
from launch.jobs.mpi.start_progress import StartWatch
from launch.jobs.mpi.supervise import supervise
from parallel.topology import Topology
from trtrun.configuration.process_sections import LaunchSection

DRAFTS = int(os.environ.get("LOSS_DRAFTS", "1"))
TOPOLOGY = Topology.from_devices([f"cpu:{index}" for index in range(DRAFTS)], [f"cpu:{DRAFTS}", f"cpu:{DRAFTS + 1}"])
PROGRAM = [sys.executable, "-m", "mpi4py", "tests/ranks/programs/loss_case.py"]

environment = build_environment()
choice = choose_flavour("auto", environment)
launch = Launch(TOPOLOGY, LaunchSection(), environment, choice, may_lose_ranks=choice.library.outlives_ranks)
output = OutputFilter(TOPOLOGY.describe, ends=RankEnds())
steps = StartWatch(TOPOLOGY.describe, TOPOLOGY.world_size, 60.0, "the start")
sys.exit(supervise(build_command(launch, PROGRAM, 1), environment | dict(choice.flavour.tells), output, None, steps))
