"""Another program on the same weights and prompts, in a process and an environment of its own.

The interpreter that has the peer runs a small program of `peers` by its path, so that nothing of this environment is on
its way. Task and figures are JSON files. It knows processes; it does not know the peers' APIs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.batch.options import BenchOptions, Workload
from launch.exit_codes import FailedError
from launch.jobs.mpi.job import Job
from launch.jobs.mpi.mpirun import build_environment
from launch.jobs.mpi.processes import clear_session, ending_with_parent
from launch.jobs.placement.allocation import is_local
from trtrun.configuration.device_lists import host_of
from trtrun.configuration.engine_directory import is_engine
from trtrun.environment import OURS
from trtrun.errors import ConfigError, TrtrunError, one_line
from trtrun.loading.model_settings import resolve_dtype_name

if TYPE_CHECKING:
    from launch.bench.measure import Case  # which imports torch

PEER_SECONDS = 1800.0
"""How long a peer may take for one mode, its start included."""

LOOK_SECONDS = 60.0
"""How long an interpreter may take to say whether it has the peer."""

SHOWN_LINES = 20
"""Of what a peer said before it failed."""

_DECIDED = frozenset({"method", "model", "num_speculative_tokens", "parallel_drafting"})
"""Fields of vLLM's speculative_config that the job decides."""

_METHODS_OF_VLLM = {
    "draft_target": "draft_model",
    **{name: name for name in ("eagle3", "eagle", "medusa", "mtp")},
    "gemma4_mtp": "mtp",
}

_LOOK = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec(sys.argv[1]) else 3)"


@dataclass(frozen=True)
class PeerProgram:
    """A program to compare with.

    Attributes:
        name: of its Python package, and on the command line.
        speculative: what it calls drafting.
        is_apart: whether each mode is a process of its own, as it loads the draft or does not.
        decided: of the fields that --peer-options may name, those that the job decides; None where it takes none.
        makes_weights: whether it makes weights up itself, where the job does for all of its models.
        methods: what it calls methods of drafting, by their names here; with others it is not compared.
    """

    name: str
    speculative: str
    is_apart: bool
    decided: frozenset[str] | None = None
    makes_weights: bool = False
    methods: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The program that its interpreter runs."""
        return Path(__file__).resolve().parent / "peers" / f"{self.name}_peer.py"


PEERS = {
    peer.name: peer
    for peer in (
        PeerProgram("transformers", "assisted", is_apart=False, methods={"draft_target": "assisted"}),
        PeerProgram("vllm", "speculative", True, decided=_DECIDED, makes_weights=True, methods=_METHODS_OF_VLLM),
    )
}


@dataclass
class PeerFigures:
    """What a peer measured.

    Attributes:
        program: which.
        version: its own words for it.
        options: fields of its own that it got.
        cases: figures by workload.
        error: why some of them are missing, or None.
    """

    program: PeerProgram
    version: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: dict[Workload, dict[str, Any]] = field(default_factory=dict)
    error: TrtrunError | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the figures."""
        error = str(self.error) if self.error is not None else None
        about = {"name": self.program.name, "version": self.version, "options": dict(self.options)}
        return about | {"error": error}


