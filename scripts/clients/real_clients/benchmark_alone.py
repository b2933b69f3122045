"""Runs the benchmark of a serving engine without the engine: its own file, and what that imports of the package.

    python benchmark_alone.py FOLDER MODULE PREFIX[,PREFIX…] [ARGUMENT…]

FOLDER holds the package's Python files, unpacked from its wheel. Modules whose names begin with a PREFIX are the
package's own; every other module of the package is a stand-in whose names can be imported and do nothing, as its real
one would want GPUs and gigabytes. So are modules of other packages that are not installed. It knows no benchmark.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_INS = ("torch", "datasets", "PIL", "pybase64", "vllm_flash_attn", "cloudpickle", "tqdm_multiprocess")
"""Packages that benchmarks name and do not use against a server: stand-ins where they are not installed."""


class Nothing(type):
    """A class whose every attribute is such a class, too: enough for type hints, base classes and decorators."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_nothing(name)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]  # as a decorator
        return make_nothing("nothing")

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False


def make_nothing(name: str) -> Any:
    """A stand-in of a name."""
    return Nothing(name, (), {})


class StandIn(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_nothing(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package's own modules by their prefixes, and stand-ins for the others."""

    def __init__(self, folder: Path, package: str, own: Sequence[str]) -> None:
        self._folder, self._package, self._own = folder, package, own

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The place of a module."""
        top = name.partition(".")[0]
        if top == self._package and any(name == own or name.startswith(own + ".") for own in self._own):
            file = self._folder.joinpath(*name.split("."))
            if (file / "__init__.py").exists():
                return importlib.util.spec_from_file_location(
                    name, file / "__init__.py", submodule_search_locations=[str(file)]
                )
            if file.with_suffix(".py").exists():
                return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))
            return None
        if top == self._package or top in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A stand-in."""
        module = StandIn(spec.name)
        if spec.name == "vllm.tokenizers":  # reading one is all that the benchmark wants of it
            module.get_tokenizer = _read_tokenizer  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _read_tokenizer(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def main() -> None:
    """Read the command line and run the benchmark as the program that it is."""
    folder, module, prefixes, *arguments = sys.argv[1:]
    finder = Finder(Path(folder), module.partition(".")[0], prefixes.split(","))
    sys.meta_path.insert(0, _OwnFirst(finder))
    sys.meta_path.append(finder)
    sys.argv = [module, *arguments]
    if not hasattr(importlib.import_module(module), "add_cli_args"):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    # vLLM's is a command of its command line.
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    sys.modules[module].add_cli_args(parser)
    sys.modules[module].main(parser.parse_args())


class _OwnFirst(importlib.abc.MetaPathFinder):
    """The package's own, before what may be installed under its name."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The place of a module of the package; None for every other."""
        return None if name.partition(".")[0] in STAND_INS else self._finder.find_spec(name, path, target)


if __name__ == "__main__":
    main()
