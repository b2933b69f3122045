"""Imports run one way: every import statement, lazy and TYPE_CHECKING ones too, against one table; and no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path

import pytest

import trtrun

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {"launch": {"launch", "trtrun", "parallel"}, "trtrun": {"trtrun", "parallel"}, "parallel": {"parallel"}}

# From the top down. A room may import itself and every room below it, except its neighbours on the same line. Rooms
# with rooms inside may have a table of their own.
LAYERS: dict[str, tuple[frozenset[str], ...]] = {
    "launch": (
        frozenset({"console", "compat"}),
        frozenset({"cli"}),
        frozenset({"commands"}),
        frozenset({"migration"}),
        frozenset({"bench", "chat", "init", "train", "quantize"}),
        frozenset({"batch"}),
        frozenset({"serve"}),
        frozenset({"jobs"}),
        frozenset({"exit_codes"}),
    ),
    "launch.migration": (
        frozenset({"command_words"}),
        frozenset({"serving_flags"}),
        frozenset({"speculative_configs"}),
        frozenset({"flags"}),
    ),
    "launch.jobs": (
        frozenset({"plan"}),
        frozenset({"pbs", "slurm"}),
        frozenset({"batch"}),
        frozenset({"check"}),
        frozenset({"terminal", "logs"}),
        frozenset({"mpi"}),
        frozenset({"placement"}),
    ),
    "launch.serve": (
        frozenset({"application"}),
        frozenset({"batches"}),
        frozenset({"api"}),
        frozenset({"frontend"}),
        frozenset({"metrics", "handover"}),
        frozenset({"engine", "http", "page", "parsing"}),
        frozenset({"admission"}),
    ),
    "launch.serve.api": (
        frozenset({"anthropic"}),
        frozenset({"kserve", "openai"}),
    ),
    "launch.chat": (
        frozenset({"session", "own_server"}),
        frozenset({"screen"}),
        frozenset({"client"}),
    ),
    "trtrun": (
        frozenset({"__main__"}),
        frozenset({"api"}),
        frozenset({"start"}),
        frozenset({"memory"}),
        frozenset({"rounds"}),
        frozenset({"speculation"}),
        frozenset({"scheduling"}),
        frozenset({"engine"}),
        frozenset({"tools"}),
        frozenset({"lora", "chats"}),
        frozenset({"loading"}),
        frozenset({"heads"}),
        frozenset({"models"}),
        frozenset({"weights"}),
        frozenset({"layers"}),
        frozenset({"guiding"}),
        frozenset({"attention", "linear", "sampling"}),
        frozenset({"kernels"}),
        frozenset({"kvcache"}),
        frozenset({"wire", "timing", "configuration", "registry"}),
        frozenset({"tokens"}),
        frozenset({"core", "environment", "warmup_misses", "garbage", "module_patterns", "tensors", "threads"}),
        frozenset({"errors", "files"}),
    ),
    "trtrun.api": (
        frozenset({"llm", "async_llm"}),
        frozenset({"calls", "engine_thread"}),
        frozenset({"llm_engine", "interrupts"}),
        frozenset({"adapter_loads", "engine_requests"}),
        frozenset({"prompts", "deltas", "adapters"}),
    ),
    "trtrun.start": (
        frozenset({"job"}),
        frozenset({"startup"}),
        frozenset({"engine_maker", "kernels_ahead", "engine_caches"}),
        frozenset({"rank_parts"}),
        frozenset({"worker_factory"}),
        frozenset({"beside_engines"}),
        frozenset({"policies"}),
        frozenset({"ahead_rounds"}),
        frozenset({"warm_up_rounds"}),
        frozenset({"job_spec"}),
    ),
    "trtrun.memory": (
        frozenset({"largest_round", "memory_requirements", "expert_cuts"}),
        frozenset({"working_memory", "spaces"}),
    ),
    "trtrun.loading": (
        frozenset({"model_settings", "loading"}),
        frozenset({"engine_loader", "stored_report", "surplus_tensors"}),
        frozenset({"weight_check", "engine_checksums"}),
        frozenset({"engine_shards", "dummy_weights"}),
        frozenset({"device_reading"}),
    ),
    "trtrun.weights": (
        frozenset({"weight_reader"}),
        frozenset({"weight_loader"}),
        frozenset({"model_files"}),
        frozenset({"quantization_config"}),
        frozenset({"rank_files"}),
        frozenset({"stacked_experts"}),
        frozenset({"checkpoint"}),
        frozenset({"nested_models", "tensorrt_llm_config", "weight", "written_files"}),
    ),
    "trtrun.rounds": (
        frozenset({"orchestrator"}),
        frozenset({"commit"}),
        frozenset({"solo_ranks", "served_rank"}),
        frozenset({"engine_ranks"}),
        frozenset({"prepared_work"}),
        frozenset({"round"}),
        frozenset({"exchange"}),
        frozenset({"launched_round", "failures"}),
    ),
    "trtrun.rounds.exchange": (
        frozenset({"message_exchange"}),
        frozenset({"exchange", "hidden_link", "gated_drafts"}),
    ),
    "trtrun.tools": (
        frozenset({"training", "quantizing", "building"}),
        frozenset({"comparing", "conversion"}),
    ),
    "trtrun.tools.training": (
        frozenset({"loop"}),
        frozenset({"methods"}),
        frozenset({"models", "evaluation", "state"}),
        frozenset({"data", "settings"}),
    ),
    "trtrun.tools.conversion": (
        frozenset({"writers"}),
        frozenset({"source", "streamed_file", "staged_output"}),
    ),
    "trtrun.tools.quantizing": (
        frozenset({"checkpoint_quantizer"}),
        frozenset({"layer_quantizer", "directory"}),
        frozenset({"awq"}),
        frozenset({"formats", "activations"}),
        frozenset({"plain_layer", "texts"}),
        frozenset({"settings"}),
    ),
    "trtrun.tools.building": (
        frozenset({"engine_builder"}),
        frozenset({"settings"}),
    ),
    "trtrun.linear": (
        frozenset({"layer", "stored"}),
        frozenset({"quantization"}),
    ),
    "trtrun.kernels": (
        frozenset({"chooser"}),
        frozenset({"cpu", "triton"}),
        frozenset({"cuda"}),
        frozenset({"torch"}),
        frozenset({"arguments", "library_speeds", "routing"}),
    ),
    "trtrun.timing": (
        frozenset({"tracing"}),
        frozenset({"phase_clock"}),
        frozenset({"spans", "telemetry"}),
    ),
    "trtrun.tokens": (
        frozenset({"detokenizer", "corpus", "translation"}),
        frozenset({"respelling"}),
        frozenset({"text"}),
        frozenset({"token_bytes", "byte_pair_files"}),
        frozenset({"decoders"}),
    ),
    "trtrun.chats": (
        frozenset({"chat"}),
        frozenset({"chat_template"}),
        frozenset({"messages", "tools"}),
    ),
    "trtrun.configuration": (
        frozenset({"topology"}),
        frozenset({"config"}),
        frozenset({"engine_defaults"}),
        frozenset({"drafting"}),
        frozenset({"engine_sections", "model_paths"}),
        frozenset({"process_sections", "engine_directory", "yaml_source"}),
        frozenset({"device_lists"}),
    ),
    "trtrun.configuration.drafting": (
        frozenset({"drafting_methods"}),
        frozenset({"head_methods", "text_methods"}),
        frozenset({"speculation_section"}),
        frozenset({"draft_trees"}),
    ),
    "trtrun.core": (
        frozenset({"outputs"}),
        frozenset({"nouns", "request_statistics"}),
        frozenset({"token_lists"}),
        frozenset({"sampling_params"}),
        frozenset({"guide"}),
        frozenset({"values"}),
    ),
    "parallel": (
        frozenset({"groups", "link", "probe", "watchdog"}),
        frozenset({"transports", "control", "mailbox"}),
        frozenset({"messages"}),
        frozenset({"sends"}),
        frozenset({"communicator", "sharding", "topology", "waiting", "mpi_rank", "abort"}),
        frozenset({"errors"}),
    ),
}
ROOTS = ("core", "environment", "tensors", "threads")
# Those who run rounds time them.
UNTIMED = (
    "speculation",
    "scheduling",
    "engine",
    "models",
    "heads",
    "loading",
    "weights",
    "layers",
    "attention",
    "linear",
    "sampling",
    "kernels",
    "kvcache",
)
# Beyond the order: these see protocols instead, or nothing.
FORBIDDEN = {
    ("trtrun.speculation", "trtrun.engine"),
    *product(("trtrun.speculation",), (f"trtrun.{room}" for room in ("models", "heads", "loading", "weights"))),
    ("trtrun.scheduling", "trtrun.engine"),
    *product(("trtrun.scheduling",), (f"trtrun.{room}" for room in ("models", "heads", "loading", "weights"))),
    *product(
        ("trtrun.tools.training",),
        (f"trtrun.{room}" for room in ("models", "heads", "loading", "weights", "layers", "kvcache", "wire")),
    ),
    ("launch.serve.metrics", "launch.serve.http"),
    ("launch.serve.metrics", "launch.serve.parsing"),
    ("trtrun.registry", "trtrun.core"),
    ("trtrun.wire", "trtrun.core.outputs"),
    ("trtrun.timing", "trtrun.core.outputs"),
    *product(("trtrun.configuration", "trtrun.tokens"), (f"trtrun.{room}" for room in ROOTS)),
    *product(("trtrun.api.prompts", "trtrun.api.deltas"), ("trtrun.start", "trtrun.rounds", "trtrun.timing")),
    *product((f"trtrun.{room}" for room in UNTIMED), ("trtrun.timing",)),
}
# Rooms on one line that are single modules may use a neighbour.
NEIGHBOURS = {
    ("trtrun.configuration.process_sections", "trtrun.configuration.device_lists"),
    ("trtrun.configuration.process_sections", "trtrun.configuration.process_sections"),
    ("parallel.probe", "parallel.groups"),
    ("parallel.probe", "parallel.watchdog"),
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


def room_of(module: str, house: str) -> str | None:
    """`trtrun.kvcache.blocks` in `trtrun` → `trtrun.kvcache`; None outside of the house and for the house itself."""
    return f"{house}.{module[len(house) + 1 :].split('.')[0]}" if module.startswith(f"{house}.") else None


def stands_in(module: str, room: str) -> bool:
    """Whether a module is the room, or in it."""
    return module == room or module.startswith(f"{room}.")


def violation(importer: str, imported: str) -> str | None:
    """Why `importer` must not import `imported`, or None."""
    own, other = importer.split(".")[0], imported.split(".")[0]
    if other in PACKAGES and other not in PACKAGES[own]:
        return f"{own} imports {other}"
    for house in LAYERS:
        above, below = room_of(importer, house), room_of(imported, house)
        if above is not None and below is not None and above != below and (why := misplaced(house, above, below)):
            return why
    for above, below in FORBIDDEN:
        if stands_in(importer, above) and stands_in(imported, below):
            return f"{above} must not know {below}"
    return None


def misplaced(house: str, above: str, below: str) -> str | None:
    """Why one room of a house must not import from another one, or None."""
    ranks = {f"{house}.{name}": index for index, line in enumerate(LAYERS[house]) for name in line}
    if below not in ranks:
        return None if house == "trtrun" and below.removeprefix("trtrun.") in FACES else f"{below} is in no layer"
    if above not in ranks:
        return f"{above} is in no layer"
    if ranks[below] < ranks[above]:
        return f"{above} imports upward from {below}"
    if ranks[below] == ranks[above] and (above, below) not in NEIGHBOURS:
        return f"{above} and {below} do not know each other"
    return None


def python_files() -> list[Path]:
    """Every module of the three packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """`trtrun/kvcache/blocks.py` → `trtrun.kvcache.blocks`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of_all() -> dict[str, list[str]]:
    """Module → what it imports, lazily or not, by absolute names."""
    return {module_name(path): imported_modules(path.read_text(encoding="utf-8")) for path in python_files()}


def import_graph() -> dict[str, frozenset[str]]:
    """Module → the modules of the three packages that it imports. Names of things are cut off."""
    every, graph = imports_of_all(), {}
    for module, names in every.items():
        found = {name if name in every else name.rpartition(".")[0] for name in names}
        graph[module] = frozenset(found & every.keys() - {module})
    return graph


def test_imports_run_downward() -> None:
    """Those of all modules but the package's face, which has its top beside it."""
    problems = [
        f"{importer}: {why} ({imported})"
        for importer, names in imports_of_all().items()
        if importer != "trtrun"
        for imported in names
        if (why := violation(importer, imported)) is not None
    ]
    assert len(imports_of_all()) > 500
    assert not problems, "\n".join(problems)


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


