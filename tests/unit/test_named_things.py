"""What docs, docstrings and comments name is there: files, modules, options, fields, endpoints, flags, classes.

A name in code font is looked for among all identifiers and words of texts in the code, docstrings and comments left
out; keys of the YAML file, paths of the API and options of the command line where they are made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route
from test_docs import NAMED, OF_OTHERS, ROOT, files_by_name, name_of

from launch.cli import cli
from launch.jobs.pbs.section import PbsSection
from launch.jobs.slurm.section import ContainerSection, SlurmSection
from launch.serve.application.http_server import make_application, make_metrics_application
from launch.serve.application.parts import make_parts
from launch.serve.engine.client import EngineClient
from launch.serve.http.requests import Keys
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.start.job_spec import JobSpec

HOUSES = ("launch", "trtrun", "parallel")
SOURCES = sorted(path for house in HOUSES for path in (ROOT / house).rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]

ABOUT_OTHERS = ROOT / "docs" / "migrate-from-triton.md"
FILES_OF_OTHERS = {
    "F.yaml", "fill_template.py", "examples/run.py", "examples/mmlu.py", "examples/summarize.py",
    "examples/quantization/quantize.py", "eagle/model/choices.py",
    "medusa/model/medusa_choices.py", "awq/modules/linear/gemm.py", "models/llama/convert.py",
}  # fmt: skip
WORDS_OF_OTHERS = {
    "minProperties", "proxy_read_timeout", "ReqNodeNotAvail", "JOB_2", "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",
    "WebSearch", "code_interpreter", "crm__find", "disallowedTools", "view_image",
    "DFlashDecodingConfig", "DraftTargetDecodingConfig", "Eagle3DecodingConfig", "MTPDecodingConfig",
    "MedusaDecodingConfig", "NGramDecodingConfig", "PARDDecodingConfig", "SADecodingConfig",
    "Comm_dup", "Comm_free", "MPI_Comm_ack_failed", "MPI_ERR_PROC_FAILED", "MPI_Finalize", "get_diff_sampling_param",
}  # fmt: skip
"""Of JSON Schema, nginx, Slurm, Claude Code, Codex, TensorRT-LLM, MPI and vLLM."""
OPTIONS_OF_OTHERS = {
    # aiperf's and genai-perf's, lm_eval's, mpirun's and MPICH's, sbatch's
    "--backend", "--benchmark-duration", "--concurrency", "--endpoint-type", "--extra-inputs", "--isl", "--osl",
    "--server-metrics", "--tokenizer", "--use-server-token-count", "--tasks", "--stop-after-ms",
    "--stop-via-request-cancel", "--streaming", "--start", "--chdir", "--ntasks-per-node", "--open-mode", "--mail-type",
    # trtllm-build's, which others' names are read for
    "--build_config", "--gather", "--gemm_plugin", "--lora_dir", "--multiple_profiles", "--use", "--workers",
    "--use_paged_context_fmha",
    "--disallowed",  # Claude Code's --disallowedTools
}  # fmt: skip

NAMING = ("id", "attr", "name", "arg", "asname", "module")
"""Of nodes of a syntax tree: what may be an identifier."""
ALSO_CODE = (".py", ".js", ".html", ".sh", ".yaml", ".cu")
COMMENT = re.compile(r"(?m)(?:^\s*|  )# (.*)$")
CODE_FONT = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
METRIC = re.compile(r"\b(?:vllm:|trtrun:|nv_)\w+")
"""tests/unit/serve/metrics looks after these."""
DOTTED = re.compile(
    r"(?<![\w./:-])(?:launch|trtrun|parallel|server|scheduler|kv_cache|speculation)(?:\.[a-z_][a-z0-9_]*)+\b"
    r"(?![/(*]|\.?[A-Z]|(?<=\.md)|(?<=\.sh)|(?<=\.jsonl))"
)
PATH = re.compile(r"(?<![\w./:{}-])/v[12](?:/[\w.{}-]*\w)*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]")


@cache
def read_module(path: Path) -> tuple[str, str]:
    """The prose of a module: docstrings, texts that stand alone, and comments; and all its other texts and names."""
    source = path.read_text(encoding="utf-8")
    prose: list[str] = COMMENT.findall(source)
    others: list[str] = []
    alone: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # a statement before what it is made of
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            alone.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            (prose if id(node) in alone else others).append(node.value)
        else:
            others += [value for name in NAMING if isinstance(value := getattr(node, name, None), str)]
    return "\n".join(prose), "\n".join(others)


def prose_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.suffix == ".md" else read_module(path)[0]


@cache
def known_words() -> frozenset[str]:
    """Identifiers, names of modules, and words of texts that are no docstrings; of tests and others than Python all."""
    found: set[str] = {Path(__file__).stem}
    for path in SOURCES:
        found |= {path.stem, path.parent.name, *WORD.findall(read_module(path)[1])}
    for folder in (*HOUSES, "scripts", "tests"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in ALSO_CODE and path not in SOURCES and path != Path(__file__):
                found |= {path.stem, path.parent.name, *WORD.findall(path.read_text(encoding="utf-8"))}
    return frozenset(found)


def is_a_name(word: str) -> bool:
    """Whether a word is an identifier rather than prose: with an underscore, or capitals within."""
    return ("_" in word.strip("_") or bool(re.search(r"[a-z][A-Z]|[A-Z]{2}[a-z]{2}", word))) and not word.endswith("_")


def unknown_words(text: str) -> list[str]:
    named = (word for code in CODE_FONT.findall(METRIC.sub("", text)) for word in WORD.findall(code))
    return sorted({word for word in named if is_a_name(word) and word not in known_words()} - WORDS_OF_OTHERS)


def missing_files(text: str) -> list[str]:
    """Files that are named and that nobody has. A name with folders may leave out those above them."""
    known = files_by_name()
    return sorted(
        name
        for name in {*NAMED.findall(text)} - OF_OTHERS - FILES_OF_OTHERS
        if not (ROOT / name).exists()
        and not any(path.endswith(f"/{name}") for path in known.get(name.rpartition("/")[2], []))
    )


def missing_modules(text: str) -> list[str]:
    """Dotted names that begin as modules of this code do, or as keys of the YAML file, and lead nowhere."""
    return sorted({name for name in DOTTED.findall(text) if not leads_somewhere(name) and not is_a_key(name)})


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, or something that the source of one holds. A house may be left out."""
    parts = name.split(".")
    for house in ("", *HOUSES):
        for length in range(len(parts), 0, -1):
            path = ROOT.joinpath(house, *parts[:length])
            source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
            if not source.is_file():
                continue
            if length == len(parts) or parts[length] in source.read_text(encoding="utf-8"):
                return True
    return False


