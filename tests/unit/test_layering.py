"""Imports run one way: every import statement, lazy and TYPE_CHECKING ones too, against one table; and no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import trtrun

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {"launch": {"launch", "trtrun", "parallel"}, "trtrun": {"trtrun", "parallel"}, "parallel": {"parallel"}}

# From the top down. A room may import itself and every room below it, except its neighbours on the same line.
LAYERS: dict[str, tuple[frozenset[str], ...]] = {
    "launch": (
        frozenset({"demo", "tensorrt_llm", "console"}),
        frozenset({"cli"}),
        frozenset({"commands"}),
        frozenset({"plan", "bench", "serve"}),
        frozenset({"slurm"}),
        frozenset({"batch"}),
        frozenset({"check"}),
        frozenset({"terminal", "logs"}),
        frozenset({"mpi"}),
        frozenset({"placement"}),
        frozenset({"exit_codes"}),
    ),
    "trtrun": (
        frozenset({"llm", "async_llm"}),
        frozenset({"engine_thread", "shared_engine"}),
        frozenset({"llm_engine", "pending", "interrupts", "recipients"}),
        frozenset({"prompts", "roles", "deltas"}),
        frozenset({"speculation"}),
        frozenset({"scheduling"}),
        frozenset({"engine"}),
        frozenset({"models"}),
        frozenset({"layers"}),
        frozenset({"attention", "linear", "sampling"}),
        frozenset({"kernels"}),
        frozenset({"kvcache"}),
        frozenset({"topology", "detokenizer"}),
        frozenset({"wire", "spans", "telemetry", "outputs", "text", "registry", "config", "section_check"}),
        frozenset({"drafting_methods"}),
        frozenset(
            {
                "core",
                "request_statistics",
                "yaml_source",
                "threads",
                "tensors",
                "device_lists",
                "launch_config",
                "server_config",
            }
        ),
        frozenset({"sampling_params"}),
        frozenset({"values"}),
        frozenset({"errors"}),
    ),
    "parallel": (
        frozenset({"groups", "link", "probe", "watchdog"}),
        frozenset({"transports", "control", "mailbox"}),
        frozenset({"messages"}),
        frozenset(
            {"communicator", "sharding", "topology", "waiting", "mpi_rank", "abort", "json_gather", "lost_ranks"}
        ),
        frozenset({"errors"}),
    ),
}
# Beyond the order: these see protocols instead.
FORBIDDEN = {("speculation", "engine"), ("speculation", "models"), ("scheduling", "engine"), ("scheduling", "models")}
# Rooms on one line that are single modules may use a neighbour.
NEIGHBOURS = {
    ("wire", "registry"),
    ("config", "registry"),
    ("config", "section_check"),
    ("launch_config", "device_lists"),
    ("server_config", "launch_config"),
    ("probe", "groups"),
    ("probe", "watchdog"),
}
FACES = frozenset(trtrun.__all__)


def imported_modules(source: str) -> list[str]:
    """Every absolute module that the source imports, wherever the statement stands."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def room_of(module: str) -> tuple[str, str] | None:
    """`trtrun.kvcache.blocks` → (`trtrun`, `kvcache`); None outside the packages and for a package itself."""
    parts = module.split(".")
    return (parts[0], parts[1]) if parts[0] in PACKAGES and len(parts) > 1 else None


def violation(importer: str, imported: str) -> str | None:
    """Why `importer` must not import `imported`, or None."""
    own, other = importer.split(".")[0], imported.split(".")[0]
    if other in PACKAGES and other not in PACKAGES[own]:
        return f"{own} imports {other}"
    above, below = room_of(importer), room_of(imported)
    if above is None or below is None or above == below or above[0] != below[0]:
        return None
    ranks = {name: index for index, line in enumerate(LAYERS[own]) for name in line}
    if below[1] not in ranks:
        return None if below[1] in FACES else f"{'.'.join(below)} is in no layer"
    if above[1] not in ranks:
        return f"{'.'.join(above)} is in no layer"
    if ranks[below[1]] < ranks[above[1]]:
        return f"{above[1]} imports upward from {below[1]}"
    if ranks[below[1]] == ranks[above[1]] and (above[1], below[1]) not in NEIGHBOURS:
        return f"{above[1]} and {below[1]} do not know each other"
    return f"{above[1]} sees protocols instead of {below[1]}" if (above[1], below[1]) in FORBIDDEN else None


def python_files() -> list[Path]:
    """Every module of the three packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """`trtrun/kvcache/blocks.py` → `trtrun.kvcache.blocks`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Module → the modules of the three packages that it imports, lazily or not. Names of things are cut off."""
    sources = {module_name(path): path.read_text(encoding="utf-8") for path in python_files()}
    graph = {}
    for module, source in sources.items():
        names = imported_modules(source)
        found = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = frozenset(found & sources.keys() - {module})
    return graph


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_imports_run_downward(path: Path) -> None:
    importer = module_name(path)
    if importer == "trtrun":
        return  # the package's face re-exports its top
    problems = [
        f"{importer}: {why} ({imported})"
        for imported in imported_modules(path.read_text(encoding="utf-8"))
        if (why := violation(importer, imported)) is not None
    ]
    assert not problems


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imports for module, imports in import_graph().items() if module != "trtrun"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_name_of_the_packages_face_is_there() -> None:
    assert {"LLM", "SamplingParams", "load_config", "RequestOutput"} <= FACES
    for name in FACES:
        assert getattr(trtrun, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trtrun.nothing  # noqa: B018


def test_the_face_alone_loads_nothing_heavy() -> None:
    code = "import sys, trtrun; print(sorted({'torch', 'pydantic', 'tokenizers', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_the_table_and_every_line_of_it_exists(package: str) -> None:
    rooms = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__"} == {name for line in LAYERS[package] for name in line}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("parallel.link", "from trtrun.core import Draft"),
        ("parallel.control", "from parallel.watchdog import activity"),
        ("trtrun.core", "import launch.cli"),
        ("trtrun.kvcache.tables", "def f():\n    from trtrun.engine.rows import RowState"),
        ("trtrun.speculation.cycle", "if TYPE_CHECKING:\n    from trtrun.engine.runner import Engine"),
        ("trtrun.scheduling.scheduler", "from trtrun.speculation import verify"),
        ("trtrun.linear.quantization.dense", "from trtrun.models.shard_layout import Weight"),
        ("trtrun.models.llama", "from trtrun import roles"),
        ("launch.mpi.job", "from launch.batch.run import play_run"),
        ("launch.commands.run", "def f():\n    from launch.cli import cli"),
        ("launch.news", "from launch.mpi.job import Job"),
    ],
)
def test_the_walk_sees_every_kind_of_violation(importer: str, source: str) -> None:
    assert any(violation(importer, imported) for imported in imported_modules(source))
