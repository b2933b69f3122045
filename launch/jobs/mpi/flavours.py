"""The MPI libraries that trtrun starts ranks with, each one's mpirun as one row of a table.

Everything that differs between them is data: `FLAVOURS` below. `mpirun.py` builds command lines from a row and never
asks which one it is; `library.py` finds out which row a job needs. It does not know jobs or hosts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class When(Enum):
    """The jobs that a setting is for."""

    ALWAYS = "always"
    ROOT = "root"
    SEVERAL_HOSTS = "several hosts"
    ONE_HOST = "one host, that of mpirun"
    SHARED_MEMORY = "one host, with room for messages in its shared memory"
    MAY_LOSE_RANKS = "ranks that it can do without"


@dataclass(frozen=True)
class Setting:
    """Arguments of mpirun that trtrun gives unless the user has decided the same thing.

    Attributes:
        arguments: words; `{probes}` tries, `{interval}` seconds apart, end a little after launch.heartbeat_seconds.
        variables: of the environment, by which the user decides it instead.
        options: of launch.mpirun_arguments, by which the user decides it instead. Without them the first argument.
        when: the jobs that need it.
    """

    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    when: When = When.ALWAYS


@dataclass(frozen=True)
class Flavour:
    """One MPI library's mpirun.

    Attributes:
        name: in launch.mpi.
        title: for people.
        library: finds itself in the library's own description of its version.
        program: finds itself in what `mpirun --version` writes.
        programs: file names of mpirun.
        library_files: file names of the library.
        settings: for root, oversubscription, binding, waiting, and connections that break.
        variables: names and values that the ranks' environment needs, where the user has not set them.
        tells: names and values for the environment of an mpirun that goes on without ranks, so that it tells its parent
            how they end (see `RankEnds`).
        shared_memory: variable of the environment that names the folder of the ranks' shared memory; empty where the
            library has none that a killed rank leaves behind.
        define: an environment variable for the ranks, from `{name}` and `{value}`.
        forward: environment variables of mpirun's own for ranks of other hosts, once for each `{name}`, or once for all
            `{names}`. Values do not stand there.
        segment: places `{count}` consecutive ranks on `{host}`; mpirun gets a list of such segments.
        whole: places all ranks at once instead: `{hosts}` are the hosts' names, and `{places}` the number of each
            rank's host among them.
        ssh_before: words before mpirun that hand `{arguments}` to ssh.
        ssh: arguments of mpirun that do.
        ssh_variable: of the environment, by which the user does.
        agents: environment variables and options of mpirun by which the user has something else than ssh reach hosts.
        hosts: environment variables and options of mpirun, without dashes, by which the user or a batch system names
            hosts of its ranks.
    """

    name: str
    title: str
    library: re.Pattern[str]
    program: re.Pattern[str]
    programs: tuple[str, ...]
    library_files: tuple[str, ...]
    settings: tuple[Setting, ...]
    define: tuple[str, ...]
    forward: tuple[str, ...]
    segment: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    ssh_before: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    ssh_variable: str = ""
    agents: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    tells: tuple[tuple[str, str], ...] = ()
    shared_memory: str = ""

    @property
    def outlives_ranks(self) -> bool:
        """Whether its mpirun can go on when a rank ends."""
        return any(setting.when is When.MAY_LOSE_RANKS for setting in self.settings)


_BATCH_HOSTS = ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")
"""Variables by which batch systems other than Slurm name an mpirun its hosts."""

_OPEN_MPI_HOSTS = (
    *("host", "H", "hostfile", "machinefile", "default-hostfile", "add-host", "add-hostfile", "rankfile", "rf", "app"),
    *("orte_default_hostfile", "prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    *("PRTE_MCA_prte_default_hostfile", "PRTE_MCA_orte_default_hostfile"),
    *_BATCH_HOSTS,
)


def _when_hosts(option: str, prefix: str) -> tuple[Setting, ...]:
    """Open MPI's settings for jobs on several hosts; its versions differ in who takes them.

    Its daemons notice after 300 s that a connection is cut, and not at all once they have something to send. Noticing
    it a little after the heartbeat has, which can say more, they end on both sides.

    When a rank is killed, the ranks that were connected to it abort, and mpirun takes the first of those for the cause.
    A rank that aborts after a second leaves the daemon of the killed one the time to say so.
    """
    keepalive = (("time", "{interval}"), ("intvl", "{interval}"), ("probes", "{probes}"))
    values = [(option, prefix, f"oob_tcp_keepalive_{name}", value) for name, value in keepalive]
    values.append(("--mca", "OMPI_MCA_", "mpi_abort_delay", "1"))
    return tuple(
        Setting((word, name, value), (f"{before}{name}",), (name,), When.SEVERAL_HOSTS)
        for word, before, name, value in values
    )


OPENMPI = Flavour(
    name="openmpi",
    title="Open MPI 5",
    library=re.compile(r"Open MPI v[5-9]"),
    program=re.compile(r"\(Open MPI\) [5-9]"),
    programs=("mpirun", "mpirun.openmpi"),
    library_files=("libmpi.so.40",),
    settings=(
        Setting(("--allow-run-as-root",), when=When.ROOT),
        # The orchestrator sleeps, so ranks may outnumber cores.
        Setting(
            ("--oversubscribe",),
            variables=("PRTE_MCA_rmaps_default_mapping_policy",),
            options=("--oversubscribe", "--nooversubscribe", "--map-by"),
        ),
        # Else every rank gets one core, and a rank too many is refused.
        Setting(("--bind-to", "none"), variables=("PRTE_MCA_hwloc_default_binding_policy",)),
        Setting(
            ("--mca", "mpi_yield_when_idle", "1"),
            variables=("OMPI_MCA_mpi_yield_when_idle",),
            options=("mpi_yield_when_idle",),
        ),
        # Else each rank listens on all interfaces for nobody, and three bytes from a stranger make it wait for more.
        Setting(("--mca", "btl", "^tcp,ofi"), variables=("OMPI_MCA_btl",), options=("btl",), when=When.SHARED_MEMORY),
        # Else libfabric looks for networks, and this and the one above take a second of each start.
        Setting(("--mca", "mtl", "^ofi"), variables=("OMPI_MCA_mtl",), options=("mtl",), when=When.SHARED_MEMORY),
        # Else it ends the job with the first rank that dies.
        Setting(("--with-ft", "ulfm"), variables=("OMPI_MCA_mpi_ft_enable",), when=When.MAY_LOSE_RANKS),
        *_when_hosts("--prtemca", "PRTE_MCA_"),
    ),
    define=("-x", "{name}={value}"),
    forward=("-x", "{name}"),
    segment=("--host", "{host}:{count}"),
    ssh=("--prtemca", "plm_ssh_args", "{arguments}"),
    ssh_variable="PRTE_MCA_plm_ssh_args",
    agents=("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm", "plm_ssh_agent", "plm"),
    hosts=_OPEN_MPI_HOSTS,
    tells=(("PRTE_MCA_errmgr_base_verbose", "5"), ("PRTE_MCA_odls_base_verbose", "5")),
    shared_memory="OMPI_MCA_btl_sm_backing_directory",
)

OPENMPI4 = Flavour(
    name="openmpi4",
    title="Open MPI 4",
    library=re.compile(r"Open MPI v[1-4]\."),
    program=re.compile(r"\(Open MPI\) [1-4]\."),
    programs=("mpirun", "mpirun.openmpi"),
    library_files=("libmpi.so.40",),
    settings=(
        Setting(("--allow-run-as-root",), when=When.ROOT),
        Setting(
            ("--oversubscribe",),
            variables=("OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_rmaps_base_mapping_policy"),
            options=("--oversubscribe", "--nooversubscribe", "--map-by"),
        ),
        Setting(("--bind-to", "none"), variables=("OMPI_MCA_hwloc_base_binding_policy",)),
        Setting(
            ("--mca", "mpi_yield_when_idle", "1"),
            variables=("OMPI_MCA_mpi_yield_when_idle",),
            options=("mpi_yield_when_idle",),
        ),
        Setting(("--mca", "btl", "^tcp"), variables=("OMPI_MCA_btl",), options=("btl",), when=When.SHARED_MEMORY),
        *_when_hosts("--mca", "OMPI_MCA_"),
    ),
    define=("-x", "{name}={value}"),
    forward=("-x", "{name}"),
    segment=("--host", "{host}:{count}"),
    ssh=("--mca", "plm_rsh_args", "{arguments}"),
    ssh_variable="OMPI_MCA_plm_rsh_args",
    agents=("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm", "plm_rsh_agent", "plm"),
    hosts=_OPEN_MPI_HOSTS,
    shared_memory="OMPI_MCA_btl_vader_backing_directory",
)

MPICH = Flavour(
    name="mpich",
    title="MPICH",
    library=re.compile(r"MPICH Version:"),
    program=re.compile(r"HYDRA build details"),
    programs=("mpirun", "mpirun.mpich", "mpiexec.hydra"),
    library_files=("libmpi.so.12", "libmpich.so.12"),
    # It runs as root, oversubscribes, binds nothing and yields by itself.
    settings=(
        # Else it calls srun in a Slurm job, for ranks beside it too, and waits for ever where that has none to start.
        Setting(
            ("-launcher", "fork"),
            variables=("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC"),
            options=("-launcher", "-launcher-exec"),
            when=When.ONE_HOST,
        ),
        Setting(("-genv", "UCX_TLS", "^tcp"), variables=("UCX_TLS",), options=("UCX_TLS",), when=When.SHARED_MEMORY),
    ),
    variables=(("UCX_LOG_FILE", "stderr"),),  # else its warnings stand between the rows on stdout
    define=("-genv", "{name}", "{value}"),
    forward=("-genvlist", "{names}"),
    whole=("-hosts", "{hosts}", "-rankmap", "{places}"),
    ssh_before=("env", "HYDRA_LAUNCHER_EXTRA_ARGS={arguments}"),
    ssh_variable="HYDRA_LAUNCHER_EXTRA_ARGS",
    agents=("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "-launcher", "-launcher-exec"),
    hosts=("host", "hosts", "f", "hostfile", "machinefile", "configfile", "HYDRA_HOST_FILE", *_BATCH_HOSTS),
)

FLAVOURS = {flavour.name: flavour for flavour in (OPENMPI, OPENMPI4, MPICH)}
