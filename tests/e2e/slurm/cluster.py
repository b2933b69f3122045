"""A real Slurm for the tests: munged, slurmctld and two slurmd of this host as nodes n1 and n2, with fake GPUs.

Everything lies in one scratch folder, with a munge key, a munge socket and ports of its own, so it runs beside a Slurm
that the machine may have. Each slurmd has UTS and mount namespaces of its own where the kernel allows it, so that a job
sees its node's name as the host's name and finds the other node by name, as on a real cluster.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
NODES = ("n1", "n2")
GPUS_OF_A_NODE = 4
CPUS_OF_A_NODE = 16
REQUEUE_SECONDS = 5
"""A requeued job waits until its old credentials have expired: two minutes by default, five seconds at least."""

CONFIGURATION = """\
ClusterName=trtruntest
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_seconds}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=1
MpiDefault=none
KillWait=5
MinJobAge=900
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES
PartitionName=spare Nodes=n2
"""


def find_program(name: str) -> str | None:
    """A program of Slurm or munge: daemons lie where a plain user's PATH does not look."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


def missing() -> str | None:
    """Why no Slurm can be started here; None when it can."""
    absent = [name for name in PROGRAMS if find_program(name) is None]
    if absent:
        return "install the packages slurm-wlm and munge"
    if os.geteuid() != 0:
        return "only root can run slurmd"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("", 0))
        return [item.getsockname()[1] for item in sockets]


T = TypeVar("T")


def wait_for(probe: Callable[[], T | None], seconds: float, what: str) -> T:
    """The first true answer of `probe`, asked again and again. Most ask a program of Slurm's, which is work.

    Raises:
        AssertionError: none came in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = probe()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.25)


class Cluster:
    """Two nodes, n1 and n2, from `start` to `stop`.

    Args:
        folder: scratch, with a path short enough for a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons and wait until both nodes take jobs.

        Raises:
            AssertionError: they do not come up; with the ends of their logs.
        """
        self._write_files()
        folder = self.folder
        # Forced: munged wants folders that everybody may enter, and the tests' scratch is closed to other users.
        munged = ["--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
        munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._spawn("munged", munged)
        try:
            wait_for(lambda: (folder / "munge.socket").exists(), 20, "munged is up")
            self._spawn("slurmctld", ["-D"])
            for node in NODES:
                self._spawn("slurmd", ["-D", "-N", node], node)
            wait_for(lambda: self._idle_nodes() == len(NODES), 60, "Slurm's nodes are up")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs()}") from None

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        if len(self._daemons) > 1:
            self._end_jobs()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _end_jobs(self) -> None:
        self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        self.call("scancel", "--user=root", check=False)
        with suppress(AssertionError):
            wait_for(lambda: not self.call("squeue", "--noheader", check=False), 20, "all jobs are gone")

    def call(self, program: str, *arguments: str, check: bool = True) -> str:
        """Output of one of Slurm's own programs."""
        done = subprocess.run(
            [program, *arguments], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{program} {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def show(self, job: int) -> dict[str, str]:
        """What scontrol says of a job."""
        text = self.call("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"(\S+?)=(.*?)(?= [A-Z][\w:/]*=|\s*$)", text.strip()))

    def set_node(self, node: str, state: str) -> None:
        """Set a node down, or let it resume."""
        self.call("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")

    def ranks(self, job: int) -> dict[int, tuple[int, str]]:
        """Process id and node of each MPI rank of a job, by rank.

        Other workers' clusters number their jobs alike; each has a configuration of its own.
        """
        found: dict[int, tuple[int, str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                items = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            values = dict(item.partition("=")[::2] for item in items)
            rank = values.get("OMPI_COMM_WORLD_RANK", "")
            is_ours = values.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            if is_ours and values.get("SLURM_JOB_ID") == str(job) and rank.isdecimal():
                found[int(rank)] = (int(entry.name), values.get("SLURMD_NODENAME", ""))
        return found

    def _write_files(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        for number in range(GPUS_OF_A_NODE):
            (folder / f"gpu{number}").symlink_to("/dev/null")  # Slurm wants devices
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        controller, n1, n2 = free_ports(3)
        text = CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), controller_port=controller, n1_port=n1, n2_port=n2,
            cpus=CPUS_OF_A_NODE, gpus=GPUS_OF_A_NODE, requeue_seconds=REQUEUE_SECONDS,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(text)
        names = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else ""
        addresses = "".join(f"127.0.0.{place} {node}\n" for place, node in enumerate(NODES, start=11))
        (folder / "hosts").write_text(names + "\n" + addresses)
        gpus = f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-{GPUS_OF_A_NODE - 1}]\n"
        (folder / "gres.conf").write_text(gpus)

    def _spawn(self, program: str, arguments: list[str], host_name: str | None = None) -> None:
        path = find_program(program)
        assert path is not None
        command = [path, *arguments]
        if host_name is not None and _has_namespaces():
            # The name goes in as $0 and the command as "$@": nothing is pasted into the shell's text.
            steps = 'hostname "$0" && mount --bind hosts /etc/hosts && exec "$@"'
            command = ["unshare", "--uts", "--mount", "sh", "-c", steps, host_name, *command]
        with open(self.folder / f"{host_name or program}.out", "wb") as output:
            daemon = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent, start_new_session=True,
            )  # fmt: skip
            self._daemons.append(daemon)

    def _idle_nodes(self) -> int:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args!r} ended"
        return self.call("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t", check=False).count("idle")

    def _logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("munged.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _has_namespaces() -> bool:
    return subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _end_with_parent() -> None:
    """In a daemon, before it starts: the kernel kills it when the tests die."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
