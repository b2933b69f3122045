"""Something in the place of torch for a process that compiles kernels, which stand beside functions that use it.

Importing torch takes seconds, and more where sixteen processes do it at once; a kernel's source needs none of it. What
modules take from torch while they are imported is a thing of no use; a process that needed more would fail, and whoever
launches the kernel compiles it. It knows Python's import. It does not know kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Thing:
    """Whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return _thing(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As a decorator it leaves a function as it is."""
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if is_decorator else _Thing()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, index: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _thing(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""


def _thing(name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return _Thing()


def replace_torch() -> None:
    """From here on nobody in this process imports torch."""
    sys.meta_path.insert(0, _Finder())