def check_peer(job: Job, options: BenchOptions) -> None:
    """Raise ConfigError where the peer could not run, as far as it can be told without starting it."""
    assert options.peer is not None
    config = job.config
    program = PEERS[options.peer]
    _check_peer_options(program, options, config.is_speculative)
    if program.is_apart and config.is_speculative and config.speculation.method not in program.methods:
        raise ConfigError(
            f"--peer {options.peer} is not started with speculation.method {config.speculation.method}: choose "
            f"{', '.join(program.methods)} or none"
        )
    if program.is_apart and config.max_paths > 1:
        raise ConfigError(
            f"--peer {options.peer} drafts chains, and {config.speculation.method} drafts trees by its options: "
            "leave these out, so that both draft alike"
        )
    sections = [section for section in (config.target, config.draft) if section is not None]
    makes_up = {section.load_format == "dummy" for section in sections} | ({False} if config.heads else set())
    if makes_up == {True, False}:
        raise ConfigError(
            f"--peer {options.peer} reads the weights of all models or makes all of them up: set load_format: dummy "
            "for all or none, and speculation.method to none for heads"
        )
    if True in makes_up and not program.makes_weights:
        raise ConfigError(f"--peer {options.peer} reads the models' weights, and load_format is dummy: leave one out")
    engine = next((section.model for section in sections if is_engine(section.model)), None)
    if engine is not None:
        raise ConfigError(f"--peer {options.peer} reads checkpoints, and {engine} is an engine: name the one it is of")
    quantization = config.target.quantization
    if quantization != "none":
        raise ConfigError(
            f"--peer {options.peer} computes with the target's weights as they are, and target.quantization is "
            f"{quantization}: leave one out"
        )
    hosts = {host_of(device) for device in config.target.devices}
    if len(hosts) > 1 or not is_local(next(iter(hosts))):
        raise ConfigError(f"--peer {options.peer} runs on rank 0's host, and the target is on {', '.join(hosts)}")
    python = options.peer_python or sys.executable
    try:
        words = [python, "-c", _LOOK, options.peer]
        looked = subprocess.run(words, env=_environment(job), capture_output=True, timeout=LOOK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer within {LOOK_SECONDS:g} s"
        raise ConfigError(f"--peer-python {python} cannot be started: {reason}") from None
    if looked.returncode != 0:
        raise ConfigError(_missing(options.peer, python))


def _check_peer_options(program: PeerProgram, options: BenchOptions, is_speculative: bool) -> None:
    """Raise ConfigError where --peer-options would do nothing, or change what is compared."""
    if not options.peer_options:
        return
    if program.decided is None:
        raise ConfigError(f"--peer-options are fields of vLLM's speculative_config, and --peer is {program.name}")
    if not is_speculative:
        raise ConfigError("--peer-options are for speculative runs, and speculation.method is none: leave them out")
    for name in sorted(program.decided & options.peer_options.keys()):
        raise ConfigError(f"--peer-options: {name} is the job's own, so that both draft alike: leave it out")


def _missing(peer: str, python: str, reason: str = "") -> str:
    """What to say where an interpreter does not have the peer."""
    what = f"cannot be imported by {python}{reason and f' ({reason})'}"
    return f"--peer {peer}: {peer} {what}: name an interpreter that has it with --peer-python, or pip install '{peer}'"


def run_peer(job: Job, options: BenchOptions, results: Mapping[Workload, Mapping[str, Case]]) -> PeerFigures:
    """Let the peer complete the prompts of all timed runs, after them. What goes wrong is in the figures' `error`."""
    assert options.peer is not None
    program = PEERS[options.peer]
    figures = PeerFigures(program, options=options.peer_options)
    modes = list(next(iter(results.values())))
    for part in [[mode] for mode in modes] if program.is_apart else [modes]:
        try:
            answer = _run_program(program, _task(job, options, part, results), job, options)
        except TrtrunError as error:
            figures.error = error
            break
        figures.version = str(answer["version"])
        for workload, case in zip(results, answer["cases"], strict=True):
            figures.cases.setdefault(workload, {}).update(case)
    return figures


def _task(
    job: Job, options: BenchOptions, modes: Sequence[str], results: Mapping[Workload, Mapping[str, Case]]
) -> dict[str, Any]:
    """What the peer is asked to do."""
    config, methods = job.config, PEERS[str(options.peer)].methods
    drafting = config.draft or config.heads
    target, method = job.spec.target, methods.get(config.speculation.method)
    return {
        "target": str(config.target.model),
        "draft": str(drafting.model) if drafting is not None and method is not None else None,
        "method": method,
        "load_format": config.target.load_format,
        "in_parallel": job.spec.models.mask_token is not None,
        "dtype": resolve_dtype_name(config.target, target),
        "device": "cuda" if "cuda:" in config.target.devices[0] else "cpu",
        "tensor_parallel_size": len(config.target.devices),
        "threads": _total_threads(job),
        "draft_len": config.speculation.draft_len,
        "options": dict(options.peer_options),
        "context": target.max_position_embeddings,
        "max_tokens": options.max_tokens,
        "top_p": options.top_p,
        "cases": [
            {"rows": workload.rows, "temperature": workload.temperature} | {mode: cases[mode].prompts for mode in modes}
            for workload, cases in results.items()
        ],
    }


def _run_program(program: PeerProgram, task: dict[str, Any], job: Job, options: BenchOptions) -> dict[str, Any]:
    """Start the peer's program, wait for it, and see all of its processes gone.

    Raises:
        ConfigError: the interpreter cannot import the peer.
        FailedError: it failed or took too long; the notes are its last words.
    """
    python = options.peer_python or sys.executable
    with tempfile.TemporaryDirectory(prefix="trtrun-peer-") as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        words = [python, str(program.path), str(folder / "task.json"), str(folder / "answer.json")]
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                ending_with_parent(words),
                env=_environment(job),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout=PEER_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                is_late = process.poll() is None
                clear_session(process.pid)  # the peer may have processes of its own
                process.wait()
        answer = _read_answer(folder / "answer.json")
        if "missing" in answer:
            raise ConfigError(_missing(program.name, python, one_line(ImportError(answer["missing"]))))
        if process.returncode != 0 or not answer:
            lines = (folder / "said").read_text(encoding="utf-8", errors="replace").splitlines()
            how = f"was not done after {PEER_SECONDS:g} s" if is_late else f"ended with status {process.returncode}"
            error = FailedError(f"the peer {program.name} {how}; trtrun's own figures are complete")
            for line in lines[-SHOWN_LINES:]:
                error.add_note(line)
            raise error
        return answer


def _read_answer(path: Path) -> dict[str, Any]:
    """The peer's figures; none where it was ended before it wrote them."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _environment(job: Job) -> dict[str, str]:
    """The user's environment, with the job's threads and the target's GPUs; the peer runs as its users run it."""
    environment = build_environment() | {"OMP_NUM_THREADS": str(_total_threads(job))}
    for name in environment.pop(OURS, "").split(","):
        environment.pop(name, None)
    own = str(Path(__file__).resolve().parents[2])  # where trtrun is installed, other packages may be, too
    paths = [path for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path and path != own]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    numbers = [int(device.rpartition("cuda:")[2]) for device in job.config.target.devices if "cuda:" in device]
    if numbers:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[number] if visible else str(number) for number in numbers
        )
    return environment


def _total_threads(job: Job) -> int:
    return job.threads * len(job.topology.slots)
