"""Counts how the product is built: files, lines, arrows, long parameter lists, words. Reads sources, imports none.

    python scripts/dev/house.py [--bounds] [--parameters] [--ways]

The product is launch, trtrun and parallel. What is counted:

circles, arrows_up: circles among the imports, and imports that the tables of tests/unit/test_layering.py forbid.
model_config_reads: calls of `read_model_config`, wherever they stand in the product.
vague_docstrings: docstrings that begin with "See ", "Of " or "Those ", scripts and tests left out.
largest_room: the folder with most Python files side by side, `__init__` left out.
long_parameter_lists: plain Python functions with nine parameters or more, `self` and `cls` left out.
long_kernel_parameter_lists: the same of functions that Triton or Gluon compiles. Their parameters are pointers and
    constants of the compiler, which no struct can hold.
words: of README.md and docs/*.md, in docs' folders too.
config_way: files that take the whole configuration, alone or in a JobSpec, on its way through `play_run`. Counted are
    files which the imports of launch/batch/run.py lead to, and in which a parameter or a field is declared as one of
    CONFIG_TYPES. One that is given a section alone does not count, nor does one that takes the configuration in an
    attribute without a type.
request_way: files that a streaming request of OpenAI's API passes, without the round. Counted are files which the
    imports of the server or of its engine's process lead to, rooms of OTHER_WAYS left out, and in which a parameter or
    a field is declared as one of REQUEST_TYPES: a request, or its answer, in any shape that it has on its way.
    Both are measures of the text, not traces: a file that hands on without naming the type is missed, one that another
    command or endpoint calls is counted.
files, median_lines, lines: Python files of the product, `__init__` included.
import_share: lines up to the last import of each file, of all lines.

The last line is JSON. With --bounds it ends non-zero where a number is beyond its bound in the tables MOST and LEAST.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("launch", "trtrun", "parallel")

MOST: dict[str, float] = {
    "circles": 0,
    "arrows_up": 0,
    "model_config_reads": 8,
    "vague_docstrings": 0,
    "largest_room": 16,
    "long_parameter_lists": 13,
    "long_kernel_parameter_lists": 88,
    "words": 46_750,
    "config_way": 30,
    "request_way": 28,
    "files": 760,
    "lines": 130_950,
    "import_share": 0.12,
}
LEAST: dict[str, float] = {"median_lines": 170}
"""The bounds: set to what is reached, so that it does not get worse again."""

MANY_PARAMETERS = 9
KERNEL_DECORATORS = ("triton.jit", "gluon.jit")
VAGUE_BEGINNINGS = ("See ", "Of ", "Those ")

CONFIG_START = ("launch.batch.run",)
CONFIG_TYPES = ("RuntimeConfig", "JobSpec")
REQUEST_START = ("launch.serve.application.http_server", "launch.serve.engine.process")
# A name with dots is one that is imported from there: others have a class of that name, too.
REQUEST_TYPES = (
    "starlette.requests.Request",
    "Task",
    "CompletionCall",
    "ChatCall",
    "Answering",
    "Prompt",
    "SamplingParams",
    "EngineRequest",
    "OpenRequest",
    "Generate",
    "Recipient",
    "CompletionDelta",
    "Deltas",
    "Inbox",
    "Generation",
    "Answer",
    "Usage",
)
OTHER_WAYS = (
    "launch.serve.api.anthropic",
    "launch.serve.api.kserve",
    "launch.serve.api.openai.responses",
    *(f"trtrun.{room}" for room in ("start", "memory", "rounds", "engine", "speculation", "sampling", "guiding")),
    *(f"trtrun.{room}" for room in ("wire", "timing")),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the product, parsed.

    Attributes:
        path: of the file.
        module: its dotted name.
    """

    path: Path
    module: str

    @cached_property
    def text(self) -> str:
        """What the file holds."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """Lines of the file."""
        return len(self.text.splitlines())

    @property
    def last_import(self) -> int:
        """The line where the imports at the top end; 0 where there are none."""
        ends = [
            node.end_lineno or 0
            for node in self.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
        return max(ends, default=0)

    @property
    def functions(self) -> Iterator[Function]:
        """All functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def docstrings(self) -> Iterator[str]:
        """The docstrings of the module, its classes and its functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                yield ast.get_docstring(node) or ""

    def calls(self, name: str) -> int:
        """How often a function of this name is called."""
        called = (node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return sum((node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == name for node in called)

    def declared_types(self) -> set[str]:
        """Names in the types of parameters and fields; an imported one also with the module that it comes from."""
        types = [each.annotation for function in self.functions for each in _arguments(function)]
        types += [node.annotation for node in ast.walk(self.tree) if isinstance(node, ast.AnnAssign)]
        names = {name for found in types if found is not None for name in _names(found)}
        origins = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        return names | {origins[name] for name in names & origins.keys()}


def _arguments(function: Function) -> list[ast.arg]:
    given = function.args
    stars = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]


def _names(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def read_sources() -> list[Source]:
    """Every file of the product."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [Source(path, ".".join(_parts(path))) for path in paths]


def _parts(path: Path) -> list[str]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def load_layering() -> ModuleType:
    """tests/unit/test_layering.py, which has the tables of rooms and the graph of imports."""
    spec = importlib.util.spec_from_file_location("test_layering", ROOT / "tests/unit/test_layering.py")
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(ROOT))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def count_circles(graph: Mapping[str, Collection[str]]) -> int:
    """1 where some modules import each other in a circle, else 0; the package's face is left out."""
    try:
        TopologicalSorter({module: found for module, found in graph.items() if module != "trtrun"}).prepare()
    except CycleError:
        return 1
    return 0