@cache
def keys() -> dict[str, frozenset[str]]:
    """Keys of the YAML file, by section."""
    found: dict[str, set[str]] = {}
    for name, field in RuntimeConfig.model_fields.items():
        for section in sections_in(field.annotation):
            found.setdefault(name, set()).update(section.model_fields)
    for method in METHODS.values():
        found["speculation"] |= set(method.section.model_fields)
    found["launch.slurm"] = set(SlurmSection.model_fields)
    found["launch.slurm.container"] = set(ContainerSection.model_fields)
    found["launch.pbs"] = set(PbsSection.model_fields)
    return {name: frozenset(names) for name, names in found.items()}


def sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that a type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from sections_in(inner)


def is_a_key(name: str) -> bool:
    section, _, key = name.rpartition(".")
    return key in keys().get(section, ()) or name in keys()


@cache
def paths() -> tuple[BaseRoute, ...]:
    """The routes of the HTTP ports."""
    pair: dict[str, Any] = {name: {"model": f"asset:{name}", "devices": ["cpu:0"]} for name in ("target", "draft")}
    parts = make_parts(JobSpec(make_config({**pair, "threads": 1})), Keys(()), EngineClient())
    return (
        *make_application(parts.frontend, parts.routes, ()).routes,
        *make_metrics_application(parts.frontend).routes,
    )


def missing_paths(text: str) -> list[str]:
    """Paths of the API, or their beginnings, that nothing answers."""
    return sorted({path for path in PATH.findall(text) if not is_a_path(path)})


def is_a_path(path: str) -> bool:
    routes = [route for route in paths() if isinstance(route, Route)]
    return any(route.path_regex.match(path) or route.path.startswith(path.rstrip("/") + "/") for route in routes)


@cache
def options() -> frozenset[str]:
    """Options of all commands, and what scripts and programs that are called take."""
    found: set[str] = {"--help", "--version"}
    for command in cli.commands.values():
        for parameter in command.params:
            found.update([*parameter.opts, *parameter.secondary_opts])
    for path in SOURCES:
        found.update(OPTION.findall(read_module(path)[1]))
    for path in (ROOT / "scripts").rglob("*.*"):
        if path.suffix in ALSO_CODE:
            found.update(OPTION.findall(path.read_text(encoding="utf-8")))
    return frozenset(found)


def missing_options(text: str) -> list[str]:
    return sorted({option for option in OPTION.findall(text) if option not in options()} - OPTIONS_OF_OTHERS)


def test_what_is_named_is_there() -> None:
    wrong: dict[str, list[str]] = {}
    for path in [*PAGES, *SOURCES]:
        text = prose_of(path)
        found = [*missing_modules(text), *missing_paths(text)]
        if path != ABOUT_OTHERS:
            found += [*unknown_words(text), *missing_files(text)]
            found += missing_options(text) if path in PAGES else ()
        if found:
            wrong[name_of(path)] = found
    assert not wrong


def test_what_is_not_there_is_found() -> None:
    assert missing_files("as round.py, rounds/round.py and device_exchange.py do") == ["device_exchange.py"]
    assert missing_modules("`trtrun.rounds.round`, `speculation.verify`, trtrun.rounds.rounds") == [
        "trtrun.rounds.rounds"
    ]
    assert missing_modules("launch.heartbeat_second, `launch.slurm.cpus_per_task`, `server.tool_parsers`") == [
        "launch.heartbeat_second", "server.tool_parsers",
    ]  # fmt: skip
    assert unknown_words("`include_usage`, `includes_usages`, `LLMEngine.adds_requests(x)`, `LLMEngines`") == [
        "LLMEngines", "adds_requests", "includes_usages",
    ]  # fmt: skip
    assert missing_paths("/v1/models/x, /v1, /v2/models/x/infer, /v1/edits and `/v1/chat`, /v3") == ["/v1/edits"]
    assert missing_options("--prompts, `--no-requeue`, --promptz") == ["--promptz"]
