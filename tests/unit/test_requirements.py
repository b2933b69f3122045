"""What the package imports, it installs: without extras everything starts but the server and what only GPUs run."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

# Rooms that start only where an extra is there, and its libraries; who opens them looks for these first.
OF_EXTRAS = {
    "launch/serve": {"serve", "grpcio", "protobuf"},  # tritonclient brings the last two
    "trtrun/kernels/triton": {"triton"},  # comes with torch for GPUs
    "trtrun/tools/training": {"train"},
    "launch/bench/peers": {"transformers", "vllm"},  # the peers themselves, in processes of their own
}


def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that setup.py hands to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    spec = importlib.util.spec_from_file_location("own_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return given


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def at_start(tree: ast.Module) -> Iterator[str]:
    """The libraries that a module imports when it is imported itself: not inside functions, nor for types alone."""
    open_blocks: list[ast.AST] = [tree]
    while open_blocks:
        for node in ast.iter_child_nodes(open_blocks.pop()):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield (node.module or "").partition(".")[0]
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                open_blocks.append(node)


def test_modules_import_what_is_installed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = installed(monkeypatch)
    always, extras = names(arguments["install_requires"]), arguments["extras_require"]
    distributions = packages_distributions()
    lacking, seen = [], set()
    for package in ("parallel", "trtrun", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            allowed = set(always)
            for room, brought in OF_EXTRAS.items():
                if place.startswith(f"{room}/"):
                    allowed |= brought.union(*(names(extras.get(name, [])) for name in brought))
            for library in at_start(ast.parse(path.read_text(encoding="utf-8"))):
                if library in {"parallel", "trtrun", "launch", "__future__"} or library in sys.stdlib_module_names:
                    continue
                brought_by = {canonicalize_name(name) for name in distributions.get(library, [library])}
                seen.add(library)
                if not brought_by & allowed:
                    lacking.append(f"{place}: {library}")
    assert {"torch", "msgspec", "pydantic"} <= seen
    assert not lacking, "\n".join(lacking)