@pytest.mark.parametrize("house", LAYERS)
def test_every_room_is_in_the_table_and_every_line_of_it_exists(house: str) -> None:
    folder = ROOT.joinpath(*house.split("."))
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == {name for line in LAYERS[house] for name in line}


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("parallel.link", "from trtrun.core.nouns import Draft"),
        ("parallel.control", "from parallel.watchdog import activity"),
        ("trtrun.core.nouns", "import launch.cli"),
        ("trtrun.kvcache.blocks", "def f():\n    from trtrun.engine.rows import RowState"),
        ("trtrun.speculation.cycle", "if TYPE_CHECKING:\n    from trtrun.engine.runner import Engine"),
        ("trtrun.scheduling.scheduler", "from trtrun.speculation import verify"),
        ("trtrun.linear.quantization.quantizations", "from trtrun.weights.weight import Weight"),
        ("trtrun.models.families.dense", "from trtrun import roles"),
        ("trtrun.rounds.round", "from trtrun.start import startup"),
        ("trtrun.core.values", "from trtrun.core.outputs import RequestOutput"),
        ("trtrun.kernels.torch.fp8", "from trtrun.kernels.cpu import fp8_matmul"),
        ("launch.jobs.mpi.job", "from launch.batch.run import play_run"),
        ("launch.serve.frontend.frontend", "from launch.serve.api.openai.api import OpenAIApi"),
        ("launch.serve.admission.limits", "from launch.serve import front"),
        ("launch.serve.metrics.server_metrics", "from launch.serve.http.requests import Keys"),
        ("launch.commands.run", "def f():\n    from launch.cli import cli"),
        ("launch.news", "from launch.jobs.mpi.job import Job"),
    ],
)
def test_the_walk_sees_every_kind_of_violation(importer: str, source: str) -> None:
    assert any(violation(importer, imported) for imported in imported_modules(source))