def find_closure(graph: Mapping[str, Collection[str]], start: Iterable[str]) -> set[str]:
    """The modules that imports lead to from some others, these included."""
    waiting, found = list(start), set(start)
    while waiting:
        new = set(graph[waiting.pop()]) - found - {"trtrun"}
        found |= new
        waiting += new
    return found


def find_way(
    sources: Iterable[Source],
    graph: Mapping[str, Collection[str]],
    start: Iterable[str],
    types: Collection[str],
    left_out: tuple[str, ...] = (),
) -> list[str]:
    """The modules behind `start` that declare a parameter or a field of one of these types."""
    reached = find_closure(graph, start)
    return [
        source.module
        for source in sources
        if source.module in reached
        and not any(f"{source.module}.".startswith(f"{room}.") for room in left_out)
        and source.declared_types() & set(types)
    ]


def find_long_lists(sources: Iterable[Source]) -> dict[str, list[tuple[int, str]]]:
    """The functions with many parameters and how many they have, longest first: plain ones and kernels."""
    found: dict[str, list[tuple[int, str]]] = {"long_parameter_lists": [], "long_kernel_parameter_lists": []}
    for source in sources:
        for function in source.functions:
            given = [each for each in _arguments(function) if each.arg not in ("self", "cls")]
            if len(given) >= MANY_PARAMETERS:
                kind = "long_kernel_parameter_lists" if _is_kernel(function) else "long_parameter_lists"
                found[kind].append((len(given), f"{source.path.relative_to(ROOT)}:{function.lineno} {function.name}"))
    return {kind: sorted(functions, key=lambda each: (-each[0], each[1])) for kind, functions in found.items()}


def _is_kernel(function: Function) -> bool:
    decorators = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return any(ast.unparse(each) in KERNEL_DECORATORS for each in decorators)


def find_ways(sources: Collection[Source], graph: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """The files on the way of a configuration, and of a streaming request."""
    return {
        "config_way": find_way(sources, graph, CONFIG_START, CONFIG_TYPES),
        "request_way": find_way(sources, graph, REQUEST_START, REQUEST_TYPES, OTHER_WAYS),
    }


def count(sources: Collection[Source], layering: ModuleType) -> dict[str, float]:
    """All numbers, by their names in MOST and LEAST."""
    graph = layering.import_graph()
    rooms = Counter(source.path.parent for source in sources if source.path.name != "__init__.py")
    lines = [source.num_lines for source in sources]
    arrows = [
        (source.module, imported)
        for source in sources
        if source.module != "trtrun"
        for imported in layering.imported_modules(source.text)
        if layering.violation(source.module, imported) is not None
    ]
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {
        "circles": count_circles(graph),
        "arrows_up": len(arrows),
        "model_config_reads": sum(source.calls("read_model_config") for source in sources),
        "vague_docstrings": sum(text.startswith(VAGUE_BEGINNINGS) for each in sources for text in each.docstrings()),
        "largest_room": rooms.most_common(1)[0][1],
        **{kind: len(found) for kind, found in find_long_lists(sources).items()},
        "words": sum(len(path.read_text(encoding="utf-8").split()) for path in texts),
        **{name: len(found) for name, found in find_ways(sources, graph).items()},
        "files": len(sources),
        "median_lines": statistics.median(lines),
        "lines": sum(lines),
        "import_share": round(sum(source.last_import for source in sources) / sum(lines), 4),
    }


def find_unknown_types(sources: Collection[Source]) -> list[str]:
    """The types of REQUEST_TYPES and CONFIG_TYPES that nothing is declared as: renamed, so that a way would look
    shorter than it is."""
    declared = {name for source in sources for name in source.declared_types()}
    return [name for name in (*CONFIG_TYPES, *REQUEST_TYPES) if name not in declared]


def find_excess(numbers: Mapping[str, float]) -> list[str]:
    """A line for each number that is beyond its bound."""
    above = [f"{name}: {numbers[name]:g}, at most {most:g}" for name, most in MOST.items() if numbers[name] > most]
    below = [f"{name}: {numbers[name]:g}, at least {least:g}" for name, least in LEAST.items() if numbers[name] < least]
    return above + below


def main() -> int:
    """Print the numbers; 1 where one is beyond its bounds and that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", action="store_true", help="end with 1 where a number is beyond its bounds")
    parser.add_argument("--parameters", action="store_true", help="list the functions with many parameters")
    parser.add_argument("--ways", action="store_true", help="list the files on the two ways")
    options = parser.parse_args()
    sources, layering = read_sources(), load_layering()
    if options.parameters:
        for kind, functions in find_long_lists(sources).items():
            print("\n".join(f"{kind}: {number:3} {where}" for number, where in functions))
    if options.ways:
        for name, modules in find_ways(sources, layering.import_graph()).items():
            print("\n".join(f"{name}: {module}" for module in modules))
    numbers = count(sources, layering)
    for name, number in numbers.items():
        print(f"{name:27} {number:>9g}")
    excess = find_excess(numbers)
    excess += [
        f"no parameter or field is declared as {name}: it has another name" for name in find_unknown_types(sources)
    ]
    if options.bounds:
        print("".join(f"{line}\n" for line in excess), end="", file=sys.stderr)
    print(json.dumps(numbers))
    return 1 if options.bounds and excess else 0


if __name__ == "__main__":
    sys.exit(main())
