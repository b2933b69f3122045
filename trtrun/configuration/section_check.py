"""A section of the YAML file made from what stands in it, or one line that says which key is wrong and how.

It knows classes of sections by their fields only, so that whoever reads a section has the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_args

from pydantic import ValidationError

from trtrun.configuration.launch_config import Section
from trtrun.configuration.yaml_source import describe_kind
from trtrun.errors import MOST_SHOWN, ConfigError, LibraryPanicError, RustLibrary, nearest, shorten

AnySection = TypeVar("AnySection", bound=Section)


def check_section(kind: type[AnySection], values: object, where: str, path: Sequence[str] = ()) -> AnySection:
    """Make a section of what the YAML file holds for it.

    Args:
        kind: class of the section.
        values: what stands in the file.
        where: what to call the file in messages.
        path: keys that lead to the section, for messages.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    try:
        with RustLibrary("pydantic"):
            return kind.model_validate(values)
    except LibraryPanicError as panic:
        raise ConfigError(f"{where} cannot be used: {panic}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error, kind, path)}") from None


def _first_problem(error: ValidationError, kind: type[Section], above: Sequence[str]) -> str:
    """Return the first problem of a validation as one line: `path: what is wrong`. Unknown keys come first, because a
    misspelt key is often why another one is missing."""
    problems = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    problem = problems[0]
    below = [str(part) for part in problem["loc"]]
    path = [*above, *below]
    name = ".".join(part if part.isprintable() and len(part) <= MOST_SHOWN else shorten(part) for part in path)
    message = problem["msg"]
    if problem["type"] == "extra_forbidden":
        return f"{name}: unknown key{nearest(path[-1], _known_keys(kind, below[:-1]))}"
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{name}: {message}" if name else message
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        known = _known_keys(kind, below)
        section = f"a section with keys ({', '.join(known)})" if known else "a section of names, each with its value"
        return f"{name}: must be {section}, not {describe_kind(problem['input'])}"
    if problem["type"].startswith("path_"):
        message = "must be the path of a file or directory"
    message = message.replace("Input should be", "must be").split(", unable")[0].split(", got")[0]
    shown = "nothing" if problem["input"] is None else shorten(problem["input"])
    return f"{name}: {message}, not {shown}".replace("\n", " ")


def _known_keys(kind: type[Section], path: Sequence[str]) -> list[str]:
    """Names that the section at `path` inside of `kind` may hold."""
    for name in path:
        field = kind.model_fields.get(name)
        inner = [] if field is None else [field.annotation, *get_args(field.annotation)]
        sections = [item for item in inner if isinstance(item, type) and issubclass(item, Section)]
        if not sections:
            return []
        kind = sections[0]
    return kind.known_keys()
