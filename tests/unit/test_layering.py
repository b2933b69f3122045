"""Imports run one way: every import statement, lazy and TYPE_CHECKING ones too, against one table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the top down. A layer may import itself and every layer below it, except its neighbours on the same line.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"llm"}),
    frozenset({"prompts"}),
    frozenset({"roles"}),
    frozenset({"scheduling", "speculation"}),
    frozenset({"engine"}),
    frozenset({"models"}),
    frozenset({"layers"}),
    frozenset({"quantization", "kvcache"}),
    frozenset({"wire", "telemetry", "outputs", "text", "registry", "config"}),
    frozenset({"core", "yaml_source", "threads", "device_lists", "launch_config"}),
    frozenset({"errors"}),
)
# Beyond the order: these see protocols instead.
FORBIDDEN = {("speculation", "engine"), ("speculation", "models"), ("scheduling", "engine"), ("scheduling", "models")}
# The bottom lines hold single modules, which may use their neighbours.
NEIGHBOURS = {("wire", "registry"), ("config", "registry"), ("launch_config", "device_lists")}
PACKAGES = {"launch": {"launch", "trtrun", "parallel"}, "trtrun": {"trtrun", "parallel"}, "parallel": {"parallel"}}


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


def layer_of(module: str) -> str | None:
    """`trtrun.kvcache.blocks` → `kvcache`; None outside trtrun and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "trtrun" and len(parts) > 1 else None


def violation(importer: str, imported: str) -> str | None:
    """Why `importer` must not import `imported`, or None."""
    own, other = importer.split(".")[0], imported.split(".")[0]
    if other in PACKAGES and other not in PACKAGES[own]:
        return f"{own} imports {other}"
    above, below = layer_of(importer), layer_of(imported)
    if above is None or below is None or above == below:
        return None
    ranks = {name: index for index, line in enumerate(LAYERS) for name in line}
    if below not in ranks:
        return None if below in {"LLM", "SamplingParams", "__version__"} else f"{below} is in no layer"
    if ranks[below] < ranks[above]:
        return f"{above} imports upward from {below}"
    if ranks[below] == ranks[above] and (above, below) not in NEIGHBOURS:
        return f"{above} and {below} do not know each other"
    return f"{above} sees protocols instead of {below}" if (above, below) in FORBIDDEN else None


def python_files() -> list[Path]:
    """Every module of the three packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """`trtrun/kvcache/blocks.py` → `trtrun.kvcache.blocks`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def test_every_layer_of_the_table_exists() -> None:
    names = {name for line in LAYERS for name in line}
    root = ROOT / "trtrun"
    missing = [name for name in names if not (root / name).is_dir() and not (root / f"{name}.py").is_file()]
    assert missing == []


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("parallel.link", "from trtrun.core import Draft"),
        ("trtrun.core", "import launch.cli"),
        ("trtrun.kvcache.tables", "def f():\n    from trtrun.engine.rows import RowState"),
        ("trtrun.speculation.cycle", "if TYPE_CHECKING:\n    from trtrun.engine.runner import Engine"),
        ("trtrun.scheduling.scheduler", "from trtrun.speculation import verify"),
        ("trtrun.quantization.dense", "from trtrun.kvcache.store import KVStore"),
        ("trtrun.models.llama", "from trtrun import roles"),
    ],
)
def test_the_walk_sees_every_kind_of_violation(importer: str, source: str) -> None:
    assert any(violation(importer, imported) for imported in imported_modules(source))
